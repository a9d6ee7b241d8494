"""Reading GGUF models: typed metadata and tensors by name, from one file or a split one.

Values and tensors are decoded when they are asked for; `gguf_header` has checked that they lie
within the file. Knows nothing about architectures.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specdec.errors import ModelFileError, UnsupportedError
from specdec.ggml_types import BLOCK_LAYOUTS
from specdec.gguf_header import Header, TensorInfo, quoted, read_header

if TYPE_CHECKING:
    import torch

__all__ = ["REQUIRED", "GGUFFile", "Metadata", "TensorInfo"]

# The default of the typed getters: a missing key is an error.
REQUIRED: Any = object()

# No width and no count within a layer is greater: products of three are far from 64 bits.
MAX_SIZE = 1 << 20

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
# The numpy kinds of metadata scalars.
_KINDS = {bool: "b", int: "i", float: "f"}
T = TypeVar("T")


class Metadata(Mapping[str, Any]):
    """The metadata of a model by key, decoded at first use, with the user's overrides on top.

    Scalars are Python values, arrays of numbers read-only numpy arrays, other arrays lists. Those
    are decoded at every use: the strings of a vocabulary take more memory than some models.
    """

    def __init__(self, header: Header, overrides: Mapping[str, int | float | bool | str]) -> None:
        self._header = header
        self._decoded: dict[str, Any] = dict(overrides)
        self._keys = dict.fromkeys((*header.values, *overrides))

    def __getitem__(self, key: str) -> Any:
        if key in self._decoded:
            return self._decoded[key]
        value = self._header.decode(key)
        if not isinstance(value, list):
            self._decoded[key] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys


class GGUFFile:
    """An open GGUF model. Use it as a context manager, or `close` it."""

    def __init__(
        self, headers: Sequence[Header], overrides: Mapping[str, int | float | bool | str]
    ) -> None:
        self._headers = headers
        self.path = headers[0].path
        self.version = headers[0].version
        self.metadata = Metadata(headers[0], overrides)
        self.tensors: Mapping[str, TensorInfo] = _all_tensors(headers)
        self.on_load: Callable[[], None] | None = None
        """Called after each `load`."""

    @classmethod
    def open(
        cls,
        path: str | Path,
        overrides: Mapping[str, int | float | bool | str] = MappingProxyType({}),
    ) -> Self:
        """The model at `path`; of a split model `path` is the first file, and the others follow.

        `overrides` are metadata values that win over the file's (llama.cpp: ``--override-kv``).
        Raises `ModelFileError` if a file is missing, no GGUF, or contradicts itself.
        """
        return cls(_read_shards(Path(path)), overrides)

    def close(self) -> None:
        """Lets the memory maps go; arrays from `raw` and `metadata` keep theirs alive."""
        for header in self._headers:
            with suppress(BufferError):
                header.data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def n_bytes(self) -> int:
        """The size of all files of the model."""
        return sum(len(header.data) for header in self._headers)

    @property
    def architecture(self) -> str:
        """The name of the architecture, such as ``"qwen3"``."""
        return self.get_str("general.architecture")

    def key(self, suffix: str) -> str:
        """The key of a value of this architecture: ``"block_count"`` to ``"qwen3.block_count"``."""
        return f"{self.architecture}.{suffix}"

    def get_int(self, key: str, default: T = REQUIRED) -> int | T:
        """The integer at `key`, or `default`; without a default a missing key is an error."""
        value: int | T = self._get(key, default, "an integer", lambda value: type(value) is int)
        return value

    def check_size(self, key: str, size: int) -> None:
        """Raises `ModelFileError` unless ``size``, from `key` or its default, is a possible one."""
        if not 1 <= size <= MAX_SIZE:
            raise ModelFileError(
                f"{self.path}: {key} is {size}, expected 1 to {MAX_SIZE}; the file is damaged"
            )

    def get_float(self, key: str, default: T = REQUIRED) -> float | T:
        """The number at `key` as a float, or `default`; infinity and NaN are none."""
        value = self._get(key, default, "a number", _is_finite)
        return float(value) if type(value) is int else value

    def get_bool(self, key: str, default: T = REQUIRED) -> bool | T:
        """The truth value at `key`, or `default`."""
        value: bool | T = self._get(
            key, default, "true or false", lambda value: type(value) is bool
        )
        return value

    def get_str(self, key: str, default: T = REQUIRED) -> str | T:
        """The text at `key`, or `default`."""
        value: str | T = self._get(key, default, "a string", lambda value: type(value) is str)
        return value

    def get_ints(
        self, key: str, default: T = REQUIRED, *, length: int | None = None
    ) -> list[int] | T:
        """The integers at `key`, or `default`.

        With `length` the array must have that many, and one number stands for `length` equal ones
        (llama.cpp: ``get_key_or_arr``).
        """
        value: list[int] | T = self._get_array(key, default, "integers", "iu", length)
        return value

    def get_floats(
        self, key: str, default: T = REQUIRED, *, length: int | None = None
    ) -> list[float] | T:
        """The numbers at `key` as floats, or `default`; `length` as in `get_ints`."""
        numbers = self._get_array(key, default, "numbers", "fiu", length)
        return numbers if numbers is default else [float(number) for number in numbers]

    def get_bools(
        self, key: str, default: T = REQUIRED, *, length: int | None = None
    ) -> list[bool] | T:
        """The truth values at `key` (numbers count if not 0), or `default`; see `get_ints`."""
        values = self._get_array(key, default, "truth values", "biu", length)
        return values if values is default else [bool(value) for value in values]

    def get_strs(self, key: str, default: T = REQUIRED) -> list[str] | T:
        """The strings at `key`, or `default`."""
        value = self._get(key, default, "an array of strings", _is_strings)
        return value if value is default else list(value)

    def info(self, name: str) -> TensorInfo:
        """What the header says about tensor `name`; `ModelFileError` if there is none."""
        if name not in self.tensors:
            raise ModelFileError(
                f"{self.path}: tensor {quoted(name)} is missing; the file is incomplete or made "
                "for another program"
            )
        return self.tensors[name]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of tensor `name`, a read-only view of the file."""
        info = self.info(name)
        header = self._headers[info.file_index]
        if info.ggml_type not in BLOCK_LAYOUTS:
            raise self._unsupported(info)
        return np.frombuffer(header.data, np.uint8, info.n_bytes, info.offset)

    def release(self, name: str) -> None:
        """Gives the memory of tensor `name` back to the system; its bytes can be read again."""
        info = self.info(name)
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._headers[info.file_index].data.madvise(mmap.MADV_DONTNEED, first, end - first)

    def load(self, name: str) -> torch.Tensor:
        """Tensor `name` in new memory: float32, or the integer dtype of an integer tensor."""
        from specdec import quant

        info = self.info(name)
        if info.ggml_type not in quant.SUPPORTED:
            raise self._unsupported(info)
        tensor = quant.dequantize(self.raw(name), info.ggml_type, info.shape)
        if self.on_load is not None:
            self.on_load()
        return tensor

    def _unsupported(self, info: TensorInfo) -> UnsupportedError:
        from specdec import quant

        return UnsupportedError(
            f"{self._headers[info.file_index].path}: tensor {quoted(info.name)}: {info.ggml_type} "
            f"cannot be decoded; supported: {', '.join(quant.SUPPORTED)}"
        )

    def _get(self, key: str, default: Any, expected: str, accepts: Callable[[Any], bool]) -> Any:
        if key not in self.metadata:
            if default is not REQUIRED:
                return default
            raise ModelFileError(
                f"{self.path}: metadata key {quoted(key)} is missing, expected {expected}"
            )
        value = self.metadata[key]
        if not accepts(value):
            raise ModelFileError(
                f"{self.path}: metadata key {quoted(key)}: found {_describe(value)}, "
                f"expected {expected}"
            )
        return value

    def _get_array(self, key: str, default: Any, items: str, kinds: str, length: int | None) -> Any:
        """A list of the numbers at `key`, whose numpy kind is among `kinds`."""

        def accepts(value: Any) -> bool:
            if isinstance(value, np.ndarray):
                fits = value.dtype.kind in kinds and length in (None, len(value))
                return fits or (len(value) == 0 and not length)
            return length is not None and _KINDS.get(type(value), "none") in kinds

        expected = f"an array of {items}" if length is None else f"{length} {items}"
        value = self._get(key, default, expected, accepts)
        if value is default:
            return default
        return value.tolist() if isinstance(value, np.ndarray) else [value] * (length or 0)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_strings(value: Any) -> bool:
    """Whether a metadata value is an array of strings; an empty array of any type is one."""
    if isinstance(value, np.ndarray):
        return len(value) == 0
    return isinstance(value, list) and all(type(item) is str for item in value)


def _describe(value: Any) -> str:
    """A metadata value in a few words, for messages."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name}"
    if isinstance(value, list):
        return f"an array of {len(value)} {'strings' if _is_strings(value) else 'arrays'}"
    if isinstance(value, str):
        return f"the string {quoted(value)}"
    return f"the {type(value).__name__} {value}"


def _all_tensors(headers: Sequence[Header]) -> dict[str, TensorInfo]:
    """The tensors of all files of a model by name."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                first = headers[tensors[name].file_index].path
                raise ModelFileError(f"{header.path}: tensor {quoted(name)} is in {first}, too")
            tensors[name] = info
    return tensors


def _read_shards(path: Path) -> list[Header]:
    """The headers of all files of the model whose first file is `path`."""
    first = read_header(path)
    n_files = _split_number(first, "split.count", 1)
    if n_files <= 1:
        return [first]
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != n_files:
        raise ModelFileError(
            f"{path}: is one of {n_files} files of a split model, expected a name that ends in "
            f"-00001-of-{n_files:05d}.gguf; give it back its name"
        )
    paths = [
        path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, n_files + 1)
    ]
    number = _split_number(first, "split.no", 0)
    if number != 0:
        raise ModelFileError(
            f"{path}: is file {number + 1} of {n_files} of a split model; give the first one, "
            f"{paths[0].name}"
        )
    headers = [first]
    for index in range(1, n_files):
        headers.append(_read_sibling(paths[index], index, n_files))
    _check_complete(headers)
    return headers


def _read_sibling(path: Path, index: int, n_files: int) -> Header:
    """The header of file `index` (from 0) of a split model."""
    if not path.exists():
        raise ModelFileError(
            f"{path}: no such file, file {index + 1} of {n_files} of a split model; put all files "
            "into one directory"
        )
    header = read_header(path, index)
    found = _split_number(header, "split.no", -1), _split_number(header, "split.count", -1)
    if found != (index, n_files):
        raise ModelFileError(
            f"{path}: split.no and split.count are {found[0]} and {found[1]}, expected {index} and "
            f"{n_files}; the files are not of one model"
        )
    return header


def _check_complete(headers: Sequence[Header]) -> None:
    """Compares the number of tensors in all files with the one that the first file announces."""
    n_found = sum(len(header.tensors) for header in headers)
    n_expected = _split_number(headers[0], "split.tensors.count", n_found)
    if n_found != n_expected:
        raise ModelFileError(
            f"{headers[0].path}: found {n_found} tensors in {len(headers)} files, expected "
            f"{n_expected}; the files are not of one model"
        )


def _split_number(header: Header, key: str, default: int) -> int:
    """An integer about splitting, from the header of one file."""
    if key not in header.values:
        return default
    value = header.decode(key)
    if type(value) is not int:
        raise ModelFileError(
            f"{header.path}: metadata key {key!r}: found {_describe(value)}, expected an integer"
        )
    return value

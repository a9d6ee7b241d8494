"""The header of one GGUF file: a walk over a memory map that trusts nothing it reads.

`read_header` skips over every value, checking that it ends within the file; `Value.decode` turns
one into Python when it is asked for. So a vocabulary of 150,000 tokens costs little until used,
and no count in the file can make memory be taken that the file does not fill.
Source: the GGUF specification and ``gguf.cpp`` of ggml.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from specdec.errors import ModelFileError, UnsupportedError
from specdec.ggml_types import BLOCK_LAYOUTS, TYPE_NAMES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
# The specification's limit for keys; tensor names have a lower one, but longer ones do no harm.
MAX_NAME_BYTES = 65535
# Real files do not nest arrays at all.
MAX_NESTING = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about a tensor; `shape` is in torch order, the fastest axis last.

    `ggml_type` is a name such as ``"Q4_K"``, or ``"type 250"`` for an unknown number, whose
    `n_bytes` is 0. `offset` counts from the start of file number `file_index` of a split model.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    n_bytes: int
    file_index: int

    @property
    def n_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Value(NamedTuple):
    """Where a metadata value lies: its GGUF type number and the offset of its first byte."""

    type: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file, with its memory map."""

    path: Path
    data: mmap.mmap
    version: int
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    def decode(self, key: str) -> Any:
        """The value of `key`: a Python scalar, a list of strings or lists, or a numpy array.

        Arrays of numbers are read-only views of the file. Text that is not UTF-8 is decoded with
        replacement characters.
        """
        kind, offset = self.values[key]
        return _Reader(self.path, self.data, offset).decode(kind)


def read_header(path: Path, file_index: int = 0) -> Header:
    """The checked header of the file at `path`.

    Raises `ModelFileError` for a file that cannot be opened, is no GGUF or contradicts itself.
    """
    reader = _Reader(path, _map_file(path))
    version, n_tensors, n_values = _read_preamble(reader)
    values: dict[str, Value] = {}
    for _ in range(reader.count("metadata values", 13, n_values)):
        key = reader.name("metadata key")
        kind = reader.u32()
        if key in values:
            reader.fail(f"metadata key {quoted(key)} occurs twice")
        values[key] = Value(kind, reader.position)
        reader.skip(kind, key)
    n_tensors = reader.count("tensors", 24, n_tensors)
    tensors = _read_tensors(reader, n_tensors, _alignment(reader, values), file_index)
    return Header(path, reader.data, version, values, tensors)


def quoted(name: str) -> str:
    """`name` in quotes, on one line and not too long, for messages."""
    return repr(name if len(name) <= 80 else name[:80] + "…")


def _map_file(path: Path) -> mmap.mmap:
    """The file at `path`, mapped for reading."""
    try:
        status = path.stat()
        # Looked at before the file is opened: opening a pipe would wait for a writer.
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: is a directory; give the path of a GGUF file")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is not a regular file; give the path of a GGUF file")
        with path.open("rb") as file:
            if status.st_size == 0:
                raise ModelFileError(f"{path}: the file is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; check the path") from None
    except PermissionError:
        raise ModelFileError(f"{path}: permission denied; check who may read it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{path}: cannot be read: {reason}") from None


class _Reader:
    """A position in a memory map; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, position: int = 0) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = position

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {problem}")

    def advance(self, n_bytes: int) -> int:
        """Moves behind the next `n_bytes` and returns where they start."""
        start = self.position
        if n_bytes > self.size - start:
            self.fail(
                f"truncated or damaged header: {n_bytes} bytes expected at offset {start}, "
                f"found {self.size - start}; download the file again"
            )
        self.position = start + n_bytes
        return start

    def u32(self) -> int:
        value: int = _U32.unpack_from(self.data, self.advance(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self.data, self.advance(8))[0]
        return value

    def count(self, what: str, min_bytes: int, n_items: int | None = None) -> int:
        """A number of items (read here if not given) that the rest of the file can hold."""
        n_items = self.u64() if n_items is None else n_items
        if n_items * min_bytes > self.size - self.position:
            self.fail(
                f"truncated or damaged header: {n_items} {what} announced, but only "
                f"{self.size - self.position} bytes follow; download the file again"
            )
        return n_items

    def text(self) -> str:
        n_bytes = self.u64()
        start = self.advance(n_bytes)
        return self.data[start : start + n_bytes].decode("utf-8", "replace")

    def name(self, what: str) -> str:
        start = self.position
        if self.u64() > MAX_NAME_BYTES:
            self.fail(f"damaged header: {what} at offset {start} is longer than {MAX_NAME_BYTES}")
        self.position = start
        return self.text()

    def skip(self, kind: int, key: str, depth: int = 0) -> None:
        """Moves behind a value of type `kind` that belongs to metadata key `key`."""
        if kind in _NUMBERS:
            self.advance(_NUMBERS[kind].itemsize)
        elif kind == _STRING:
            self.advance(self.u64())
        elif kind == _ARRAY and depth < MAX_NESTING:
            self._skip_array(key, depth + 1)
        elif kind == _ARRAY:
            self.fail(f"metadata key {quoted(key)}: arrays nested deeper than {MAX_NESTING}")
        else:
            self.fail(f"metadata key {quoted(key)}: unknown value type {kind}, expected 0 to 12")

    def _skip_array(self, key: str, depth: int) -> None:
        kind = self.u32()
        items = f"items of metadata key {quoted(key)}"
        if kind in _NUMBERS:
            size = _NUMBERS[kind].itemsize
            self.advance(self.count(items, size) * size)
        elif kind == _STRING:
            self._skip_strings(self.count(items, 8))
        else:
            for _ in range(self.count(items, 12 if kind == _ARRAY else 1)):
                self.skip(kind, key, depth)

    def _skip_strings(self, n_items: int) -> None:
        """The hot loop of opening a file; one bounds check per string is done by `struct`."""
        position, data, unpack = self.position, self.data, _U64.unpack_from
        try:
            for _ in range(n_items):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError, IndexError):
            position = self.size + 1
        self.advance(position - self.position)

    def decode(self, kind: int) -> Any:
        """The value at the position, which then lies behind it. Only after `skip` accepted it."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._decode_array(self.u32(), self.u64())
        return self._decode_numbers(kind, 1)[0].item()

    def _decode_array(self, kind: int, n_items: int) -> Any:
        if kind in _NUMBERS:
            return self._decode_numbers(kind, n_items)
        if kind == _STRING:
            return self._decode_strings(n_items)
        return [self.decode(kind) for _ in range(n_items)]

    def _decode_strings(self, n_items: int) -> list[str]:
        """A vocabulary's worth of strings; `skip` has checked their bounds."""
        end, data, unpack = self.position, self.data, _U64.unpack_from
        strings = []
        for _ in range(n_items):
            start = end + 8
            end = start + unpack(data, end)[0]
            strings.append(str(data[start:end], "utf-8", "replace"))
        self.position = end
        return strings

    def _decode_numbers(self, kind: int, n_items: int) -> npt.NDArray[Any]:
        dtype = _NUMBERS[kind]
        start = self.advance(n_items * dtype.itemsize)
        numbers: npt.NDArray[Any] = np.frombuffer(self.data, dtype, n_items, start)
        return numbers != 0 if kind == _BOOL else numbers


def _read_preamble(reader: _Reader) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata values."""
    found = reader.data[:4]
    if found != MAGIC:
        reader.fail(f"is no GGUF file: it starts with {found!r}, expected {MAGIC!r}")
    reader.position = 4
    version = reader.u32()
    if version and not version & 0xFFFF:
        reader.fail("is a big-endian GGUF file, expected little-endian; convert it again")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{reader.path}: GGUF version {version} is not supported, expected 2 or 3; "
            "convert the model again"
        )
    return version, reader.u64(), reader.u64()


def _alignment(reader: _Reader, values: Mapping[str, Value]) -> int:
    """The alignment of tensor data in bytes, a power of two."""
    if "general.alignment" not in values:
        return DEFAULT_ALIGNMENT
    kind, offset = values["general.alignment"]
    alignment = _Reader(reader.path, reader.data, offset).decode(kind)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        found = alignment if isinstance(alignment, int) else "no integer"
        reader.fail(f"metadata key 'general.alignment' is {found}, expected a power of two")
    return alignment


def _read_tensors(
    reader: _Reader, n_tensors: int, alignment: int, file_index: int
) -> dict[str, TensorInfo]:
    """The tensors by name, in the order of the file, all within the file and apart."""
    entries = [_read_tensor(reader) for _ in range(n_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, ggml_type, offset in entries:
        if name in tensors:
            reader.fail(f"tensor {quoted(name)} occurs twice")
        if offset % alignment:
            reader.fail(
                f"tensor {quoted(name)}: offset {offset} is no multiple of the alignment "
                f"{alignment}; the file is damaged"
            )
        n_bytes = _n_bytes(reader, name, shape, ggml_type)
        if data_start + offset + n_bytes > reader.size:
            reader.fail(
                f"truncated: tensor {quoted(name)} ends at byte {data_start + offset + n_bytes}, "
                f"the file at {reader.size}; download it again"
            )
        tensors[name] = TensorInfo(name, shape, ggml_type, data_start + offset, n_bytes, file_index)
    _check_apart(reader, tensors)
    return tensors


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape in torch order, type name, and offset in the data section."""
    name = reader.name("tensor name")
    n_dims = reader.u32()
    if n_dims > MAX_DIMS:
        reader.fail(f"tensor {quoted(name)} has {n_dims} dimensions, expected at most {MAX_DIMS}")
    shape = tuple(reader.u64() for _ in range(n_dims))[::-1]
    if 0 in shape:
        reader.fail(f"tensor {quoted(name)} of shape {list(shape)} has no elements")
    number = reader.u32()
    return name, shape, TYPE_NAMES.get(number, f"type {number}"), reader.u64()


def _n_bytes(reader: _Reader, name: str, shape: tuple[int, ...], ggml_type: str) -> int:
    """The size of a tensor in bytes; 0 for an unknown type."""
    if ggml_type not in BLOCK_LAYOUTS:
        return 0
    block_size, type_size = BLOCK_LAYOUTS[ggml_type]
    row = shape[-1] if shape else 1
    if row % block_size:
        reader.fail(
            f"tensor {quoted(name)}: rows of {row} elements do not divide into {ggml_type} blocks "
            f"of {block_size}"
        )
    return math.prod(shape) // block_size * type_size


def _check_apart(reader: _Reader, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuses tensors that share bytes: loading them would take more memory than the file has."""
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.n_bytes)):
        if info.offset < end:
            reader.fail(f"tensors {quoted(before)} and {quoted(info.name)} overlap")
        end, before = info.offset + info.n_bytes, info.name

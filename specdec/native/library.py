"""The compiled kernels as Python functions of tensors; sizes are checked before every call."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from specdec.errors import UnsupportedError
from specdec.native.build import shared_library, written_at
from specdec.native.packing import PackedMatrix
from specdec.sampling.head import Best

if TYPE_CHECKING:
    from specdec.native.calls import LayerCalls

log = logging.getLogger(__name__)

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_FLOAT = ctypes.c_float


CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What a cache may keep; the numbers are those of ``CacheType`` in layer.h."""


ACTIVATION_BYTES = {"f32": 0, "int8": 1, "int16": 2}
"""What an activation is rounded to in products with quantised weights; 0 = not at all."""
KEPT_SCRATCH = 1 << 20
"""Floats of scratch memory that are kept although a pass needs far fewer."""
Rounding = Literal["f32", "int8", "int16"]


class Matrix(ctypes.Structure):
    """``Matrix`` of matmul.h."""

    _fields_ = (
        ("data", _POINTER),
        ("bias", _POINTER),
        ("rows", _INT),
        ("cols", _INT),
        ("kind", _INT),
    )


class ExpertMatrices(ctypes.Structure):
    """``ExpertMatrices`` of layer.h."""

    _fields_ = (("first", Matrix), ("bytes", _INT))


class Experts(ctypes.Structure):
    """``Experts`` of layer.h."""

    _fields_ = (
        *((name, _INT) for name in ("n_expert", "n_used", "uses_sigmoid", "is_normalised")),
        *((name, _FLOAT) for name in ("weight_scale", "min_weight_sum")),
        *(("router", Matrix), ("bias", _POINTER)),
        *((name, ExpertMatrices) for name in ("gate", "up", "down")),
        ("n_ff_shared", _INT),
        *((name, Matrix) for name in ("shared_gate", "shared_up", "shared_down")),
    )


class DeltaNet(ctypes.Structure):
    """``DeltaNet`` of layer.h."""

    _fields_ = (
        *((name, _INT) for name in ("n_key_heads", "n_value_heads", "state_size", "conv_kernel")),
        *((name, Matrix) for name in ("qkv", "gate", "alpha", "beta")),
        *((name, _POINTER) for name in ("convolution", "dt", "a", "norm")),
    )


class Layer(ctypes.Structure):
    """``Layer`` of layer.h."""

    _fields_ = (
        *((name, _INT) for name in ("n_embd", "n_head", "n_head_kv", "head_dim", "head_dim_v")),
        *((name, _INT) for name in ("n_ff", "window", "shares_kv", "has_value_norm")),
        *((name, _INT) for name in ("gates_output", "uses_gelu", "quantises")),
        *((name, _FLOAT) for name in ("rms_eps", "attention_scale", "value_scale")),
        ("output_scale", _FLOAT),
        *((name, Matrix) for name in ("q", "k", "v", "output", "gate", "up", "down")),
        *((name, _POINTER) for name in ("attn_norm", "ffn_norm", "q_norm", "k_norm", "sinks")),
        *((name, _POINTER) for name in ("post_attention_norm", "post_ffw_norm", "experts")),
        ("delta_net", _POINTER),
    )


class LayerCall(ctypes.Structure):
    """``LayerCall`` of layer.h."""

    _fields_ = (
        *((name, _POINTER) for name in ("layer", "keys", "values")),
        *((name, _INT) for name in ("capacity", "key_type", "value_type")),
        *((name, _POINTER) for name in ("cos", "sin")),
        ("n_rot", _INT),
        *((name, _POINTER) for name in ("inputs", "memory")),
        *((name, ctypes.POINTER(_POINTER)) for name in ("inputs_behind", "memory_behind")),
    )


class Head(ctypes.Structure):
    """``Head`` of layer.h."""

    _fields_ = (
        *(("matrix", Matrix), ("norm", _POINTER), ("bytes", _INT)),
        *(("eps", _FLOAT), ("softcap", _FLOAT)),
    )


class Embedding(ctypes.Structure):
    """``Embedding`` of layer.h."""

    _fields_ = (("table", Matrix), ("scale", _FLOAT))


class Pass(ctypes.Structure):
    """``Pass`` of layer.h."""

    _fields_ = (
        ("calls", ctypes.POINTER(LayerCall)),
        *((name, _INT) for name in ("n_layers", "n", "start", "n_threads", "sees_block")),
        ("rotary_start", _INT),
        *((name, _POINTER) for name in ("hidden", "scratch", "inputs", "head", "logits")),
        ("n_logits", _INT),
        *(("best_ids", ctypes.POINTER(_INT)), ("best", ctypes.POINTER(_FLOAT)), ("n_taps", _INT)),
        *((name, _POINTER) for name in ("taps", "tapped", "embedding", "tokens")),
    )


class Library:
    """The kernels. Every tensor is contiguous float32 on the CPU."""

    def __init__(self, path: str) -> None:
        """Loads a compiled library. Raises `UnsupportedError` if it does not fit this program."""
        try:
            if _is_cut_off(path):
                raise OSError("the file has no end")
            self._lib = lib = ctypes.CDLL(path)
        except OSError as error:
            raise UnsupportedError(f"native kernels: {path} cannot be loaded: {error}") from None
        for structure, size in (
            (Experts, lib.specdec_experts_size),
            (DeltaNet, lib.specdec_delta_net_size),
            (Layer, lib.specdec_layer_size),
            (LayerCall, lib.specdec_call_size),
            (Pass, lib.specdec_pass_size),
            (Head, lib.specdec_head_size),
            (Embedding, lib.specdec_embedding_size),
        ):
            size.restype = _INT
            if size() != ctypes.sizeof(structure):
                raise UnsupportedError(f"native kernels: {path} was built with other structures")
        lib.specdec_n_best.restype = _INT
        self.n_best = lib.specdec_n_best()
        """Logits of a row that are given in order, too."""
        self._scratch = threading.local()  # memory of a pass: the kernels run side by side
        lib.specdec_scratch.restype = _INT
        lib.specdec_scratch.argtypes = (_POINTER,)
        lib.specdec_layers.restype, lib.specdec_keys_values.restype = _INT, None
        lib.specdec_layers.argtypes = lib.specdec_keys_values.argtypes = (_POINTER,)
        lib.specdec_multiply.restype = None
        lib.specdec_multiply.argtypes = (
            *(_POINTER, _POINTER, _INT, _INT),
            *(_POINTER, _POINTER, _INT),
        )
        lib.specdec_kept.restype = _INT
        lib.specdec_kept.argtypes = (_INT, _INT)
        lib.specdec_rms_norm.restype = None
        lib.specdec_rms_norm.argtypes = (_POINTER, _POINTER, _INT, _INT, _FLOAT, _POINTER)
        lib.specdec_rows.restype = _INT
        lib.specdec_rows.argtypes = (_POINTER, _POINTER, _INT, _POINTER)

    def multiply(
        self,
        packed: PackedMatrix,
        x: Tensor,
        activations: Rounding,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The products [T, rows] of x [T, cols] and a packed matrix, plus ``bias`` [rows]."""
        x = floats(x, (x.shape[0], packed.cols))
        n = x.shape[0]
        out = torch.empty(n, packed.rows)
        n_bytes = ACTIVATION_BYTES[activations]
        kept = torch.empty(n * self._lib.specdec_kept(packed.cols, n_bytes))
        self._lib.specdec_multiply(
            ctypes.byref(matrix_struct(packed, bias)),
            x.data_ptr(),
            n,
            n_bytes,
            kept.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Rows x [T, D] divided by their root mean square, times ``weight`` [D]."""
        x = floats(x, (x.shape[0], weight.shape[0]))
        weight, out = floats(weight, weight.shape), torch.empty_like(x)
        self._lib.specdec_rms_norm(
            x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, out.data_ptr()
        )
        return out

    def rows(self, matrix: Matrix, indices: Tensor) -> Tensor:
        """Rows [T, cols] of a packed matrix by their indices [T] int64, as dequantised.

        Raises IndexError for an index that is none, ValueError for indices of another type.
        """
        indices = integers(indices)
        n, out = indices.shape[0], torch.empty(indices.shape[0], matrix.cols)
        if not self._lib.specdec_rows(ctypes.byref(matrix), indices.data_ptr(), n, out.data_ptr()):
            raise _no_row(matrix, indices)
        return out

    def run_layers(
        self,
        calls: LayerCalls,
        hidden: Tensor,
        start: int,
        *,
        sees_block: bool = False,
        inputs: Tensor | None = None,
        head: Head | None = None,
        n_logits: int = 0,
        taps: Sequence[int] = (),
        tapped: Tensor | None = None,
        embedding: Embedding | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Best] | None:
        """Runs rows ``hidden`` [T, D] at positions ``start`` ... through layers, in place.

        With an ``embedding`` they are those of ``tokens`` [T] int64, whatever they hold. With
        ``sees_block`` a row sees those behind it, too. The attention of a single layer may read
        other ``inputs`` [T, columns of q], without a norm. Returns the logits [``n_logits``, V] of
        the last rows by ``head`` and the best of them, if any. ``tapped`` [T, n_taps, D] gets the
        rows as layer k finds them, k being one of ``taps``, or as the last one leaves them, k being
        the number of layers; nothing for other k. The caller has checked every size. Raises
        IndexError for a token that the embedding does not have.
        """
        n_vocab = 0 if head is None else head.matrix.rows
        n_best = min(self.n_best, n_vocab)
        ids: Any = (_INT * (n_logits * n_best))()
        best: Any = (_FLOAT * (n_logits * n_best))()
        logits = torch.empty(n_logits, n_vocab)
        layers = (_INT * len(taps))(*taps)
        known = self._run(
            self._lib.specdec_layers,
            Pass(
                calls.array,
                len(calls.array),
                hidden.shape[0],
                start,
                torch.get_num_threads(),
                sees_block,
                calls.rotary_start,
                hidden.data_ptr(),
                None,
                None if inputs is None else inputs.data_ptr(),
                None if head is None else ctypes.addressof(head),
                logits.data_ptr(),
                n_logits,
                ids,
                best,
                len(taps),
                ctypes.addressof(layers) if taps else None,
                None if tapped is None else tapped.data_ptr(),
                None if embedding is None else ctypes.addressof(embedding),
                None if tokens is None else tokens.data_ptr(),
            ),
        )
        if embedding is not None and tokens is not None and not known:
            raise _no_row(embedding.table, tokens)
        return None if head is None else (logits, Best(n_best, ids, best))

    def write_keys_values(self, calls: LayerCalls, rows: Tensor, start: int) -> None:
        """Writes the keys and values that each layer makes of ``rows`` at ``start`` ...

        They are [T, columns of k], what attention reads. The caller has checked every size.
        """
        self._run(
            self._lib.specdec_keys_values,
            Pass(
                calls=calls.array,
                n_layers=len(calls.array),
                rotary_start=calls.rotary_start,
                n=rows.shape[0],
                start=start,
                n_threads=torch.get_num_threads(),
                hidden=rows.data_ptr(),
            ),
        )

    def _run(self, function: Callable[..., int | None], one: Pass) -> int | None:
        needed = self._lib.specdec_scratch(ctypes.byref(one))
        scratch: Tensor | None = getattr(self._scratch, "kept", None)
        if scratch is None or not needed <= scratch.numel() <= max(16 * needed, KEPT_SCRATCH):
            scratch = self._scratch.kept = torch.empty(needed)
        one.scratch = scratch.data_ptr()
        return function(ctypes.byref(one))


def matrix_struct(packed: PackedMatrix, bias: Tensor | None) -> Matrix:
    """What the kernels are told about a matrix; valid as long as its tensors live."""
    pointer = None if bias is None else bias.data_ptr()
    return Matrix(packed.data.data_ptr(), pointer, packed.rows, packed.cols, int(packed.kind))


def _no_row(matrix: Matrix, indices: Tensor) -> IndexError:
    return IndexError(f"an index is not in 0 ... {matrix.rows - 1}: {indices.tolist()}")


def integers(x: Tensor) -> Tensor:
    """``x`` [T] as the kernels read it. Raises ValueError for another shape, dtype or device."""
    if x.dim() != 1 or x.dtype != torch.int64 or not x.is_cpu:
        found = f"{x.dtype} {list(x.shape)} on {x.device}"
        raise ValueError(f"expected int64 [T] on the CPU, got {found}")
    return x if x.is_contiguous() else x.contiguous()


def floats(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` as the kernels read it. Raises ValueError for another shape, dtype or device."""
    if x.shape != shape or x.dtype != torch.float32 or not x.is_cpu:
        found = f"{x.dtype} {list(x.shape)} on {x.device}"
        raise ValueError(f"expected float32 {list(shape)} on the CPU, got {found}")
    return x if x.is_contiguous() else x.contiguous()


def _is_cut_off(path: str) -> bool:
    """Whether an ELF file ends before its table of sections, the last thing that linkers write.

    The system's loader does not look: it maps what is missing, and whoever reads it is killed.
    """
    with open(path, "rb") as file:
        start = file.read(64).ljust(64, b"\0")
        size = file.seek(0, os.SEEK_END)
    if start[:5] != b"\x7fELF\x02":  # the loader itself says what is wrong
        return False
    (table,) = struct.unpack_from("Q", start, 40)
    entry_size, n_entries = struct.unpack_from("2H", start, 58)
    return bool(size < table + entry_size * n_entries)


@functools.cache
def load_library() -> Library:
    """The kernels for this machine, built at first use, or again if they cannot be loaded.

    Raises `UnsupportedError`.
    """
    path = shared_library()
    try:
        return Library(str(path))
    except UnsupportedError as error:
        log.info("%s; building it again", error)
        return Library(str(shared_library(broken=written_at(path))))

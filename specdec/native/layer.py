"""Modules that run on the native kernels, with the signatures of their torch counterparts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from specdec import quant
from specdec.errors import CacheError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models.layers import LayerSpec
from specdec.models.rows import Rows
from specdec.native.library import (
    CACHE_TYPES,
    Layer,
    LayerCall,
    Library,
    Rounding,
    floats,
    matrix_struct,
)
from specdec.native.memory import WeightMemory
from specdec.native.packing import PackedMatrix, pack
from specdec.options import Activations

Transform = Callable[[str, Tensor], Tensor]
"""Rearranges the rows of a tensor by name, whatever its columns are."""

_MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_VECTORS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "sinks": "attn_sinks",
    "post_attention_norm": "post_attention_norm",
    "post_ffw_norm": "post_ffw_norm",
}
LAYER_PARTS = frozenset((*_MATRICES.values(), *_VECTORS.values(), "layer_output_scale"))
"""Names of the modules in a `DecoderLayer` that a `NativeLayer` has taken in."""


class Weights:
    """The tensors of a file, packed or as float32."""

    def __init__(self, file: GGUFFile, transform: Transform | None) -> None:
        self._file, self._transform = file, transform
        self._memory = WeightMemory()

    def matrix(self, name: str) -> PackedMatrix:
        """A matrix in its packed form."""
        info = self._file.info(name)
        rows, cols = info.shape
        raw = torch.from_numpy(self._file.raw(name).reshape(rows, -1).copy())
        if self._transform is not None:
            raw = self._transform(name, raw)
        packed = pack(raw, info.ggml_type, cols, self._memory)
        self._file.release(name)  # the packed form is the only copy
        return packed

    def vector(self, name: str) -> Tensor:
        """A tensor as float32, contiguous."""
        tensor = self._file.load(name).float()
        if self._transform is not None:
            tensor = self._transform(name, tensor)
        return tensor.contiguous()


class NativeLayer(nn.Module):
    """One block as its `LayerSpec` describes it, in one native call."""

    def __init__(
        self,
        library: Library,
        spec: LayerSpec,
        names: Sequence[str],
        prefix: str,
        weights: Weights,
        activations: Activations,
    ) -> None:
        """Packs the tensors ``names`` (the parameters of a `DecoderLayer`) under ``prefix``."""
        super().__init__()
        self.spec = spec
        self._library = library
        self._kept: list[Tensor] = []  # what the structure points to
        present = set(names)
        fields = {
            field: self._matrix(f"{prefix}{name}", f"{name}.bias" in present, weights)
            for field, name in _MATRICES.items()
            if f"{name}.weight" in present
        }
        vectors = {
            field: self._keep(weights.vector(f"{prefix}{name}.weight"))
            for field, name in _VECTORS.items()
            if f"{name}.weight" in present
        }
        self._attn_norm = vectors["attn_norm"]
        scale = 1.0
        if spec.has_output_scale:
            scale = float(weights.vector(f"{prefix}layer_output_scale.weight"))
        self._struct = Layer(
            n_embd=spec.n_embd,
            n_head=spec.n_head,
            n_head_kv=spec.n_head_kv,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            n_ff=spec.n_ff,
            window=spec.window,
            shares_kv=spec.shares_kv,
            uses_gelu=spec.activation == "gelu_tanh",
            quantises=activations == "int8",
            rms_eps=spec.rms_eps,
            attention_scale=spec.attention_scale,
            value_scale=spec.value_scale,
            output_scale=scale,
            **fields,
            **{field: vector.data_ptr() for field, vector in vectors.items()},
        )

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor

    def _matrix(self, name: str, has_bias: bool, weights: Weights) -> object:
        packed = weights.matrix(f"{name}.weight")
        self._keep(packed.data)
        bias = self._keep(weights.vector(f"{name}.bias")) if has_bias else None
        return matrix_struct(packed, bias)

    def forward(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        """[T, D] -> [T, D]; appends the rows to the cache. Raises `CacheError` if it is full."""
        return run_layers(self._library, [self], hidden, cache, layer, [rotary], rows)

    def remember(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor]
    ) -> None:
        """See `DecoderLayer.remember`. Raises `CacheError` if it is full."""
        n = hidden.shape[0]
        normed = self._library.rms_norm(hidden, self._attn_norm, self.spec.rms_eps)
        tables = _table(rotary[0], n), _table(rotary[1], n)
        call = self.call(cache, layer, n, tables)
        self._library.write_keys_values([call], normed, cache.length)

    def call(self, cache: KVCache, layer: int, n: int, rotary: tuple[Tensor, Tensor]) -> LayerCall:
        """What the kernels are told about ``n`` rows; valid as long as cache and tables live."""
        cos, sin = rotary
        keys, values = cache.reserve(layer, n)
        if keys.dtype not in CACHE_TYPES or values.dtype not in CACHE_TYPES:
            raise CacheError("native kernels: keys and values must be f32, f16 or bf16")
        return LayerCall(
            ctypes.addressof(self._struct),
            keys.data_ptr(),
            values.data_ptr(),
            keys.shape[1],
            CACHE_TYPES[keys.dtype],
            CACHE_TYPES[values.dtype],
            cos.data_ptr(),
            sin.data_ptr(),
            2 * cos.shape[1],
        )


def run_layers(
    library: Library,
    layers: Sequence[NativeLayer],
    hidden: Tensor,
    cache: KVCache,
    first: int,
    rotary: Sequence[tuple[Tensor, Tensor]],
    rows: Rows,
) -> Tensor:
    """[T, D] -> [T, D] through layers ``first`` ..., each with its rotary tables, in one call.

    Appends the rows to the cache. Raises `CacheError` if it is full.
    """
    n = hidden.shape[0]
    out = floats(hidden, (n, layers[0].spec.n_embd)).clone()
    tables = {id(pair): (_table(pair[0], n), _table(pair[1], n)) for pair in rotary}
    calls = [
        layer.call(cache, first + i, n, tables[id(pair)])
        for i, (layer, pair) in enumerate(zip(layers, rotary, strict=True))
    ]
    library.run_layers(calls, out, rows.start)
    return out


def _table(table: Tensor, n: int) -> Tensor:
    return floats(table, (n, table.shape[1]))


class NativeEmbedding(nn.Module):
    """An embedding table that stays in the file's bytes; rows are decoded when they are read."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        super().__init__()
        info = file.info(name)
        self._n_embd, self._type = info.shape[1], info.ggml_type
        self._rows: npt.NDArray[np.uint8] = file.raw(name).reshape(info.shape[0], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [T, D] float32 of token ids [T]."""
        raw = self._rows[tokens.numpy()]
        return quant.dequantize(raw, self._type, (*tokens.shape, self._n_embd)).float()


class NativeLinear(nn.Module):
    """A product with a packed matrix, and perhaps a bias [rows]."""

    def __init__(
        self,
        library: Library,
        packed: PackedMatrix,
        activations: Rounding,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._library, self._packed, self._activations = library, packed, activations
        self._bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., cols] -> [..., rows]."""
        rows = x.reshape(-1, x.shape[-1])
        out = self._library.multiply(self._packed, rows, self._activations, self._bias)
        return out.view(*x.shape[:-1], out.shape[-1])


class NativeRMSNorm(nn.Module):
    """`torch.nn.RMSNorm` whose rows do not depend on each other."""

    weight: Tensor

    def __init__(self, library: Library, weight: Tensor, eps: float) -> None:
        super().__init__()
        self._library, self._eps = library, eps
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out = self._library.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self._eps)
        return out.view(x.shape)


class NativeSoftCap(nn.Module):
    """`specdec.models.layers.SoftCap` whose rows do not depend on each other."""

    def __init__(self, library: Library, cap: float) -> None:
        super().__init__()
        self._library, self._cap = library, cap

    def forward(self, logits: Tensor) -> Tensor:
        """cap * tanh(logits / cap), or the logits without a cap."""
        return self._library.softcap(logits, self._cap) if self._cap else logits

"""Modules that run on the native kernels, with the signatures of their torch counterparts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from specdec import quant
from specdec.errors import CacheError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache, State
from specdec.models.delta_net import DeltaNetSpec
from specdec.models.layers import LayerSpec
from specdec.models.rows import Rows
from specdec.native.calls import layer_calls
from specdec.native.delta_net import delta_net_struct
from specdec.native.experts import expert_struct
from specdec.native.library import (
    ACTIVATION_BYTES,
    CACHE_TYPES,
    Embedding,
    Head,
    Layer,
    LayerCall,
    Library,
    Matrix,
    Rounding,
    floats,
    integers,
    matrix_struct,
)
from specdec.native.packing import PackedMatrix
from specdec.native.weights import LayerTensors, Weights
from specdec.options import Activations
from specdec.sampling.head import Best


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
        self._tensors = tensors = LayerTensors(weights, prefix, names)
        self.attn_norm = NativeRMSNorm(library, tensors.vector("attn_norm.weight"), spec.rms_eps)
        scale = 1.0
        if spec.has_output_scale:
            scale = float(tensors.vector("layer_output_scale.weight"))
        self._experts = expert_struct(spec, tensors) if spec.n_expert else None
        self._delta_net = None
        if isinstance(spec, DeltaNetSpec):
            self._delta_net = delta_net_struct(spec, tensors)
        self._struct = Layer(
            n_embd=spec.n_embd,
            n_head=spec.n_head,
            n_head_kv=spec.n_head_kv,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            n_ff=spec.n_ff,
            window=spec.window,
            shares_kv=spec.shares_kv,
            has_value_norm=spec.has_value_norm,
            uses_gelu=spec.activation == "gelu_tanh",
            quantises=activations == "int8",
            rms_eps=spec.rms_eps,
            attention_scale=spec.attention_scale,
            value_scale=spec.value_scale,
            output_scale=scale,
            experts=_address(self._experts),
            delta_net=_address(self._delta_net),
            attn_norm=tensors.address(self.attn_norm.weight),
            **_mixing_fields(spec, tensors),
            **_feed_forward_fields(spec, tensors),
        )

    def forward(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        """[T, D] -> [T, D]; appends the rows to the cache. Raises `CacheError` if it is full."""
        out = floats(hidden, (hidden.shape[0], self.spec.n_embd)).clone()
        calls = layer_calls(
            [self], cache, layer, out.shape[0], [rotary], keeps_every_state=rows.exact
        )
        self._library.run_layers(calls, out, cache.length)
        return out

    def remember(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor]
    ) -> None:
        """See `DecoderLayer.remember`. Raises `CacheError` if it is full."""
        self._write(self.attn_norm(hidden), cache, layer, rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer.keys_values`."""
        n = x.shape[0]
        cache = KVCache([self.spec.cache_shape], n, device=x.device)
        self._write(x, cache, 0, rotary)
        cache.advance(n)
        keys, values = cache.committed(0, torch.float32)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _write(
        self, normed: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor]
    ) -> None:
        """Writes the keys and values of rows [T, D] behind those in the cache."""
        n = normed.shape[0]
        rows = floats(normed, (n, self._struct.k.cols))
        calls = layer_calls([self], cache, layer, n, [rotary])
        self._library.write_keys_values(calls, rows, cache.length)

    @property
    def is_recurrent(self) -> bool:
        """Whether the layer carries a state from row to row."""
        return self._delta_net is not None

    def call(self, cache: KVCache, layer: int, n: int) -> LayerCall:
        """What the kernels are told about the buffers in a cache, with room for ``n`` more rows.

        Raises `CacheError` for a type that they do not know, ValueError for the cache of another
        layer.
        """
        keys, values = cache.reserve(layer, n)
        if keys.dtype not in CACHE_TYPES or values.dtype not in CACHE_TYPES:
            raise CacheError("native kernels: keys and values must be f32, f16 or bf16")
        _check_cache(self.spec.cache_shape, keys, values, cache.state(layer))
        return LayerCall(
            layer=ctypes.addressof(self._struct),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            capacity=keys.shape[1],
            key_type=CACHE_TYPES[keys.dtype],
            value_type=CACHE_TYPES[values.dtype],
        )


def _check_cache(shape: CacheShape, keys: Tensor, values: Tensor, state: State) -> None:
    """Raises ValueError unless the buffers of a cache are what a layer writes to."""
    n, capacity = shape.n_head_kv, keys.shape[1]
    expected = [(n, capacity, shape.head_dim), (n, capacity, shape.head_dim_v), *shape.state]
    buffers = [keys, values, *state]
    found = [tuple(buffer.shape) for buffer in buffers]
    if found != expected or any(part.dtype != torch.float32 for part in state):
        raise ValueError(f"expected a cache of {expected}, states in float32, got {found}")
    if not all(buffer.is_cpu and buffer.is_contiguous() for buffer in buffers):
        raise ValueError("expected a contiguous cache on the CPU")


def _address(structure: ctypes.Structure | None) -> int | None:
    return None if structure is None else ctypes.addressof(structure)


def _mixing_fields(spec: LayerSpec, tensors: LayerTensors) -> dict[str, Any]:
    """Fields of `Layer`: the branch that mixes rows, and what comes behind it."""
    fields: dict[str, Any] = {}
    if isinstance(spec, DeltaNetSpec):
        fields["output"] = tensors.matrix("ssm_out")
    else:
        fields |= _projections(spec, tensors)
        fields["gates_output"] = fields["q"].rows != spec.n_head * spec.head_dim
        fields["output"] = tensors.matrix("attn_output")
    fields |= {name: tensors.pointer(f"attn_{name}.weight") for name in ("q_norm", "k_norm")}
    fields["sinks"] = tensors.pointer("attn_sinks.weight")
    if spec.has_post_norms:
        fields["post_attention_norm"] = tensors.pointer("post_attention_norm.weight")
    return fields


def _projections(spec: LayerSpec, tensors: LayerTensors) -> dict[str, Matrix]:
    """The matrices of queries, keys and values, which may be one in the file."""
    if not tensors.has("attn_qkv.weight"):
        present = [name for name in "qkv" if tensors.has(f"attn_{name}.weight")]
        return {name: tensors.matrix(f"attn_{name}") for name in present}
    n_q, n_k = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    pieces = tensors.pieces("attn_qkv", n_q, n_k, spec.n_head_kv * spec.head_dim_v)
    return dict(zip("qkv", pieces, strict=True))


def _feed_forward_fields(spec: LayerSpec, tensors: LayerTensors) -> dict[str, Any]:
    """Fields of `Layer`: the feed-forward branch unless it is routed, and the norms around it."""
    fields: dict[str, Any] = {"ffn_norm": tensors.pointer(f"{spec.ffn_norm}.weight")}
    if not spec.n_expert:
        fields |= {name: tensors.matrix(f"ffn_{name}") for name in ("gate", "up", "down")}
    if spec.has_post_norms:
        fields["post_ffw_norm"] = tensors.pointer("post_ffw_norm.weight")
    return fields


class LayerStack:
    """All layers of a model, and what follows the last one, in as few calls as possible."""

    def __init__(
        self,
        library: Library,
        norm: Tensor,
        eps: float,
        output: PackedMatrix,
        rounding: Rounding,
        softcap: float,
        embedding: nn.Module,
        embedding_scale: float = 1.0,
    ) -> None:
        """``norm`` [D] and ``output`` [V, D] make logits of the last hidden states.

        ``rounding`` is that of the product's input; ``softcap`` c in c * tanh(logits / c), or 0.
        Rows of ``embedding``, times a scale, are the first ones.
        """
        self._library = library
        self._kept = norm, output
        matrix, n_bytes = matrix_struct(output, None), ACTIVATION_BYTES[rounding]
        self._head = Head(matrix, norm.data_ptr(), n_bytes, eps, softcap)
        self._embedding, self._scale = embedding, embedding_scale
        self._table = None
        if isinstance(embedding, PackedEmbedding):
            self._table = Embedding(embedding.matrix, embedding_scale)

    def __call__(
        self,
        layers: Sequence[NativeLayer],
        tokens: Tensor,
        cache: KVCache,
        rotary: Sequence[tuple[Tensor, Tensor]],
        rows: Rows,
        *,
        n_logits: int,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Best] | None]:
        """See `specdec.models.base.RunLayers`. Raises `CacheError` if the cache is full."""
        n, n_embd, table = tokens.shape[0], layers[0].spec.n_embd, self._table
        if table is None:
            out = floats(self._embedding(tokens) * self._scale, (n, n_embd))
        else:
            tokens, out = integers(tokens), torch.empty(n, n_embd)
        tapped = torch.empty(n, len(taps), n_embd) if taps else None
        start = cache.length
        calls = layer_calls(layers, cache, 0, n, rotary, start, keeps_every_state=rows.exact)
        logits = self._library.run_layers(
            calls,
            out,
            start,
            head=self._head if n_logits else None,
            n_logits=n_logits,
            taps=taps,
            tapped=tapped,
            embedding=table,
            tokens=None if table is None else tokens,
        )
        return out, tapped, logits


class PackedEmbedding(nn.Module):
    """An embedding table that is the packed output matrix, too."""

    def __init__(self, library: Library, packed: PackedMatrix) -> None:
        super().__init__()
        self._library, self._packed = library, packed
        self.matrix = matrix_struct(packed, None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [T, D] float32 of token ids [T]. Raises IndexError for one that is none."""
        return self._library.rows(self.matrix, tokens)


class NativeEmbedding(nn.Module):
    """An embedding table that stays in the file's bytes; rows are decoded when they are read."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        super().__init__()
        info = file.info(name)
        self._n_embd, self._type = info.shape[1], info.ggml_type
        self._rows: npt.NDArray[np.uint8] = file.raw(name).reshape(info.shape[0], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [T, D] float32 of token ids [T]. Raises IndexError for one that is none."""
        if (tokens < 0).any():
            raise IndexError(f"a token is not in 0 ... {len(self._rows) - 1}: {tokens.tolist()}")
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

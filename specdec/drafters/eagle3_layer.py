"""The decoder layer of EAGLE-3, in torch operations and in one native call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.kv_cache import KVCache
from specdec.models.layers import DecoderLayer, LayerSpec
from specdec.models.rows import Rows
from specdec.native.calls import LayerCalls, layer_calls
from specdec.native.library import Library, floats
from specdec.native.modules import Packer


class PairLayer(DecoderLayer):
    """A decoder layer whose attention reads a token's embedding and a state, side by side."""

    def __init__(self, spec: LayerSpec, *, norm_before_residual: bool) -> None:
        super().__init__(spec)
        self.norm_before_residual = norm_before_residual
        self.attn_norm_2 = nn.RMSNorm(spec.n_embd, eps=spec.rms_eps)
        n_q, n_kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
        self.attn_q = nn.Linear(2 * spec.n_embd, n_q, bias=False)
        self.attn_k = nn.Linear(2 * spec.n_embd, n_kv, bias=False)
        self.attn_v = nn.Linear(2 * spec.n_embd, n_kv, bias=False)

    def pair(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input [T, 2D] and the residual stream [T, D] of pairs [T, D], [T, D]."""
        return _pair(self, embeddings, states)

    def write_pairs(
        self, embeddings: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache
    ) -> None:
        """Appends the keys and values of pairs [T, D], [T, D] to the cache."""
        joined, _ = self.pair(embeddings, states)
        cache.append(0, *self.keys_values(joined, rotary))

    def run(
        self, embeddings: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache
    ) -> Tensor:
        """The layer's output [1, D] for one pair, whose keys and values go into the cache."""
        joined, hidden = self.pair(embeddings, states)
        rows = Rows(cache.length, 1, exact=True)
        keys, values = cache.append(0, *self.keys_values(joined, rotary))
        mixed = self.attend_causal(self.queries(joined, rotary), keys, values, rows)
        hidden = hidden + self.project_attention(mixed)
        return self.finish(hidden, self.feed_forward(self.ffn_norm(hidden), rows))


class NativePairLayer(nn.Module):
    """`PairLayer` on packed weights."""

    def __init__(self, library: Library, layer: PairLayer, packer: Packer) -> None:
        """Packs the tensors of ``layer``, which is on the meta device."""
        super().__init__()
        self.spec, self.norm_before_residual = layer.spec, layer.norm_before_residual
        self._library = library
        self._native = packer.layer(layer, "blk.0")
        self.attn_norm, self.attn_norm_2 = layer.attn_norm, layer.attn_norm_2

    def run(
        self, embeddings: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache
    ) -> Tensor:
        """See `PairLayer.run`. Raises `CacheError` if the cache is full."""
        joined, hidden = _pair(self, embeddings, states)
        out = floats(hidden, (1, self.spec.n_embd)).clone()
        calls, inputs = self._calls(joined, rotary, cache)
        self._library.run_layers(calls, out, cache.length, inputs=inputs)
        return out

    def write_pairs(
        self, embeddings: Tensor, states: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache
    ) -> None:
        """See `PairLayer.write_pairs`. Raises `CacheError` if the cache is full."""
        joined, _ = _pair(self, embeddings, states)
        calls, inputs = self._calls(joined, rotary, cache)
        self._library.write_keys_values(calls, inputs, cache.length)

    def _calls(
        self, joined: Tensor, rotary: tuple[Tensor, Tensor], cache: KVCache
    ) -> tuple[LayerCalls, Tensor]:
        n = joined.shape[0]
        calls = layer_calls([self._native], cache, 0, n, [rotary])
        return calls, floats(joined, (n, 2 * self.spec.n_embd))


def _pair(
    layer: PairLayer | NativePairLayer, embeddings: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    normed = layer.attn_norm_2(states)
    joined = torch.cat((layer.attn_norm(embeddings), normed), dim=-1)
    return joined, normed if layer.norm_before_residual else states

"""Gated delta net: a recurrent layer whose memory is a matrix per head (arXiv 2412.06464).

With u = silu(causal depthwise convolution of attn_qkv x), split into q, k (one per key head, made
unit length) and v; value head j uses key head j mod (number of key heads):

    S = S * exp(ssm_a * softplus(ssm_alpha x + ssm_dt))       decay, per value head
    S = S + k (x) sigmoid(ssm_beta x) * (v - S^T k)           the delta rule
    out = ssm_out (rms(S^T q / sqrt(N)) * ssm_norm * silu(attn_gate x))

What a row leaves behind, S and the last inputs of the convolution, is kept in the cache row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.kv_cache import CacheShape, KVCache
from specdec.models.layers import BiasOnly, DecoderLayer, LayerSpec, WeightOnly
from specdec.models.rows import Rows, by_element, narrow_linear

CHUNK = 64
"""Rows of a prompt that are taken together."""


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(LayerSpec):
    """A block with a gated delta net in place of attention."""

    n_key_heads: int = 0
    n_value_heads: int = 0
    state_size: int = 0
    """N, the width of keys and values."""
    conv_kernel: int = 0
    """Rows that the convolution sees, the current one included."""

    @property
    def n_channels(self) -> int:
        """C, the width of the convolution: q, k and v side by side."""
        return (2 * self.n_key_heads + self.n_value_heads) * self.state_size

    @property
    def cache_shape(self) -> CacheShape:
        """Nothing per position; the convolution's last inputs and S."""
        inputs = (self.conv_kernel - 1, self.n_channels)
        memory = (self.n_value_heads, self.state_size, self.state_size)
        return CacheShape(0, 0, 0, state=(inputs, memory))

    def new_layer(self) -> DecoderLayer:
        """See `LayerSpec.new_layer`."""
        return DeltaNetLayer(self)


class DeltaRow(NamedTuple):
    """What one row does to the memory; or T rows, with a leading axis."""

    q: Tensor
    """[VH, N], scaled."""
    k: Tensor
    """[VH, N]."""
    v: Tensor
    """[VH, N]."""
    log_decay: Tensor
    """[VH], the logarithm of the factor on S, at most 0."""
    beta: Tensor
    """[VH], how much of the error is written."""


class DeltaNetLayer(DecoderLayer):
    """A decoder layer as its `DeltaNetSpec` describes it."""

    spec: DeltaNetSpec

    def add_attention(self, spec: LayerSpec) -> None:
        """Makes the parameters of the recurrent branch."""
        assert isinstance(spec, DeltaNetSpec)
        n_heads, width = spec.n_value_heads, spec.n_value_heads * spec.state_size
        self.attn_qkv = nn.Linear(spec.n_embd, spec.n_channels, bias=False)
        self.attn_gate = nn.Linear(spec.n_embd, width, bias=False)
        self.ssm_conv1d = WeightOnly(spec.n_channels, spec.conv_kernel)
        self.ssm_alpha = nn.Linear(spec.n_embd, n_heads, bias=False)
        self.ssm_beta = nn.Linear(spec.n_embd, n_heads, bias=False)
        self.ssm_dt = BiasOnly(n_heads)
        self.ssm_a = nn.Parameter(torch.empty(n_heads))
        self.ssm_norm = nn.RMSNorm(spec.state_size, eps=spec.rms_eps)
        self.ssm_out = nn.Linear(width, spec.n_embd, bias=False)

    def forward(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        """[T, D] -> [T, D]; keeps the states behind the rows that count, or behind the last one."""
        x = self.attn_norm(hidden)
        tail, memory = cache.state(layer)
        inputs = torch.cat((tail, self.attn_qkv(x)))  # [K - 1 + T, C]
        parts = self._rows(x, inputs)
        out = torch.zeros_like(parts.v)
        size = 1 if rows.exact else CHUNK
        for start in range(0, rows.count, size):
            end = min(start + size, rows.count)
            chunk = DeltaRow(*(part[start:end] for part in parts))
            memory, out[start:end] = delta_rows(memory, chunk)
            if rows.exact or end == rows.count:
                tail = inputs[end : end + self.spec.conv_kernel - 1].clone()
                cache.put_state(layer, end, (tail, memory))
        gate = by_element(F.silu, self.attn_gate(x))
        hidden = hidden + self.ssm_out(self.ssm_norm(out).flatten(1) * gate)
        x = getattr(self, self.spec.ffn_norm)(hidden)
        return self.finish(hidden, self.feed_forward(x, rows))

    def _rows(self, x: Tensor, inputs: Tensor) -> DeltaRow:
        """Queries, keys, values and gates of rows x [T, D]."""
        spec, count = self.spec, x.shape[0]
        mixed = torch.zeros_like(inputs[:count])
        for i, weight in enumerate(self.ssm_conv1d.weight.unbind(dim=1)):
            mixed = mixed + inputs[i : i + count] * weight
        heads = by_element(F.silu, mixed).reshape(count, -1, spec.state_size)
        counts = [spec.n_key_heads, spec.n_key_heads, spec.n_value_heads]
        q, k, v = torch.split(heads, counts, dim=1)
        q, k = (F.normalize(part, dim=-1, eps=spec.rms_eps) for part in (q, k))
        repeats = (1, spec.n_value_heads // spec.n_key_heads, 1)
        step = narrow_linear(x, self.ssm_alpha.weight) + self.ssm_dt.bias
        log_decay = self.ssm_a * by_element(F.softplus, step)
        beta = by_element(torch.sigmoid, narrow_linear(x, self.ssm_beta.weight))
        q = q * spec.state_size**-0.5
        return DeltaRow(q.repeat(repeats), k.repeat(repeats), v, log_decay, beta)


def delta_rows(memory: Tensor, rows: DeltaRow) -> tuple[Tensor, Tensor]:
    """S [VH, N, N] (key by value) behind T rows, and what their queries read, [T, VH, N]."""
    if rows.q.shape[0] == 1:
        memory, out = delta_step(memory, DeltaRow(*(part[0] for part in rows)))
        return memory, out[None]
    return delta_chunk(memory, rows)


def delta_step(memory: Tensor, row: DeltaRow) -> tuple[Tensor, Tensor]:
    """`delta_rows` of one row without the leading axis, straight from the definition."""
    memory = memory * row.log_decay.exp()[:, None, None]
    error = row.v - (row.k[:, None] @ memory).squeeze(1)
    memory = memory + row.k[:, :, None] * (row.beta[:, None] * error)[:, None]
    return memory, (row.q[:, None] @ memory).squeeze(1)


def delta_chunk(memory: Tensor, rows: DeltaRow) -> tuple[Tensor, Tensor]:
    """`delta_rows` in matrix products (arXiv 2412.06464, section 3.3).

    With D_ij the decay from row j to row i, the errors that rows write solve a triangular system,

        (1 + strictly lower part of beta_i D_ij k_i . k_j) e = beta (v - decayed S^T k)
    """
    q, k, v = (part.transpose(0, 1) for part in rows[:3])  # [VH, T, N]
    total, beta = rows.log_decay.T.cumsum(dim=1), rows.beta.T[:, :, None]
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    between = total[:, :, None] - total[:, None]
    between = between.masked_fill(~causal, -torch.inf).exp()  # D, [VH, T, T]
    since = total.exp()[:, :, None]  # decay from before the first row
    system = (beta * (k @ k.transpose(1, 2)) * between).tril(-1)
    error = torch.linalg.solve_triangular(
        system, beta * (v - (k * since) @ memory), upper=False, unitriangular=True
    )
    out = (q * since) @ memory + (q @ k.transpose(1, 2) * between) @ error
    kept = k * (total[:, -1:] - total).exp()[:, :, None]
    memory = memory * since[:, -1:] + kept.transpose(1, 2) @ error
    return memory, out.transpose(0, 1)

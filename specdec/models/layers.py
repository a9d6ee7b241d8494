"""What happens inside a block of a dense or mixture-of-experts transformer.

An architecture describes its blocks as data (`LayerSpec`); one `DecoderLayer` runs them. Parameters
carry GGUF names (``attn_q``, ``ffn_norm``), so loading needs no rename table. Rotary weights are in
the rotate-half layout here; files that interleave them are rearranged once at load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.kv_cache import CacheShape, KVCache
from specdec.models.experts import SOFTMAX, Routing, mix_experts, route
from specdec.models.rows import Rows, by_element, narrow_linear

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding as ggml's ``rope_yarn`` defines it (YaRN: arXiv 2309.00071)."""

    n_rot: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, one a pair (Llama 3's ``rope_freqs``); empty = none."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block: widths, norms, rotary embedding, attention and feed-forward variants."""

    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    n_ff: int
    rms_eps: float
    rope: RopeSpec
    attention_scale: float
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_post_norms: bool = False
    activation: Activation = "silu"
    window: int = 0
    """Keys visible to a query, itself included; 0 = all."""
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_shared: int = 0
    """Width of the expert that every row uses; 0 = none."""
    routing: Routing = SOFTMAX
    expert_bias: Literal["", "exp_probs_b", "exp_probs_b.bias"] = ""
    """Name of the bias that takes part in the choice of experts; empty = none."""
    ffn_norm: Literal["ffn_norm", "post_attention_norm"] = "ffn_norm"
    """The file's name for the norm before the feed-forward branch."""
    has_sinks: bool = False
    shares_kv: bool = False
    """Values are the keys before their norm and rotation, normalised without a weight."""
    has_value_norm: bool = False
    """Values are normalised without a weight."""
    value_scale: float = 1.0
    """Factor on the attention's output, after its projection."""
    has_output_scale: bool = False

    @property
    def cache_shape(self) -> CacheShape:
        """Heads and widths of what this layer keeps in the cache."""
        return CacheShape(self.n_head_kv, self.head_dim, self.head_dim_v)

    def new_layer(self) -> DecoderLayer:
        """A module for this layer, without weights."""
        return DecoderLayer(self)


class RotaryEmbedding(nn.Module):
    """Cosines and sines per position, computed in float64 and kept in float32."""

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        self._tables = torch.empty(0, spec.n_rot // 2), torch.empty(0, spec.n_rot // 2)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, n_rot / 2] float32, of positions [T] int64."""
        cos, sin = self.tables(int(positions.max()) + 1, positions.device)
        return cos[positions], sin[positions]

    def tables(self, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same of all positions up to ``end``, perhaps more; one object as long as they do."""
        held, n = self._tables[0], self._tables[0].shape[0]
        if end > n:
            n = max(end, 2 * n, 512)
        if n > held.shape[0] or held.device != device:
            self._extend(n, device)
        return self._tables

    def _extend(self, n: int, device: torch.device) -> None:
        inverse, magnitude = rope_frequencies(self.spec)
        angles = torch.arange(n, dtype=torch.float64)[:, None] * inverse
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self._tables = cos.float().to(device), sin.float().to(device)


def rope_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """Angle per position of each pair, [n_rot / 2] float64, and the factor on cos and sin."""
    pair = torch.arange(spec.n_rot // 2, dtype=torch.float64)
    extrapolated = spec.freq_base ** (-2.0 * pair / spec.n_rot)
    if spec.factors:
        extrapolated = extrapolated / torch.tensor(spec.factors, dtype=torch.float64)
    interpolated = extrapolated * spec.freq_scale
    if spec.ext_factor == 0.0:
        return interpolated, spec.attn_factor
    low = max(0.0, math.floor(_correction_pair(spec, spec.beta_fast)))
    high = min(spec.n_rot - 1.0, math.ceil(_correction_pair(spec, spec.beta_slow)))
    ramp = 1.0 - ((pair - low) / max(0.001, high - low)).clamp(0.0, 1.0)
    mix = ramp * spec.ext_factor
    magnitude = spec.attn_factor * (1.0 + 0.1 * math.log(1.0 / spec.freq_scale))
    return interpolated * (1.0 - mix) + extrapolated * mix, magnitude


def _correction_pair(spec: RopeSpec, beta: float) -> float:
    """The pair that turns ``beta`` times over the original context (YaRN, section 3.2)."""
    turns = spec.n_ctx_orig / (beta * 2 * math.pi)
    return spec.n_rot * math.log(turns) / (2 * math.log(spec.freq_base))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, Dh], its first n_rot dimensions rotated in the rotate-half layout."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def interleaved_to_halves(weight: Tensor, n_head: int, n_rot: int) -> Tensor:
    """Rows of a q or k projection [H * Dh, ...], pairs (2i, 2i+1) moved to (i, i + n_rot / 2)."""
    heads = weight.reshape(n_head, -1, *weight.shape[1:])
    rotary, rest = heads[:, :n_rot], heads[:, n_rot:]
    rotary = torch.cat((rotary[:, 0::2], rotary[:, 1::2]), dim=1)
    return torch.cat((rotary, rest), dim=1).flatten(0, 1).contiguous()


def attention(
    q: Tensor,  # [T, H, Dh], scaled
    k: Tensor,  # [Hkv, N, Dh]
    v: Tensor,  # [Hkv, N, Dv]
    *,
    visible: Tensor | None = None,  # [T, N] bool; None = all
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """Grouped-query attention [T, H, Dv]; softmax in float32. A sink is a score without a value."""
    n_rows, n_head_kv = q.shape[0], k.shape[0]
    n_grouped = q.shape[1] // n_head_kv
    grouped = q.reshape(n_rows, n_head_kv, -1, q.shape[-1]).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped @ k.transpose(1, 2)).float()  # [Hkv, G * T, N]
    scores = scores.view(n_head_kv, n_grouped, n_rows, k.shape[1])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.view(n_head_kv, -1, 1, 1).expand(-1, -1, n_rows, 1)
        weights = torch.cat((scores, column.float()), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    mixed = weights.to(v.dtype).flatten(1, 2) @ v  # [Hkv, G * T, Dv]
    return mixed.view(n_head_kv, -1, n_rows, v.shape[-1]).permute(2, 0, 1, 3).flatten(1, 2)


def causal_mask(start: int, n_rows: int, window: int, device: torch.device) -> Tensor:
    """Keys 0 ... start + T - 1 that each of T queries may see, [T, start + T] bool."""
    keys = torch.arange(start + n_rows, device=device)
    queries = torch.arange(start, start + n_rows, device=device)[:, None]
    visible = keys <= queries
    return visible & (queries - keys < window) if window else visible


def new_embedding(n: int, width: int) -> nn.Embedding:
    """An embedding table that waits for its weights.

    `nn.Embedding` itself draws random ones first, which on the meta device makes torch import its
    compiler: two seconds of every start.
    """
    table: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
        torch.empty(n, width), freeze=False
    )
    return table


def activate(x: Tensor, activation: Activation) -> Tensor:
    """SiLU, or GELU in its tanh form."""
    return by_element(F.silu if activation == "silu" else _gelu_tanh, x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class DecoderLayer(nn.Module):
    """One block as its `LayerSpec` describes it, in plain torch operations."""

    ffn_norm: nn.Module
    exp_probs_b: nn.Parameter | BiasOnly

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attn_norm = nn.RMSNorm(spec.n_embd, eps=spec.rms_eps)
        self.add_attention(spec)
        if spec.has_post_norms:
            self.post_attention_norm = nn.RMSNorm(spec.n_embd, eps=spec.rms_eps)
            self.post_ffw_norm = nn.RMSNorm(spec.n_embd, eps=spec.rms_eps)
        if spec.has_output_scale:
            self.layer_output_scale = WeightOnly(1)
        self.add_module(spec.ffn_norm, nn.RMSNorm(spec.n_embd, eps=spec.rms_eps))
        if spec.n_expert:
            self.add_experts(spec)
        else:
            self.ffn_gate = nn.Linear(spec.n_embd, spec.n_ff, bias=False)
            self.ffn_up = nn.Linear(spec.n_embd, spec.n_ff, bias=False)
            self.ffn_down = nn.Linear(spec.n_ff, spec.n_embd, bias=False)

    def add_attention(self, spec: LayerSpec) -> None:
        """Makes the parameters of the attention branch."""
        n_q, n_kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
        self.attn_q = nn.Linear(spec.n_embd, n_q, bias=spec.has_qkv_bias)
        self.attn_k = nn.Linear(spec.n_embd, n_kv, bias=spec.has_qkv_bias)
        if not spec.shares_kv:
            n_v = spec.n_head_kv * spec.head_dim_v
            self.attn_v = nn.Linear(spec.n_embd, n_v, bias=spec.has_qkv_bias)
        n_out = spec.n_head * spec.head_dim_v
        self.attn_output = nn.Linear(n_out, spec.n_embd, bias=spec.has_output_bias)
        if spec.has_qk_norm:
            self.attn_q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_eps)
            self.attn_k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_eps)
        if spec.has_sinks:
            self.attn_sinks = WeightOnly(spec.n_head)

    def add_experts(self, spec: LayerSpec) -> None:
        """Makes the parameters of a routed feed-forward branch."""
        self.ffn_gate_inp = nn.Linear(spec.n_embd, spec.n_expert, bias=False)
        self.ffn_gate_exps = WeightOnly(spec.n_expert, spec.n_ff, spec.n_embd)
        self.ffn_up_exps = WeightOnly(spec.n_expert, spec.n_ff, spec.n_embd)
        self.ffn_down_exps = WeightOnly(spec.n_expert, spec.n_embd, spec.n_ff)
        if spec.expert_bias == "exp_probs_b":
            self.exp_probs_b = nn.Parameter(torch.empty(spec.n_expert))
        elif spec.expert_bias:
            self.exp_probs_b = BiasOnly(spec.n_expert)
        if spec.n_ff_shared:
            self.ffn_gate_shexp = nn.Linear(spec.n_embd, spec.n_ff_shared, bias=False)
            self.ffn_up_shexp = nn.Linear(spec.n_embd, spec.n_ff_shared, bias=False)
            self.ffn_down_shexp = nn.Linear(spec.n_ff_shared, spec.n_embd, bias=False)

    def forward(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor], rows: Rows
    ) -> Tensor:
        """[T, D] -> [T, D]; appends the rows that count to the cache."""
        x = self.attn_norm(hidden)
        q = self.queries(x, rotary)
        k, v = self.keys_values(x, rotary)
        keys, values = cache.append(layer, k[: rows.count], v[: rows.count])
        mixed = self.attend_causal(q, keys, values, rows)
        hidden = hidden + self.project_attention(mixed)
        x = getattr(self, self.spec.ffn_norm)(hidden)
        return self.finish(hidden, self.feed_forward(x, rows))

    def remember(
        self, hidden: Tensor, cache: KVCache, layer: int, rotary: tuple[Tensor, Tensor]
    ) -> None:
        """Appends rows [T, D] to the cache and computes no more of them than their keys need."""
        cache.append(layer, *self.keys_values(self.attn_norm(hidden), rotary))

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Queries [T, H, Dh] of normed input [T, D]: projected, normed, rotated and scaled."""
        q = self.attn_q(x).unflatten(-1, (self.spec.n_head, self.spec.head_dim))
        if self.spec.has_qk_norm:
            q = self.attn_q_norm(q)
        return rotate(q, *rotary) * self.spec.attention_scale

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys [T, Hkv, Dh], rotated, and values [T, Hkv, Dv] of the layer's input [T, D]."""
        raw = self.attn_k(x).unflatten(-1, (self.spec.n_head_kv, self.spec.head_dim))
        k = self.attn_k_norm(raw) if self.spec.has_qk_norm else raw
        if self.spec.shares_kv:
            v = F.rms_norm(raw, (self.spec.head_dim,), eps=self.spec.rms_eps)
        else:
            v = self.attn_v(x).unflatten(-1, (self.spec.n_head_kv, self.spec.head_dim_v))
            if self.spec.has_value_norm:
                v = F.rms_norm(v, (self.spec.head_dim_v,), eps=self.spec.rms_eps)
        return rotate(k, *rotary), v

    def attend_causal(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
        """Attention of T queries at positions ``rows.start`` ... over the cache, [T, H * Dv]."""
        sinks = self.attn_sinks.weight if self.spec.has_sinks else None
        if not rows.exact:
            visible = causal_mask(rows.start, rows.count, self.spec.window, q.device)
            return attention(q, keys, values, visible=visible, sinks=sinks).flatten(1)
        out = q.new_zeros(q.shape[0], self.spec.n_head * self.spec.head_dim_v)
        for row in range(rows.count):
            end = rows.start + row + 1
            first = max(0, end - self.spec.window) if self.spec.window else 0
            seen = attention(
                q[row : row + 1], keys[:, first:end], values[:, first:end], sinks=sinks
            )
            out[row] = seen.flatten()
        return out

    def project_attention(self, mixed: Tensor) -> Tensor:
        """The attention branch's addition to the residual stream, [T, H * Dv] -> [T, D]."""
        out: Tensor = self.attn_output(mixed)
        if self.spec.value_scale != 1.0:
            out = out * self.spec.value_scale
        return self.post_attention_norm(out) if self.spec.has_post_norms else out

    def feed_forward(self, x: Tensor, rows: Rows) -> Tensor:
        """The feed-forward branch of normed input, [T, D] -> [T, D]."""
        if self.spec.n_expert:
            return self._mix_experts(x, rows)
        gate = activate(self.ffn_gate(x), self.spec.activation)
        return self.ffn_down(gate * self.ffn_up(x))  # type: ignore[no-any-return]

    def _mix_experts(self, x: Tensor, rows: Rows) -> Tensor:
        spec = self.spec
        bias = getattr(self, "exp_probs_b", None)
        if isinstance(bias, BiasOnly):
            bias = bias.bias
        scores = narrow_linear(x, self.ffn_gate_inp.weight)
        weights = route(scores, spec.n_expert_used, spec.routing, bias)
        out = mix_experts(x, weights, self._run_expert, rows)
        if not spec.n_ff_shared:
            return out
        gate = activate(self.ffn_gate_shexp(x), spec.activation)
        return out + self.ffn_down_shexp(gate * self.ffn_up_shexp(x))  # type: ignore[no-any-return]

    def _run_expert(self, x: Tensor, expert: int) -> Tensor:
        gate = activate(F.linear(x, self.ffn_gate_exps.weight[expert]), self.spec.activation)
        up = F.linear(x, self.ffn_up_exps.weight[expert])
        return F.linear(gate * up, self.ffn_down_exps.weight[expert])

    def finish(self, hidden: Tensor, addition: Tensor) -> Tensor:
        """The layer's output from the residual stream and the feed-forward branch."""
        if self.spec.has_post_norms:
            addition = self.post_ffw_norm(addition)
        hidden = hidden + addition
        return hidden * self.layer_output_scale.weight if self.spec.has_output_scale else hidden


class SoftCap(nn.Module):
    """Keeps values within a bound: c * tanh(x / c); 0 = no bound."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return self.cap * by_element(torch.tanh, x / self.cap) if self.cap else x


class WeightOnly(nn.Module):
    """A tensor without a layer of its own that files store as ``NAME.weight``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class BiasOnly(nn.Module):
    """A tensor without a layer of its own that files store as ``NAME.bias``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(shape))

"""The trunk of the DFlash family on blocks of DeepSeek-V4.

The residual stream is hc streams x[0 ... hc - 1] of width D, all equal at first. Around each
sub-layer f (attention, experts) *hyper-connections* mix them, with weights that depend on all of
them, m = fn rms(x), split into pre [hc], post [hc] and C [hc, hc]:

    pre = sigmoid(m * scale + base) + eps         post = 2 sigmoid(m * scale + base)
    C = sinkhorn(m * scale + base)                rows and columns sum to about one
    y = f(sum over j of pre[j] x[j])              x'[d] = post[d] y + sum over s of C[s][d] x[s]

One head of keys serves as values, too, so what attention returns is turned back by the position of
the query. Context features and injection are those of the base backbone: `trunk`. References:
llama.cpp's `src/models/dspark.cpp` and `deepseek4.cpp`; hyper-connections, arXiv 2409.19606.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.dsv4_config import DSV4Spec, read_dsv4_spec
from specdec.drafters.dflash.trunk import (
    KeysValues,
    TrunkOutput,
    block_attention,
    visible_keys,
)
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache
from specdec.models.layers import RopeSpec, RotaryEmbedding, WeightOnly

SMALLEST_SUM = 6.103515625e-5
"""Lower bound of a sum of expert weights before it divides them (the smallest normal half)."""
SMALLEST_CLAMP = 1e-6
"""A clamp below this means none."""


class HyperTrunk(nn.Module, abc.ABC):
    """What DeepSeek-V4 and V4.1 share: fused features, keys, and a block of several streams."""

    def __init__(self, config: DraftConfig, spec: DSV4Spec, layers: Sequence[DSV4Layer]) -> None:
        super().__init__()
        n_embd = config.n_embd
        self.config, self.spec = config, spec
        self.cache_shapes = [CacheShape(1, spec.head_dim, 0)] * config.n_layer
        self.fc = nn.Linear(len(config.target_layers) * n_embd, n_embd, bias=False)
        self.enc = nn.ModuleDict({"output_norm": nn.RMSNorm(n_embd, eps=config.rms_eps)})
        self.blk = nn.ModuleList(layers)
        self.output_norm = nn.RMSNorm(n_embd, eps=config.rms_eps)
        self._layers: list[DSV4Layer] = list(layers)
        # A list: its tables stay on the host.
        self._rotary = [RotaryEmbedding(RopeSpec(spec.n_rot, spec.freq_base))]

    @abc.abstractmethod
    def run(
        self,
        streams: Tensor,
        rotary: tuple[Tensor, Tensor],
        context: Sequence[KeysValues],
        visible: Tensor,
    ) -> Tensor:
        """The collapsed state [S, D] of a block whose streams are [S, hc, D] at first.

        ``context`` has a layer's keys per entry, ``visible`` [S, N + S] is what each slot sees.
        """

    def fuse(self, hidden: Tensor) -> Tensor:
        """See `Backbone.fuse`."""
        return self.enc["output_norm"](self.fc(hidden.flatten(1)))  # type: ignore[no-any-return]

    def inject(self, fused: Tensor, cache: KVCache) -> None:
        """See `Backbone.inject`."""
        rotary = self._angles(cache.length, fused)
        for index, layer in enumerate(self._layers):
            keys = layer.keys(fused, rotary)
            cache.append(index, keys, keys[..., :0])
        cache.advance(fused.shape[0])

    def forward(self, embeddings: Tensor, cache: KVCache) -> TrunkOutput:
        """See `Backbone.__call__`."""
        start, n_slots, window = cache.length, embeddings.shape[0], self.spec.window
        begin = max(0, start - window + 1)
        visible = visible_keys(
            torch.full((n_slots,), start),
            torch.arange(start, start + n_slots),
            (begin, start),
            n_slots,
            window=window,
            is_causal=self.config.is_causal,
        )
        assert visible is not None
        held = [cache.committed(i, embeddings.dtype)[0][:, begin:] for i in range(len(self.blk))]
        state = self.run(
            embeddings[:, None].expand(-1, self.spec.n_streams, -1),
            self._angles(start, embeddings),
            [(keys, keys) for keys in held],
            visible.to(embeddings.device),
        )
        return TrunkOutput(self.output_norm(state), state)

    def _angles(self, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary[0](torch.arange(start, start + like.shape[0]))
        return cos.to(like.device), sin.to(like.device)


class DSV4Trunk(HyperTrunk):
    """DeepSeek-V4: streams are mixed before each sub-layer and once more at the end."""

    def __init__(self, file: GGUFFile, config: DraftConfig) -> None:
        spec = read_dsv4_spec(file, config)
        super().__init__(config, spec, [DSV4Layer(spec, i) for i in range(config.n_layer)])
        n_streams = spec.n_streams
        self.output_hc_fn = nn.Linear(n_streams * config.n_embd, n_streams, bias=False)
        self.output_hc_base = WeightOnly(n_streams)
        self.output_hc_scale = WeightOnly(1)

    def run(
        self,
        streams: Tensor,
        rotary: tuple[Tensor, Tensor],
        context: Sequence[KeysValues],
        visible: Tensor,
    ) -> Tensor:
        """See `HyperTrunk.run`."""
        for layer, held in zip(self._layers, context, strict=True):
            streams = layer(streams, rotary, held, visible)
        mixed = self.output_hc_fn(normed(streams.flatten(1), self.spec.rms_eps))
        gate = mixed * self.output_hc_scale.weight + self.output_hc_base.weight
        return weighted(gate.sigmoid() + self.spec.hc_eps, streams)


class Mix(NamedTuple):
    """The weights of one hyper-connection."""

    pre: Tensor
    """[S, hc] of each stream in the sub-layer's input."""
    post: Tensor
    """[S, hc] of the sub-layer's output in each stream."""
    across: Tensor
    """[S, hc, hc] of each stream (second axis) in each new stream (last axis)."""


class DSV4Layer(nn.Module):
    """Latent attention and a mixture of experts, each between hyper-connections."""

    def __init__(self, spec: DSV4Spec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        n_embd, n_mix = spec.n_embd, (2 + spec.n_streams) * spec.n_streams
        self.attn_norm = nn.RMSNorm(n_embd, eps=spec.rms_eps)
        self.attn_sinks = WeightOnly(spec.n_head)
        self.attn_q_a = nn.Linear(n_embd, spec.q_rank, bias=False)
        self.attn_q_a_norm = nn.RMSNorm(spec.q_rank, eps=spec.rms_eps)
        self.attn_q_b = nn.Linear(spec.q_rank, spec.n_head * spec.head_dim, bias=False)
        self.attn_kv = nn.Linear(n_embd, spec.head_dim, bias=False)
        self.attn_kv_a_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_eps)
        self.attn_output_a = WeightOnly(*spec.output_a_shapes[layer])
        self.attn_output_b = nn.Linear(spec.n_groups * spec.output_rank, n_embd, bias=False)
        for branch in ("attn", "ffn"):
            n_flat = spec.n_streams * n_embd
            self.add_module(f"hc_{branch}_fn", nn.Linear(n_flat, n_mix, bias=False))
            self.add_module(f"hc_{branch}_base", WeightOnly(n_mix))
            self.add_module(f"hc_{branch}_scale", WeightOnly(3))
        self.ffn_norm = nn.RMSNorm(n_embd, eps=spec.rms_eps)
        n_ff, n_shared = spec.n_ff[layer], spec.n_ff[layer] * spec.n_shared
        self.clamp, self.clamp_shared = spec.clamp[layer], spec.clamp_shared[layer]
        self.ffn_gate_inp = nn.Linear(n_embd, spec.n_expert, bias=False)
        self.exp_probs_b = nn.ParameterDict({"bias": torch.empty(spec.n_expert)})
        self.ffn_gate_exps = WeightOnly(spec.n_expert, n_ff, n_embd)
        self.ffn_up_exps = WeightOnly(spec.n_expert, n_ff, n_embd)
        self.ffn_down_exps = WeightOnly(spec.n_expert, n_embd, n_ff)
        self.ffn_gate_shexp = nn.Linear(n_embd, n_shared, bias=False)
        self.ffn_up_shexp = nn.Linear(n_embd, n_shared, bias=False)
        self.ffn_down_shexp = nn.Linear(n_shared, n_embd, bias=False)

    def forward(
        self,
        streams: Tensor,  # [S, hc, D]
        rotary: tuple[Tensor, Tensor],
        context: KeysValues,
        visible: Tensor,  # [S, N + S]
    ) -> Tensor:
        """The streams [S, hc, D] after both sub-layers."""
        mix = self.mixes(streams, "attn")
        x = self.attn_norm(weighted(mix.pre, streams))
        out = self.attend(x, rotary, context, visible)
        streams = leave(streams, out, mix)
        mix = self.mixes(streams, "ffn")
        out = self.feed_forward(self.ffn_norm(weighted(mix.pre, streams)))
        return leave(streams, out, mix)

    def keys(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Keys [T, 1, Dh], which are also the values, of input [T, D]."""
        return rotate_pairs(self.attn_kv_a_norm(self.attn_kv(x))[:, None], *rotary)

    def queries(self, x: Tensor) -> Tensor:
        """Queries [S, H, Dh] of normed input [S, D], neither rotated nor scaled."""
        q = self.attn_q_b(self.attn_q_a_norm(self.attn_q_a(x)))
        return normed(q.view(-1, self.spec.n_head, self.spec.head_dim), self.spec.rms_eps)

    def attend(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], context: KeysValues, visible: Tensor
    ) -> Tensor:
        """Attention of normed input [S, D] over context and block, [S, D]."""
        spec, (cos, sin) = self.spec, rotary
        q = rotate_pairs(self.queries(x), cos, sin) / math.sqrt(spec.head_dim)
        keys = self.keys(x, rotary)
        mixed = block_attention(q, context, (keys, keys), visible, self.attn_sinks.weight)
        mixed = rotate_pairs(mixed, cos, -sin).reshape(x.shape[0], spec.n_groups, -1)
        output_a = self.attn_output_a.weight.view(spec.n_groups, spec.output_rank, -1)
        grouped = torch.einsum("tgi,gri->tgr", mixed, output_a)
        return self.attn_output_b(grouped.flatten(1))  # type: ignore[no-any-return]

    def mixes(self, streams: Tensor, branch: str) -> Mix:
        """The weights of the hyper-connection around a sub-layer, from streams [S, hc, D]."""
        spec, n = self.spec, self.spec.n_streams
        fn, base, scale = (getattr(self, f"hc_{branch}_{part}") for part in ("fn", "base", "scale"))
        parts = fn(normed(streams.flatten(1), spec.rms_eps)).split((n, n, n * n), dim=-1)
        bases = base.weight.split((n, n, n * n))
        pre, post, across = (part * scale.weight[i] + bases[i] for i, part in enumerate(parts))
        across = sinkhorn(across.unflatten(-1, (n, n)), spec.n_sinkhorn, spec.hc_eps)
        return Mix(pre.sigmoid() + spec.hc_eps, 2 * post.sigmoid(), across)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The chosen experts and the shared one, [S, D] -> [S, D]."""
        scores = F.softplus(self.ffn_gate_inp(x).float()).sqrt()
        chosen = (scores + self.exp_probs_b["bias"]).topk(self.spec.n_expert_used).indices
        weights = scores.gather(-1, chosen)
        if self.spec.normalises_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=SMALLEST_SUM)
        weights = weights * self.spec.weights_scale
        gate = swiglu(self.ffn_gate_shexp(x), self.ffn_up_shexp(x), self.clamp_shared)
        out: Tensor = self.ffn_down_shexp(gate)
        # Experts are gathered on the device: asking it which ones they are would wait for it.
        for slot in range(self.spec.n_expert_used):
            out = out + weights[:, slot, None] * self._run_experts(x, chosen[:, slot])
        return out

    def _run_experts(self, x: Tensor, experts: Tensor) -> Tensor:
        """Each row of x [S, D] through the expert of its own, [S, D]."""
        column = x[..., None]
        gate = self.ffn_gate_exps.weight[experts] @ column
        up = self.ffn_up_exps.weight[experts] @ column
        down = self.ffn_down_exps.weight[experts]
        return (down @ swiglu(gate, up, self.clamp)).squeeze(-1)


def weighted(weights: Tensor, streams: Tensor) -> Tensor:
    """The sum [S, D] of streams [S, hc, D] with weights [S, hc]."""
    return (weights[..., None] * streams).sum(dim=1)


def leave(streams: Tensor, out: Tensor, mix: Mix) -> Tensor:
    """The streams [S, hc, D] after a sub-layer's output [S, D] has been added to them."""
    return mix.post[..., None] * out[:, None] + mix.across.transpose(1, 2) @ streams


def normed(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square over the last axis, without a weight."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def sinkhorn(logits: Tensor, n_iterations: int, eps: float) -> Tensor:
    """A positive matrix [..., hc, hc] whose rows and columns sum to about one (Sinkhorn-Knopp)."""
    matrix = logits.softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(n_iterations - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def swiglu(gate: Tensor, up: Tensor, clamp: float) -> Tensor:
    """silu(gate) * up, the gate bounded above by ``clamp`` and ``up`` on both sides."""
    if clamp > SMALLEST_CLAMP:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return F.silu(gate) * up


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, Dh], its last n_rot dimensions rotated in neighbouring pairs.

    Not rearranged at load as for other layers, because keys are values here and go on to the output
    matrix.
    """
    n_rot = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    rest, turning = x[..., : x.shape[-1] - n_rot], x[..., x.shape[-1] - n_rot :]
    even, odd = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((rest, turned.flatten(-2)), dim=-1)

"""The trunk of the DFlash family on its base backbone (Qwen3-like blocks).

The target's hidden states x_p at position p, the taps side by side, are fused into
``g_p = rms(fc x_p) * enc.output_norm``. Every layer makes a key and a value of g_p: that is the
whole context. A block ``[last token, mask, mask, ...]`` attends to it and to itself; its own keys
and values are dropped afterwards. The trunk knows nothing of heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafters.dflash import head_of
from specdec.drafters.dflash.config import DraftConfig
from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache
from specdec.models.base import read_layer_spec
from specdec.models.layers import (
    Activation,
    DecoderLayer,
    LayerSpec,
    RotaryEmbedding,
)
from specdec.models.rows import Rows
from specdec.options import RopeOptions

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""`dflash.hidden_activation` -> what it means."""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer's context, [Hkv, N, Dh] each."""


class TrunkOutput(NamedTuple):
    """What a block pass gives to the head."""

    hidden: Tensor
    """[S, D] after the output norm."""
    state: Tensor
    """[S, D] what a confidence head reads; the same tensor on the base backbone."""


class Backbone(Protocol):
    """What a drafter needs of a trunk; an `nn.Module` whose parameters carry GGUF names."""

    cache_shapes: list[CacheShape]
    """What each layer keeps of the context."""

    def __init__(self, file: GGUFFile, config: DraftConfig) -> None:
        """The modules for a file, built on the meta device; weights come later."""

    def fuse(self, hidden: Tensor) -> Tensor:
        """The context features g [T, D] of the target's taps [T, n_taps, D]."""

    def inject(self, fused: Tensor, cache: KVCache) -> None:
        """Appends keys and values of features [T, D] at positions ``cache.length`` ..."""

    def __call__(self, embeddings: Tensor, cache: KVCache) -> TrunkOutput:
        """Runs a block [S, D] at positions ``cache.length`` ...; the cache is only read."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """Sizes of the local convolution around a sub-layer."""

    kernel_size: int
    group_size: int


class Trunk(nn.Module):
    """Fuses features, keeps them as keys and values, and runs blocks against them."""

    def __init__(self, file: GGUFFile, config: DraftConfig) -> None:
        super().__init__()
        specs = read_layer_specs(file, config)
        convolution = read_convolution(file, config)
        self.config = config
        self.cache_shapes = [spec.cache_shape for spec in specs]
        self.fc = nn.Linear(len(config.target_layers) * config.n_embd, config.n_embd, bias=False)
        self.enc = nn.ModuleDict({"output_norm": nn.RMSNorm(config.n_embd, eps=config.rms_eps)})
        self.blk = nn.ModuleList(
            BlockLayer(spec, convolution, missing_norms(file, i)) for i, spec in enumerate(specs)
        )
        self.output_norm = nn.RMSNorm(config.n_embd, eps=config.rms_eps)
        self._layers: list[BlockLayer] = list(self.blk)  # type: ignore[arg-type]
        self._rotary = [RotaryEmbedding(specs[0].rope)]  # a list: its tables stay on the host

    @property
    def layers(self) -> Sequence[BlockLayer]:
        """The blocks in order."""
        return self._layers

    def fuse(self, hidden: Tensor) -> Tensor:
        """See `Backbone.fuse`."""
        return self.enc["output_norm"](self.fc(hidden.flatten(1)))  # type: ignore[no-any-return]

    def context(self, fused: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values ([T, Hkv, Dh] each) per layer of features [T, D] at ``start`` ..."""
        rotary = self._angles(torch.arange(start, start + fused.shape[0]), fused.device)
        return [layer.keys_values(fused, rotary) for layer in self._layers]

    def inject(self, fused: Tensor, cache: KVCache) -> None:
        """See `Backbone.inject`."""
        for index, (k, v) in enumerate(self.context(fused, cache.length)):
            cache.append(index, k, v)
        cache.advance(fused.shape[0])

    def forward(self, embeddings: Tensor, cache: KVCache) -> TrunkOutput:
        """See `Backbone.__call__`."""
        context = [cache.committed(i, embeddings.dtype) for i in range(len(self._layers))]
        return self.run(embeddings, [cache.length], context)

    def run(
        self, embeddings: Tensor, starts: Sequence[int], context: Sequence[KeysValues]
    ) -> TrunkOutput:
        """Runs len(starts) blocks of equal length, [T, D] one after the other.

        Block b begins at position ``starts[b]`` and sees the context before it, which begins at
        position 0, and itself. Of several blocks each sees only what lies before it.
        """
        n_slots = embeddings.shape[0] // len(starts)
        first = torch.tensor(starts)[:, None].expand(-1, n_slots).flatten()
        positions = first + torch.arange(n_slots).repeat(len(starts))
        rotary = self._angles(positions, embeddings.device)
        hidden = embeddings * self.config.embedding_scale
        for layer, held in zip(self._layers, context, strict=True):
            begin, seen = _within_window(held, starts, layer.spec.window)
            visible = visible_keys(
                first,
                positions,
                (begin, begin + seen[0].shape[1]),
                n_slots,
                window=layer.spec.window,
                is_causal=self.config.is_causal,
            )
            mask = None if visible is None else visible.to(hidden.device)
            hidden = layer.run(hidden, rotary, seen, mask, n_slots)
        hidden = self.output_norm(hidden)
        return TrunkOutput(hidden, hidden)

    def _angles(self, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        # Positions stay on the host: asking a device for the largest one would wait for it.
        cos, sin = self._rotary[0](positions)
        return cos.to(device), sin.to(device)


class BlockLayer(DecoderLayer):
    """A decoder layer whose queries see a given context and the whole block."""

    def __init__(
        self, spec: LayerSpec, convolution: Convolution | None, missing_norms: Sequence[str]
    ) -> None:
        super().__init__(spec)
        for name in missing_norms:
            setattr(self, name, nn.Identity())
        self.convolution = convolution
        if convolution is not None:
            n_taps, n_groups = convolution.kernel_size, spec.n_embd // convolution.group_size
            self.attn_conv_base = nn.Parameter(torch.empty(2, n_taps, spec.n_embd))
            self.attn_conv_proj = nn.Linear(spec.n_embd, 2 * n_taps * n_groups, bias=False)
            self.ffn_conv_base = nn.Parameter(torch.empty(2, n_taps, spec.n_embd))
            self.ffn_conv_proj = nn.Linear(spec.n_embd, 2 * n_taps * n_groups, bias=False)

    def run(
        self,
        hidden: Tensor,  # [T, D]
        rotary: tuple[Tensor, Tensor],
        context: KeysValues,
        visible: Tensor | None,  # [T, N + S]
        n_slots: int,
    ) -> Tensor:
        """The layer's output [T, D] for blocks of ``n_slots`` tokens."""
        x = self.attn_norm(hidden)
        before, after = self._kernels(x, "attn")
        x = local_convolution(x, before, n_slots)
        q = self.queries(x, rotary)
        sinks = self.attn_sinks.weight if self.spec.has_sinks else None
        mixed = block_attention(q, context, self.keys_values(x, rotary), visible, sinks)
        out = self.attn_output(mixed.flatten(1)) * self.spec.value_scale
        out = local_convolution(out, after, n_slots)
        if self.spec.has_post_norms:
            out = self.post_attention_norm(out)
        hidden = hidden + out
        x = self.ffn_norm(hidden)
        before, after = self._kernels(x, "ffn")
        x = local_convolution(x, before, n_slots)
        out = self.feed_forward(x, Rows(0, x.shape[0], exact=False))
        return self.finish(hidden, local_convolution(out, after, n_slots))

    def _kernels(self, x: Tensor, branch: str) -> tuple[Tensor | None, Tensor | None]:
        """The kernels [T, taps, D] before and after a branch whose input is x [T, D]."""
        if self.convolution is None:
            return None, None
        base = getattr(self, f"{branch}_conv_base")
        parts = getattr(self, f"{branch}_conv_proj")(x)
        parts = parts.view(x.shape[0], 2, self.convolution.kernel_size, -1)
        kernels = base + parts.repeat_interleave(self.convolution.group_size, dim=-1)
        return kernels[:, 0], kernels[:, 1]


def local_convolution(x: Tensor, kernels: Tensor | None, n_slots: int) -> Tensor:
    """x [T, D] mixed with the tokens before it in its own block of ``n_slots`` tokens.

    ``out[t] = sum over i of kernels[t, i] * x[t - i]`` with kernels [T, taps, D]; None = x.
    """
    if kernels is None:
        return x
    blocks = x.view(-1, n_slots, x.shape[-1])
    terms = [
        kernels[:, i] * F.pad(blocks, (0, 0, i, 0))[:, :n_slots].flatten(0, 1)
        for i in range(min(kernels.shape[1], n_slots))
    ]
    return torch.stack(terms).sum(dim=0)


def block_attention(
    q: Tensor,  # [T, H, Dh], scaled
    context: KeysValues,
    block: tuple[Tensor, Tensor],  # [T, Hkv, Dh] each
    visible: Tensor | None,  # [T, N + S] bool; None = all, for a single block
    sinks: Tensor | None,  # [H]
) -> Tensor:
    """Grouped-query attention [T, H, Dv] of blocks of S slots over the context and themselves.

    Context and blocks are not joined in memory, and a block's queries meet no other block's keys.
    """
    n_rows, n_head_kv, n_context = q.shape[0], block[0].shape[1], context[0].shape[1]
    n_slots = n_rows if visible is None else visible.shape[-1] - n_context
    blocks = q.view(-1, n_slots, n_head_kv, q.shape[1] // n_head_kv, q.shape[-1])
    blocks = blocks.permute(2, 0, 3, 1, 4)  # [Hkv, B, G, S, Dh]
    n_blocks = blocks.shape[1]
    own_k, own_v = (x.view(n_blocks, n_slots, n_head_kv, -1).permute(2, 0, 1, 3) for x in block)
    shared = blocks.flatten(1, 3) @ context[0].transpose(1, 2)  # [Hkv, B * G * S, N]
    own = blocks.flatten(2, 3) @ own_k.transpose(2, 3)  # [Hkv, B, G * S, S]
    scores = torch.cat((shared.view(*blocks.shape[:4], -1), own.view(*blocks.shape[:4], -1)), -1)
    scores = scores.float()
    if visible is not None:
        table = visible.expand(n_rows, -1).view(n_blocks, 1, n_slots, -1)
        scores = scores.masked_fill(~table, -math.inf)
    if sinks is not None:
        column = sinks.float().view(n_head_kv, 1, -1, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1).to(block[1].dtype)
    mixed = weights[..., :n_context].flatten(1, 3) @ context[1]
    mine = weights[..., n_context : n_context + n_slots].flatten(2, 3) @ own_v
    mixed = mixed.view(*blocks.shape[:4], -1) + mine.view(*blocks.shape[:4], -1)
    return mixed.permute(1, 3, 0, 2, 4).reshape(n_rows, q.shape[1], -1)


def visible_keys(
    first: Tensor,
    positions: Tensor,
    context: tuple[int, int],
    n_slots: int,
    *,
    window: int,
    is_causal: bool,
) -> Tensor | None:
    """Keys that each of T queries sees, of N in the context and of its block, [T, N + n_slots].

    ``first`` and ``positions`` [T] are where a query's block begins and where it stands;
    ``context`` is where the context's keys begin and end. A window limits what lies before a query,
    not what follows it. None = a single block sees everything.
    """
    if len(first) == n_slots and not is_causal and not window:
        return None
    before = torch.arange(*context).expand(len(positions), -1)
    own = positions.view(-1, 1, n_slots).expand(-1, n_slots, -1).flatten(0, 1)
    distance = positions[:, None] - torch.cat((before, own), dim=1)
    visible = torch.cat((before < first[:, None], torch.ones_like(own, dtype=torch.bool)), dim=1)
    if window:
        visible = visible & (distance < window)
    return visible & (distance >= 0) if is_causal else visible


def _within_window(held: KeysValues, starts: Sequence[int], window: int) -> tuple[int, KeysValues]:
    """The part of a layer's context that some query can see, and the position of its first key.

    What lies behind some blocks is left to the mask, so that several blocks share one context of
    any length.
    """
    begin = max(0, min(starts) - window + 1) if window else 0
    end = max(starts) if window or len(starts) == 1 else held[0].shape[1]
    return begin, (held[0][:, begin:end], held[1][:, begin:end])


def read_layer_specs(file: GGUFFile, config: DraftConfig) -> list[LayerSpec]:
    """The blocks of a base-backbone draft, each by its own tensors.

    Raises `ModelFileError` for impossible sizes, `UnsupportedError` for an unknown activation.
    """
    with torch.device("cpu"):  # reads `rope_freqs`, while modules are built on the meta device
        common = read_layer_spec(file, RopeOptions())
    if common.head_dim_v != common.head_dim:
        raise ModelFileError(
            f"{file.path}: {file.key('attention.value_length')} is {common.head_dim_v}, expected "
            f"{common.head_dim} as {file.key('attention.key_length')}"
        )
    name = file.get_str(file.key("hidden_activation"), default="silu")
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"{file.path}: {file.key('hidden_activation')} '{name}' is not supported; known: "
            f"{', '.join(ACTIVATIONS)}"
        )
    common = replace(
        common,
        rope=replace(common.rope, factors=_rope_factors(file, common)),
        has_qk_norm=True,
        has_qkv_bias=False,
        has_output_bias=False,
        activation=ACTIVATIONS[name],
        value_scale=file.get_float(file.key("attention.value_scale"), default=1.0) or 1.0,
        n_expert=0,
    )
    windows = _read_windows(file, config.n_layer)
    return [_read_layer(file, i, common, window) for i, window in enumerate(windows)]


def _read_layer(file: GGUFFile, index: int, common: LayerSpec, window: int) -> LayerSpec:
    def has(name: str) -> bool:
        return f"blk.{index}.{name}.weight" in file.tensors

    return replace(
        common,
        window=window,
        has_post_norms=has("post_attention_norm") or has("post_ffw_norm"),
        has_sinks=has("attn_sinks"),
        shares_kv=not has("attn_v"),
        has_output_scale=has("layer_output_scale"),
    )


def missing_norms(file: GGUFFile, index: int) -> list[str]:
    """Post norms of a layer that the file leaves out."""
    names = ("post_attention_norm", "post_ffw_norm")
    return [name for name in names if f"blk.{index}.{name}.weight" not in file.tensors]


def _read_windows(file: GGUFFile, n_layer: int) -> list[int]:
    """Sliding window per layer, 0 = none."""
    window = file.get_int(file.key("attention.sliding_window"), default=0)
    if window <= 0:
        return [0] * n_layer
    pattern = file.get_bools(file.key("attention.sliding_window_pattern"), length=n_layer)
    return [window if slides else 0 for slides in pattern]


def _rope_factors(file: GGUFFile, spec: LayerSpec) -> tuple[float, ...]:
    """Divisors of the rotary frequencies: `rope_freqs`, or what M-RoPE makes of text positions.

    M-RoPE gives each pair one of four position rows; for text three of them are the position and
    the fourth is 0, so pairs of the fourth section do not turn (divisor infinity). It ignores
    `rope_freqs`.
    """
    key = file.key("rope.dimension_sections")
    sections = file.get_ints(key, default=[])
    if not any(sections):
        return spec.rope.factors
    if len(sections) != 4 or min(sections) < 0:
        raise ModelFileError(f"{file.path}: {key} is {sections}, expected four sizes")
    period, n_turning = sum(sections), sum(sections[:3])
    pairs = range(spec.rope.n_rot // 2)
    return tuple(1.0 if pair % period < n_turning else math.inf for pair in pairs)


def read_convolution(file: GGUFFile, config: DraftConfig) -> Convolution | None:
    """The local convolution, which DFlash2 needs and LiliCorr may have; None = there is none."""
    if head_of(file) not in ("draft-dflash2", "draft-lilicorr"):
        return None
    kernel_size = file.get_int(file.key("conv_kernel_size"), default=0)
    group_size = file.get_int(file.key("conv_group_size"), default=0)
    if kernel_size <= 0 or group_size <= 0:
        return None
    file.check_size(file.key("conv_kernel_size"), kernel_size)
    if config.n_embd % group_size:
        raise ModelFileError(
            f"{file.path}: DFlash hidden size must be divisible by conv_group_size: "
            f"{config.n_embd} and {group_size}"
        )
    return Convolution(kernel_size, group_size)

"""The trunk of the DFlash family on blocks of Mistral Large 4.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with absorbed keys: all heads share one
key [c ; r], where c is a latent of width R, normed, and r is rotated. c is their value, too. Per
head, with q = Wq h split into its first dimensions n and its last n_rot dimensions p:

    score = ([K n ; rope(p)] . [c ; r]) / sqrt(Dk)        K = attn_k_b [R, Dk - n_rot]
    out = Wo [V (sum of weights * c) ; of all heads]      V = attn_v_b [Dv, R]

The block is the last token's embedding and rows of a table, so no mask token is looked up. All
slots see what the first one sees, with a window that is one longer than the file says. Reference:
llama.cpp's `graph_mistral_large4` in `src/models/dspark.cpp`, which has not been run against it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.mistral_large4_config import (
    MistralLarge4Spec,
    check_mistral_large4,
    read_mistral_large4_spec,
)
from specdec.drafters.dflash.names import mask_table
from specdec.drafters.dflash.trunk import TrunkOutput, block_attention, visible_keys
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache
from specdec.models.layers import RopeSpec, RotaryEmbedding, WeightOnly, rotate
from specdec.models.rope import read_rope
from specdec.options import RopeOptions


class MistralLarge4Trunk(nn.Module):
    """Fuses features, keeps them as latent keys, and runs blocks against them."""

    def __init__(self, file: GGUFFile, config: DraftConfig) -> None:
        super().__init__()
        check_mistral_large4(file)
        spec, n_embd = read_mistral_large4_spec(file), config.n_embd
        self.config, self.spec = config, spec
        self.cache_shapes = [CacheShape(1, spec.key_dim, 0)] * config.n_layer
        self.fc = nn.Linear(len(config.target_layers) * n_embd, n_embd, bias=False)
        self.enc = nn.ModuleDict({"output_norm": nn.RMSNorm(n_embd, eps=config.rms_eps)})
        self._table = mask_table(file)
        self.add_module(self._table, WeightOnly(config.block_size - 1, n_embd))
        self.blk = nn.ModuleList(MistralLarge4Layer(spec) for _ in range(config.n_layer))
        self.output_norm = nn.RMSNorm(n_embd, eps=config.rms_eps)
        self._layers: list[MistralLarge4Layer] = list(self.blk)  # type: ignore[arg-type]
        # A list: its tables stay on the host.
        self._rotary = [RotaryEmbedding(read_latent_rope(file, spec.n_rot))]

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
        """See `Backbone.__call__`; only the first embedding is used."""
        start, n_slots = cache.length, embeddings.shape[0]
        begin = max(0, start - self.spec.window + 1)
        visible = visible_keys(
            torch.full((n_slots,), start),
            torch.arange(start, start + n_slots),
            (begin, start),
            n_slots,
            window=self.spec.window,
            is_causal=self.config.is_causal,
        )
        assert visible is not None
        visible = visible[:1].to(embeddings.device)
        rotary = self._angles(start, embeddings)
        masks: Tensor = self.get_submodule(self._table).weight  # type: ignore[assignment]
        hidden = torch.cat((embeddings[:1], masks[: n_slots - 1].to(embeddings.dtype)))
        for index, layer in enumerate(self._layers):
            context = cache.committed(index, embeddings.dtype)[0][:, begin:]
            hidden = layer(hidden, rotary, context, visible)
        hidden = self.output_norm(hidden)
        return TrunkOutput(hidden, hidden)

    def _angles(self, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary[0](torch.arange(start, start + like.shape[0]))
        return cos.to(like.device), sin.to(like.device)


class MistralLarge4Layer(nn.Module):
    """Latent attention and a dense feed-forward."""

    attn_norm: nn.RMSNorm
    attn_q: nn.Linear
    attn_kv_a_mqa: nn.Linear
    attn_kv_a_norm: nn.RMSNorm
    attn_k_b: WeightOnly
    attn_v_b: WeightOnly
    attn_output: nn.Linear
    ffn_norm: nn.RMSNorm
    ffn_gate: nn.Linear
    ffn_up: nn.Linear
    ffn_down: nn.Linear

    def __init__(self, spec: MistralLarge4Spec) -> None:
        super().__init__()
        self.spec = spec
        for name, shape in spec.layer_shapes.items():
            if len(shape) == 1:
                self.add_module(name, nn.RMSNorm(shape[0], eps=spec.rms_eps))
            elif len(shape) == 2:
                self.add_module(name, nn.Linear(shape[1], shape[0], bias=False))
            else:
                self.add_module(name, WeightOnly(*shape))

    def forward(
        self,
        hidden: Tensor,  # [S, D]
        rotary: tuple[Tensor, Tensor],
        context: Tensor,  # [1, N, R + n_rot]
        visible: Tensor,  # [1, N + S]
    ) -> Tensor:
        """The layer's output [S, D]."""
        hidden = hidden + self.attend(self.attn_norm(hidden), rotary, context, visible)
        x = self.ffn_norm(hidden)
        out: Tensor = self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))
        return hidden + out

    def keys(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Keys [T, 1, R + n_rot] of input [T, D]; their first R numbers are the values."""
        latent, turning = self.attn_kv_a_mqa(x).split((self.spec.rank, self.spec.n_rot), dim=-1)
        turned = rotate(turning[:, None], *rotary)
        return torch.cat((self.attn_kv_a_norm(latent)[:, None], turned), dim=-1)

    def attend(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], context: Tensor, visible: Tensor
    ) -> Tensor:
        """Attention of normed input [S, D] over context and block, [S, D]."""
        spec = self.spec
        q = self.attn_q(x).view(-1, spec.n_head, spec.head_dim)
        rest, turning = q.split((spec.head_dim - spec.n_rot, spec.n_rot), dim=-1)
        absorbed = torch.einsum("thn,hrn->thr", rest, self.attn_k_b.weight)
        q = torch.cat((absorbed, rotate(turning, *rotary)), dim=-1) / math.sqrt(spec.head_dim)
        keys = self.keys(x, rotary)
        mixed = block_attention(
            q,
            (context, context[..., : spec.rank]),
            (keys, keys[..., : spec.rank]),
            visible,
            None,
        )
        values = torch.einsum("thr,hvr->thv", mixed, self.attn_v_b.weight)
        return self.attn_output(values.flatten(1))  # type: ignore[no-any-return]


def read_latent_rope(file: GGUFFile, n_rot: int) -> RopeSpec:
    """The rotary embedding; with YaRN, cos and sin get the factor of llama.cpp's contexts.

    For a context stretched by f that is (1 + 0.1 ln f) / (1 + 0.1 m ln f) with m =
    `rope.scaling.yarn_log_multiplier` (0 if the file has none), times `rope.scaling.attn_factor`.
    Raises `ModelFileError` for an impossible m.
    """
    with torch.device("cpu"):  # reads `rope_freqs`, while modules are built on the meta device
        rope = read_rope(file, n_rot, RopeOptions())
    attn_factor = file.get_float(file.key("rope.scaling.attn_factor"), default=1.0)
    rope = replace(rope, factors=(), attn_factor=attn_factor)
    key = file.key("rope.scaling.yarn_log_multiplier")
    multiplier = file.get_float(key, default=0.0)
    if not 0.0 <= multiplier < math.inf:
        raise ModelFileError(f"{file.path}: {key} is {multiplier:g}, expected 0 or more")
    if rope.ext_factor == 0.0 or not 0.0 < rope.freq_scale < 1.0:
        return rope
    divisor = 1.0 + 0.1 * multiplier * math.log(1.0 / rope.freq_scale)
    return replace(rope, attn_factor=attn_factor / divisor)

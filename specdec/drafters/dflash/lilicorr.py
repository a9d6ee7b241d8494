"""The LiliCorr head: a small transformer that scores neighbouring candidates of a whole block.

Slot s = 1 ... S - 1 has its C best tokens as candidates, in descending order; each is a node with a
state of width D' = `lilicorr.hidden_size`:

    x = T e(c) + P h_s + F(features) + slot[s] + rank[k]        T = 1 where D' = D
    features = [log p, p, log p - log p(first), k / (C - 1), k = 0]

All nodes attend to each other with a learned bias for each pair. With a the projected feature of
the newest context position, z = silu(J [x ; a ; x * a]) gives each node the unit vectors ``out``
and ``in``, a gives ``out`` of the last token, and candidate b after candidate a scores

    score_s[a][b] = logit_scale * out_{s-1}[a] . in_s[b]

The draft is a walk through these tables as for DFlash2. Slot embeddings and biases belong to the
trained block, so the block always has all its slots. Reference: llama.cpp's
`src/models/lilicorr.cpp`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafters.base import DraftSampler, Pick, to_host
from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.head import DraftBlock, DraftHead, walk
from specdec.drafters.dflash.lilicorr_config import (
    N_FEATURES,
    LiliCorrSizes,
    read_lilicorr_sizes,
)
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile
from specdec.models.layers import WeightOnly

FEATURE_NORM_EPS = 1e-5


class LiliCorrHead(DraftHead):
    """Scores pairs of neighbouring candidates with a transformer over all of them."""

    name = "draft-lilicorr"
    needs_anchor = True

    def __init__(self, file: GGUFFile, config: DraftConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(file, config, vocabulary)
        sizes = read_lilicorr_sizes(file)
        self.sizes = sizes
        self.block_size = config.block_size
        blocks = [_Block(sizes, config.rms_eps) for _ in range(sizes.n_layer)]
        features = _Features(sizes.width)
        # Files number the scorer's blocks behind the trunk's, but for one tensor from 0.
        self.lilicorr = _parts(sizes, config)
        self.blk = nn.ModuleDict(
            {str(config.n_layer + i): module for i, module in enumerate((*blocks, features))}
        )
        self._blocks = tuple(blocks)  # tuples, so that they are no second submodules
        self._describe = (features,)

    def block_len(self, n_draft: int) -> int:
        """See `DraftHead.block_len`; always the trained size."""
        return self.block_size

    def propose(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """See `DraftHead.propose`."""
        assert block.anchor is not None
        rows, scores = self.lattice(block.hidden[1:], block.anchor)
        ids = self.vocabulary.to_target(rows)
        ids, scores = to_host(ids[:n_draft], scores[:n_draft])
        return walk(ids, scores, sampler)

    def lattice(
        self, hidden: Tensor, anchor: Tensor, log_p: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Candidates [..., S - 1, C] by descending logit and scores [..., S - 1, C, C].

        ``hidden`` [..., S - 1, D] are all slots but the first, ``anchor`` [..., D] the feature
        before the block, ``log_p`` [..., S - 1, VD] the log-probabilities if they are at hand.
        Candidates are rows of the draft's vocabulary. Scores are by predecessor and successor; the
        first step has its only predecessor, the last token, in row 0 and zeros elsewhere.
        """
        if log_p is None:
            log_p = self.vocabulary.logits(hidden).log_softmax(-1)
        log_p, rows = log_p.topk(self.sizes.n_candidates)
        nodes = self._run(self._nodes(hidden, self.vocabulary.to_target(rows), log_p))
        part = self.lilicorr
        context = part["anchor_norm"](part["context_proj"](anchor))  # [..., D']
        spread = context[..., None, None, :].expand_as(nodes)
        joined = torch.cat((nodes, spread, nodes * spread), dim=-1)
        factors = F.silu(part["factor_input_proj"](joined))
        out, into = self._unit(part["out_head"](factors)), self._unit(part["in_head"](factors))
        start = self._unit(part["anchor_out_head"](context))[..., None, :]
        first = start @ into[..., 0, :, :].transpose(-1, -2)  # [..., 1, C]
        first = F.pad(first, (0, 0, 0, self.sizes.n_candidates - 1))[..., None, :, :]
        later = out[..., :-1, :, :] @ into[..., 1:, :, :].transpose(-1, -2)
        return rows, torch.cat((first, later), dim=-3) * self.sizes.logit_scale

    def _nodes(self, hidden: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
        """Initial states [..., S - 1, C, D'] of the candidates ``ids`` with log-probabilities."""
        part, n_candidates = self.lilicorr, self.sizes.n_candidates
        tokens = self.vocabulary.embed(ids.flatten()).view(*ids.shape, -1)
        if "token_proj" in part:
            tokens = part["token_proj"](tokens)
        rank = torch.arange(n_candidates, device=ids.device) / max(1, n_candidates - 1)
        features = (log_p, log_p.exp(), log_p - log_p[..., :1], rank.expand_as(log_p))
        stacked = torch.stack((*features, (rank == 0).float().expand_as(log_p)), dim=-1)
        (describe,) = self._describe
        slots = self.get_parameter("lilicorr.slot_embedding.weight")
        ranks = self.get_parameter("lilicorr.rank_embedding.weight")
        nodes = tokens + part["pass_hidden_proj"](hidden)[..., None, :] + describe(stacked)
        return nodes + slots[:, None] + ranks  # type: ignore[no-any-return]

    def _run(self, nodes: Tensor) -> Tensor:
        """The transformer over all nodes [..., S - 1, C, D'] of a block, normed."""
        x = nodes.flatten(-3, -2)
        bias = self.get_parameter("lilicorr.attention_bias.bias")
        for i, block in enumerate(self._blocks):
            in_proj = self.lilicorr.get_submodule(f"layers.{i}.attn.in_proj")
            x = block(x, in_proj, bias)
        return self.lilicorr["output_norm"](x).view_as(nodes)  # type: ignore[no-any-return]

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.sizes.vector_eps)


class _Block(nn.Module):
    """One pre-norm layer over the nodes; its input projection is stored elsewhere."""

    def __init__(self, sizes: LiliCorrSizes, rms_eps: float) -> None:
        super().__init__()
        self.n_head = sizes.n_head
        self.attn_norm = nn.RMSNorm(sizes.width, eps=rms_eps)
        self.attn_output = nn.Linear(sizes.width, sizes.width)
        self.ffn_norm = nn.RMSNorm(sizes.width, eps=rms_eps)
        self.ffn_up = nn.Linear(sizes.width, sizes.n_ff)
        self.ffn_down = nn.Linear(sizes.n_ff, sizes.width)

    def forward(self, x: Tensor, in_proj: nn.Module, bias: Tensor) -> Tensor:
        """[..., N, D'] -> the same for N nodes; ``bias`` [heads, N, N] is by query and key."""
        joint = in_proj(self.attn_norm(x)).unflatten(-1, (3, self.n_head, -1))
        q, k, v = (part.transpose(-3, -2) for part in joint.unbind(-3))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.attn_output(mixed.transpose(-3, -2).flatten(-2))
        return x + self.ffn_down(F.silu(self.ffn_up(self.ffn_norm(x))))  # type: ignore[no-any-return]


class _Features(nn.Module):
    """Describes candidates by their probability and rank, [..., 5] -> [..., D']."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn_norm = nn.LayerNorm(N_FEATURES, eps=FEATURE_NORM_EPS)
        self.ffn_up = nn.Linear(N_FEATURES, width)
        self.ffn_down = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.ffn_down(F.silu(self.ffn_up(self.ffn_norm(features))))  # type: ignore[no-any-return]


def _parts(sizes: LiliCorrSizes, config: DraftConfig) -> nn.ModuleDict:
    """The modules whose names begin with ``lilicorr.``."""
    width, n_slots = sizes.width, config.block_size - 1
    n_nodes = n_slots * sizes.n_candidates
    parts: dict[str, nn.Module] = {
        "pass_hidden_proj": nn.Linear(config.n_embd, width),
        "context_proj": nn.Linear(config.n_embd, width),
        "slot_embedding": WeightOnly(n_slots, width),
        "rank_embedding": WeightOnly(sizes.n_candidates, width),
        "attention_bias": nn.ParameterDict({"bias": torch.empty(sizes.n_head, n_nodes, n_nodes)}),
        "layers": nn.ModuleList(
            nn.ModuleDict({"attn": nn.ModuleDict({"in_proj": nn.Linear(width, 3 * width)})})
            for _ in range(sizes.n_layer)
        ),
        "output_norm": nn.RMSNorm(width, eps=config.rms_eps),
        "anchor_norm": nn.RMSNorm(width, eps=config.rms_eps),
        "factor_input_proj": nn.Linear(3 * width, width),
        "out_head": nn.Linear(width, sizes.n_factor),
        "in_head": nn.Linear(width, sizes.n_factor),
        "anchor_out_head": nn.Linear(width, sizes.n_factor),
    }
    if width != config.n_embd:
        parts["token_proj"] = nn.Linear(config.n_embd, width)
    return nn.ModuleDict(parts)

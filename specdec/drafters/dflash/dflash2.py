"""The DFlash2 head: a path through a lattice of candidates.

Slot i >= 1 has the C candidates c_i with the best logits u_i, and a gate ``w_i = W h_i`` of rank R.
With P and S the tables of predecessors and successors, candidate b after candidate a scores

    score_i[a][b] = sum over r of P[c_{i-1}[a]][r] * w_i[r] * S[c_i[b]][r]  +  u_i[b]

where the last token stands in for c_0. The draft is the greedy (or sampled) walk through the
tables. Logits are scaled and soft-capped first if the file says so. Reference: llama.cpp's
`src/models/dflash2.cpp`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.drafters.base import DraftSampler, Pick, to_host
from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.head import DraftBlock, DraftHead, walk
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile
from specdec.models.layers import new_embedding


class DFlash2Head(DraftHead):
    """Scores pairs of neighbouring candidates and walks the best path."""

    name = "draft-dflash2"

    def __init__(self, file: GGUFFile, config: DraftConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(file, config, vocabulary)
        rank = file.get_int(file.key("selector_rank"))
        self.n_candidates = file.get_int(file.key("selector_top_k"))
        self.logit_scale = file.get_float(file.key("logit_scale"), default=1.0) or 1.0
        self.logit_softcap = file.get_float(file.key("final_logit_softcapping"), default=0.0)
        self.selector_predecessor = new_embedding(config.n_vocab, rank)
        self.selector_successor = new_embedding(config.n_vocab, rank)
        self.selector_hidden = nn.Linear(config.n_embd, rank, bias=False)

    def propose(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """See `DraftHead.propose`."""
        lattice = self.lattice(block.hidden[1 : n_draft + 1], block.last_token)
        ids, scores = to_host(*lattice)
        return walk(ids, scores, sampler)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [K, VD] of hidden states [K, D], scaled and soft-capped."""
        logits = self.vocabulary.logits(hidden) * self.logit_scale
        cap = self.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def lattice(self, hidden: Tensor, last_token: int) -> tuple[Tensor, Tensor]:
        """Candidates [K, C] in ascending order and scores [K, C, C] (predecessor, successor).

        ``hidden`` [K, D] are the slots after the one of ``last_token``; all predecessors of the
        first are that token.
        """
        unary, rows = self.logits(hidden).topk(self.n_candidates)
        ids, order = self.vocabulary.to_target(rows).sort()
        unary = unary.gather(-1, order)
        anchor = torch.full_like(ids[:1], last_token)
        return ids, self.pairs(torch.cat((anchor, ids[:-1])), hidden, ids) + unary[:, None]

    def pairs(self, before: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """What the selector adds for tokens ``ids`` [..., C] after ``before`` [..., C'].

        Scores [..., C', C] of slots with states ``hidden`` [..., D].
        """
        gated = self.selector_predecessor(before) * self.selector_hidden(hidden)[..., None, :]
        return gated @ self.selector_successor(ids).transpose(-1, -2)  # type: ignore[no-any-return]

"""The plain head: slot i of the block drafts token i, each slot on its own.

With h_i the hidden state of slot i >= 1 and W the output matrix: ``d_i = argmax(W h_i)``. The slots
are predicted in parallel, so sampling them one by one would not give a joint distribution; q is the
point mass on the best token, and rejection sampling with a point mass is matching.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from specdec.drafters.base import N_BEST, DraftSampler, Pick
from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.head import DraftBlock, to_host
from specdec.drafters.dflash.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile


class DFlashHead(nn.Module):
    """Takes the best token of each slot."""

    name: ClassVar[str] = "draft-dflash"
    needs_anchor: ClassVar[bool] = False
    can_sample: ClassVar[bool] = False

    def __init__(self, file: GGUFFile, config: DraftConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.n_max = config.block_size - 1
        self._vocabulary = [vocabulary]  # a list, so that it is no submodule

    def block_len(self, n_draft: int) -> int:
        """See `DraftHead.block_len`."""
        return n_draft + 1

    def propose(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """See `DraftHead.propose`."""
        vocabulary = self._vocabulary[0]
        logits = vocabulary.logits(block.hidden[1 : n_draft + 1])
        best, rows = logits.topk(min(N_BEST, logits.shape[-1]))
        picks: list[Pick] = []
        for scores, ids in zip(*to_host(best, vocabulary.to_target(rows)), strict=True):
            pick = sampler.pick(scores, ids)
            if pick.confidence < sampler.p_min:
                break
            picks.append(pick)
        return picks

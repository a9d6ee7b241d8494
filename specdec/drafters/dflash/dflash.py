"""The plain head: slot i of the block drafts token i, each slot on its own.

With h_i the hidden state of slot i >= 1 and W the output matrix: ``d_i = argmax(W h_i)``. The slots
are predicted in parallel, so sampling them one by one would not give a joint distribution; q is the
point mass on the best token, and rejection sampling with a point mass is matching.
"""

from __future__ import annotations

from specdec.drafters.base import N_BEST, DraftSampler, Pick, to_host
from specdec.drafters.dflash.head import DraftBlock, DraftHead


class DFlashHead(DraftHead):
    """Takes the best token of each slot."""

    name = "draft-dflash"
    can_sample = False

    def propose(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """See `DraftHead.propose`."""
        logits = self.vocabulary.logits(block.hidden[1 : n_draft + 1])
        best, rows = logits.topk(min(N_BEST, logits.shape[-1]))
        scores, ids = to_host(best, self.vocabulary.to_target(rows))
        picks: list[Pick] = []
        for slot_scores, slot_ids in zip(scores, ids, strict=True):
            pick = sampler.pick(slot_scores, slot_ids)
            if pick.confidence < sampler.p_min:
                break
            picks.append(pick)
        return picks

"""What a head gets and gives, and the walk through a lattice of candidates."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from specdec.drafters.base import DraftSampler, Pick
from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The trunk's answer to one block of S slots; slot 0 is the last token."""

    hidden: Tensor
    """[S, D] after the output norm."""
    state: Tensor
    """[S, D] what a confidence head reads."""
    last_token: int
    anchor: Tensor | None
    """[D] fused feature of the newest observed token, zeros before the first one; only for heads
    with `needs_anchor`."""


class DraftHead(nn.Module, abc.ABC):
    """Turns hidden states into draft tokens; its parameters carry GGUF names."""

    name: ClassVar[str]
    """Its spec type."""
    needs_anchor: ClassVar[bool] = False
    """Whether it reads `DraftBlock.anchor`."""
    can_sample: ClassVar[bool] = True
    """Whether its tokens can be drawn from a distribution of its own."""

    def __init__(self, file: GGUFFile, config: DraftConfig, vocabulary: DraftVocabulary) -> None:
        """The modules for a file, built on the meta device; weights come later."""
        super().__init__()
        self.n_max = config.block_size - 1
        """Longest draft that one block yields."""
        self._vocabulary = (vocabulary,)  # a tuple, so that it is no submodule

    @property
    def vocabulary(self) -> DraftVocabulary:
        """Embeddings and output matrix; not part of the head's own parameters."""
        return self._vocabulary[0]

    def block_len(self, n_draft: int) -> int:
        """Slots of the block that yields ``n_draft`` tokens, 1 <= n_draft <= n_max."""
        return n_draft + 1

    @abc.abstractmethod
    def propose(self, block: DraftBlock, n_draft: int, sampler: DraftSampler) -> list[Pick]:
        """Up to ``n_draft`` tokens; ends before the first one less likely than ``sampler.p_min``.

        Reads results from the device once, unless tokens are drawn one by one.
        """


def walk(ids: Tensor, scores: Tensor, sampler: DraftSampler) -> list[Pick]:
    """A path through a lattice, step by step from the best or drawn candidate to the next one.

    ids [K, C]: candidate tokens of each step; scores [K, C, C]: of each candidate (last axis) after
    each candidate of the step before. All on the CPU. Before the first step the predecessor is 0.
    """
    picks: list[Pick] = []
    before = 0
    for step_ids, step_scores in zip(ids, scores, strict=True):
        pick = sampler.pick(step_scores[before], step_ids)
        if pick.confidence < sampler.p_min:
            break
        picks.append(pick)
        before = step_ids.tolist().index(pick.token)
    return picks

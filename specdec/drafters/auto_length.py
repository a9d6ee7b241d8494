"""Draft lengths that are worth their time: chosen from measured costs and from what was accepted.

With T(k) the seconds of a round that drafts k tokens and p_i the chance that token i is accepted
if the tokens before it are, a round emits ``E(k) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_k`` tokens
on average; k = 0 is plain decoding. The length that maximises E(k) / T(k) is drafted.

T(k) starts from what was measured and follows the rounds' own times. The length never depends on
the draft that it is chosen for, so verification stays exact.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Self

from specdec.drafters.base import Draft, Drafter, Saves
from specdec.drafters.costs import LiveCosts

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.drafters.costs import Costs
    from specdec.options import SamplingOptions

PRIOR = 0.6
"""Chance of acceptance before anything is known."""
WEIGHT = 2.0
"""How many observations the chance of the position before, or `PRIOR`, counts for."""
MEMORY = 0.99
"""What a round's observations count for one round later."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
"""Rounds without drafts until one is tried again; twice as many after each vain trial."""


class Acceptance:
    """How often each position is accepted if those before it are, in the recent past."""

    def __init__(self, n_max: int) -> None:
        self._tried = [0.0] * n_max
        self._accepted = [0.0] * n_max

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one draft. Positions behind the first rejected one tell nothing."""
        for position in range(len(self._tried)):
            self._tried[position] *= MEMORY
            self._accepted[position] *= MEMORY
            self._tried[position] += position < min(drafted, accepted + 1)
            self._accepted[position] += position < accepted

    def chances(self) -> list[float]:
        """p_1, p_2, ...; a position that is seldom reached is taken to be like the one before."""
        chances, before = [], PRIOR
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            before = (accepted + WEIGHT * before) / (tried + WEIGHT)
            chances.append(before)
        return chances


def best_length(costs: Costs | LiveCosts, chances: list[float], shortest: int = 0) -> int:
    """The length, at least ``shortest``, with the most tokens per second."""
    best, best_speed = shortest, 0.0
    expected = reached = 1.0
    for length in range(len(chances) + 1):
        if length:
            reached *= chances[length - 1]
            expected += reached
        speed = expected / costs.round(length)
        if length >= shortest and speed > best_speed:
            best, best_speed = length, speed
    return best


class AutoLength:
    """A drafter whose drafts are as long as is worth their time."""

    def __init__(self, inner: Drafter, costs: Costs) -> None:
        self.inner, self.costs = inner, costs
        self.name, self.taps, self.n_max = inner.name, inner.taps, inner.n_max
        self._start()

    def _start(self) -> None:
        self._acceptance = Acceptance(self.n_max)
        self._live = LiveCosts(self.costs)
        self._drafted = 0
        self._round: tuple[int, float] | None = None
        self._rests, self._pause = 0, FIRST_PAUSE

    def __copy__(self) -> Self:
        return type(self)(copy.copy(self.inner), self.costs)

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        self._start()
        return self.inner.begin(sampling, kept)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self.inner.observe(tokens, hidden)
        if self._round is not None:
            length, started = self._round
            self._round = None
            if length or len(tokens) == 1:  # otherwise another drafter's draft was verified
                self._live.note(length, time.perf_counter() - started)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`; `end` is `auto` where the choice of the length ended it."""
        started = time.perf_counter()
        length = self._choose()
        if not length:
            self._round = (0, started)
            return Draft(end="auto")
        draft = self.inner.draft(last_token, min(room, length))
        self._drafted = len(draft.tokens)
        self._round = (length, started) if self._drafted == length else None
        if draft.end == "room" and length <= room:
            draft.end = "auto"
        return draft

    def accept(self, accepted: int) -> None:
        """See `Drafter.accept`."""
        self.inner.accept(accepted)
        self._acceptance.add(self._drafted, accepted)

    def save(self) -> None:
        """See `Saves.save`."""
        if isinstance(self.inner, Saves):
            self.inner.save()

    def _choose(self) -> int:
        chances = self._acceptance.chances()
        length = best_length(self._live, chances)
        if length or not self.n_max:
            self._rests = 0
            return length
        self._rests += 1
        if self._rests <= self._pause:
            return 0
        self._rests, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
        return best_length(self._live, chances, shortest=1)

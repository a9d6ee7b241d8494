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

import torch

from specdec.drafters.base import Draft, Drafter, Saves

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.drafters.costs import Costs, LiveCosts
    from specdec.options import SamplingOptions

PRIOR = 0.6
"""Chance of acceptance before anything is known."""
WEIGHT = 4.0
"""How many observations the chance of the position before, or `PRIOR`, counts for."""
MEMORY = 0.99
"""What a round's observations count for one round later."""
MARGIN = 1.02
"""How much faster than plain decoding drafts must be expected to be."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 256
"""Rounds without drafts until some are tried again; twice as many after each vain trial."""
TRIAL = 4
"""Rounds of a trial."""
PLAIN_EVERY = 64
"""Rounds with drafts until one goes without, to see what that takes."""
MOST_UNSEEN = 256
"""Tokens that are kept for a resting drafter."""


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
        speed = expected / costs.round(length) * (1.0 if length else MARGIN)
        if length >= shortest and speed > best_speed:
            best, best_speed = length, speed
    return best


class Unseen:
    """Tokens that a drafter has not been shown yet, with their taps."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._tokens: list[Tensor] = []
        self._hidden: list[Tensor] = []

    def add(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Keeps tokens [T] and taps [T, n_taps, D] behind those before."""
        self.n_tokens += len(tokens)
        self._tokens.append(tokens)
        if hidden is not None:
            self._hidden.append(hidden)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """All of them as one; then there are none."""
        parts = self._tokens, self._hidden
        self.n_tokens, self._tokens, self._hidden = 0, [], []
        tokens, hidden = (
            part[0] if len(part) == 1 else torch.cat(part) if part else None for part in parts
        )
        assert tokens is not None
        return tokens, hidden


class AutoLength:
    """A drafter whose drafts are as long as is worth their time.

    While they are not, it rests: what it should see is kept, and shown at once when it is needed.
    """

    def __init__(self, inner: Drafter, costs: LiveCosts) -> None:
        """``costs`` are shared by all sessions."""
        self.inner, self.costs = inner, costs
        self.name, self.taps, self.n_max = inner.name, inner.taps, inner.n_max
        self._start(0)

    def _start(self, n_shown: int) -> None:
        self._acceptance = Acceptance(self.n_max)
        self._n_shown, self._unseen = n_shown, Unseen()
        self._drafted = 0
        self._round: tuple[int, float] | None = None
        self._is_resting, self._rest, self._pause = False, 0, FIRST_PAUSE
        self._trial = self._awake = 0

    def __copy__(self) -> Self:
        return type(self)(copy.copy(self.inner), self.costs)

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        if kept > self._n_shown:
            self._show()
        kept = self.inner.begin(sampling, kept)
        self._start(kept)
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self._unseen.add(tokens, hidden)
        if not self._is_resting or self._unseen.n_tokens >= MOST_UNSEEN:
            self._show()
        if self._round is not None:
            length, started = self._round
            self._round = None
            if length or len(tokens) == 1:  # otherwise another drafter's draft was verified
                self.costs.note(length, time.perf_counter() - started)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`; `end` is `auto` where the choice of the length ended it."""
        length = self._choose()
        if not length:
            self._round = (0, time.perf_counter())
            return Draft(end="auto")
        self._show()
        started = time.perf_counter()
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
        """A draft's length. Now and then what seems worse is tried: it may have changed."""
        if self._rest:
            self._rest -= 1
            return 0
        chances = self._acceptance.chances()
        length = best_length(self.costs, chances)
        if length or not self.n_max:
            self._is_resting, self._pause, self._trial = False, FIRST_PAUSE, 0
            self._awake += 1
            return 0 if self._awake % PLAIN_EVERY == 0 else length
        if self._is_resting and best_length(self.costs, [1.0] * self.n_max):
            self._is_resting, self._trial = False, TRIAL
        if self._trial:
            self._trial -= 1
            return best_length(self.costs, chances, shortest=1)
        self._is_resting, self._rest = True, self._pause - 1
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return 0

    def _show(self) -> None:
        """Shows the drafter what it has not seen; also between requests."""
        if self._unseen.n_tokens:
            self._n_shown += self._unseen.n_tokens
            with torch.inference_mode():
                self.inner.observe(*self._unseen.take())

"""Draft lengths that are worth their time: chosen from measured costs and from what was accepted.

With T(k) the seconds of a round that drafts k tokens and p_i the chance that token i is accepted
if the tokens before it are, a round emits ``E(k) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_k`` tokens
on average; k = 0 is plain decoding. The length that maximises E(k) / T(k) is drafted.

Where that is 0 drafts are tried all the same, as far as an allowance reaches: a token's time at
first, and `SHARE` of the time since. What the accepted tokens of a trial save is given back to it.

T(k) starts from what was measured and follows the rounds' own times. The length depends on the past
alone, never on the draft that it is chosen for, so verification stays exact.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from specdec.drafters.base import Draft, Drafter, Saves
from specdec.drafters.experience import Experience

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.drafters.costs import LiveCosts
    from specdec.options import SamplingOptions

MARGIN = 1.03
"""How much faster than plain decoding drafts must be expected to be."""
SETTLED = 8
"""Rounds of a reply before anything is tried: how it begins says little about the rest."""
PLAIN_EVERY, PLAIN = 96, range(4, 7)
"""Of so many rounds with drafts, those that go without, to see what that takes."""
MOST_UNSEEN = 512
"""Tokens that are kept for a resting drafter."""


def best_length(costs: LiveCosts, chances: list[float], shortest: int = 0) -> int:
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


class Plan(NamedTuple):
    """What to draft until the next draft changes what is known."""

    best: int
    """The length with the most tokens per second."""
    trial: int
    """If that is 0: the length that is tried now and then; 0 if no draft could ever pay."""
    price: float
    """What a vain trial costs, in rounds without a draft."""


class AutoLength:
    """A drafter whose drafts are as long as is worth their time.

    While they are not, it rests: what it should see is kept, and shown at once when it is needed.
    """

    def __init__(self, inner: Drafter, experience: Experience) -> None:
        """``experience`` is shared by all sessions."""
        self.inner, self.experience = inner, experience
        self.name, self.taps, self.n_max = inner.name, inner.taps, inner.n_max
        self._awake = 0
        self._start(0)

    def _start(self, n_shown: int) -> None:
        self._n_shown, self._unseen = n_shown, Unseen()
        self._plan: Plan | None = None
        self._length = self._drafted = self._n_rounds = 0
        self._price: float | None = None
        self._started: float | None = None
        self._is_resting = self._is_same = False

    def __copy__(self) -> Self:
        return type(self)(copy.copy(self.inner), self.experience)

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        if kept > self._n_shown:
            self._show()
        kept = self.inner.begin(sampling, kept)
        self._start(kept)
        self.experience.acceptance.fade()
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self._unseen.add(tokens, hidden)
        if not self._is_resting or self._unseen.n_tokens >= MOST_UNSEEN:
            self._show()
        if self._started is not None:
            self._end_round(len(tokens), time.perf_counter() - self._started)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`; `end` is `auto` where the choice of the length ended it."""
        before = self._length
        self._length, self._drafted = self._choose(), 0
        self._is_same = (before > 0) == (self._length > 0)
        self._is_resting = not self._length
        self._started = time.perf_counter()
        if not self._length:
            return Draft(end="auto")
        self._show()
        draft = self.inner.draft(last_token, min(room, self._length))
        self._drafted = len(draft.tokens)
        if draft.end == "room" and self._length <= room:
            draft.end = "auto"
        return draft

    def accept(self, accepted: int) -> None:
        """See `Drafter.accept`."""
        self.inner.accept(accepted)
        self.experience.acceptance.add(self._drafted, accepted)

    def save(self) -> None:
        """See `Saves.save`."""
        self.experience.save()
        if isinstance(self.inner, Saves):
            self.inner.save()

    def _choose(self) -> int:
        """A draft's length. Now and then what seems worse is tried: it may have changed."""
        plan = self._plan = self._plan or self._make_plan()
        self._price = None
        self._n_rounds += 1
        if plan.best:
            self._awake += 1
            return 0 if self._awake % PLAIN_EVERY in PLAIN else plan.best
        if not plan.trial or self._n_rounds <= SETTLED:
            return 0
        price = plan.price + self.experience.costs.catch_up(self._unseen.n_tokens)
        if not self.experience.affords(price):
            return 0
        self._price = price
        return plan.trial

    def _make_plan(self) -> Plan:
        costs, chances = self.experience.costs, self.experience.acceptance.chances()
        best = best_length(costs, chances)
        if best or not best_length(costs, [1.0] * self.n_max):
            return Plan(best, 0, 0.0)
        trial = best_length(costs, chances, shortest=1)
        return Plan(0, trial, costs.round(trial) / costs.round(0) - 1)

    def _end_round(self, n_tokens: int, seconds: float) -> None:
        """Learns from a round what it took and, if it was a trial, what that was worth."""
        self._started = None
        costs, length = self.experience.costs, self._length
        self.experience.earn(n_tokens)
        if self._price is not None:
            # The first draft after a rest finds cold caches.
            price = min(max(costs.in_plain_rounds(seconds) - 1, self._price), 2 * self._price)
            self.experience.pay(price - (n_tokens - 1 if self._drafted else 0))
        # The first round of its kind is no measure. Nor is one whose draft was cut by the room or
        # p_min, or one that verified another drafter's draft.
        if self._is_same and self._drafted == length and (length or n_tokens == 1):
            costs.note(length, seconds)
        if length:
            self._plan = None

    def _show(self) -> None:
        """Shows the drafter what it has not seen; also between requests."""
        if self._unseen.n_tokens:
            self._n_shown += self._unseen.n_tokens
            with torch.inference_mode():
                self.inner.observe(*self._unseen.take())

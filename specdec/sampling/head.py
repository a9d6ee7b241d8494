"""Sampling from the head of a row: its few best logits, the best first.

On native kernels a pass leaves nothing else in the processor's caches than weights, so whatever is
called between two passes is fetched from memory again. numpy and torch are large, and cost more
there than what they compute; chains that begin with top-k do without them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.sampling.candidates import COLDEST, NEARLY_ALL

HeadFilter = Callable[[Sequence[float]], Sequence[float]]
"""Logits, the best first, to those that are left, at least one: as many of the first, or others."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best tokens of each of some rows: by logit, of equal ones the lower id first."""

    n: int
    """Tokens of a row."""
    ids: Sequence[int]
    """[R * n]; the first of a row is -1 if one of the row's logits is not finite."""
    logits: Sequence[float]
    """[R * n]"""

    def tokens(self) -> list[int]:
        """The best one of each row, or -1."""
        return list(self.ids[:: self.n])

    def head(self, row: int, n: int) -> tuple[Sequence[int], Sequence[float]] | None:
        """The ``n`` best of a row and their logits; None if they are not known."""
        first = row * self.n
        if n > self.n or self.ids[first] < 0:
            return None
        return self.ids[first : first + n], self.logits[first : first + n]


@dataclass(frozen=True, slots=True)
class HeadSampler:
    """A chain whose first filter is a top-k, and whose others do not ask which tokens these are."""

    k: int
    """How many tokens the first one leaves."""
    filters: Sequence[HeadFilter]
    """Those behind the first one."""
    banned: frozenset[int] = frozenset()
    """Tokens that are left out before it."""

    @property
    def n(self) -> int:
        """How many of a row's best tokens it has to know."""
        return self.k + len(self.banned)

    def draw(self, ids: Sequence[int], logits: Sequence[float], uniform: float) -> int:
        """The token that ``uniform`` in [0, 1) falls on, of the ``n`` best ones of a row."""
        if self.banned:
            kept = [i for i, token in enumerate(ids) if token not in self.banned]
            ids, logits = [ids[i] for i in kept], [logits[i] for i in kept]
        return ids[self._position(logits[: self.k], uniform)]

    def _position(self, logits: Sequence[float], uniform: float) -> int:
        for apply in self.filters:
            logits = apply(logits)
        sums = _sums_of_weights(logits)
        position = bisect_right(sums, min(uniform, NEARLY_ALL) * sums[-1])
        return min(position, len(sums) - 1)


def top_p(logits: Sequence[float], p: float) -> Sequence[float]:
    """See `specdec.sampling.filters.top_p`."""
    sums = _sums_of_weights(logits)
    return logits[: bisect_left(sums, min(p, NEARLY_ALL) * sums[-1]) + 1]


def min_p(logits: Sequence[float], p: float) -> Sequence[float]:
    """See `specdec.sampling.filters.min_p`."""
    floor = logits[0] + math.log(min(p, 1.0))
    return [logit for logit in logits if logit >= floor]


def temperature(logits: Sequence[float], t: float) -> Sequence[float]:
    """See `specdec.sampling.filters.temperature`."""
    return logits[:1] if t < COLDEST else [logit / t for logit in logits]


def _sums_of_weights(logits: Sequence[float]) -> list[float]:
    """Running sums of what probabilities are proportional to."""
    top = logits[0]
    return list(itertools.accumulate(math.exp(logit - top) for logit in logits))

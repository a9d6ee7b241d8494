"""Candidates: the tokens that are still in the race, and the draw from them.

Filters take and return `Candidates`. The order that they speak of is by logit, of equal ones the
lower id first. Nothing sorts a vocabulary: thresholds narrow down what is looked for until a few
hundred tokens are left, and filters behind the first one work on what survived.

All of it is numpy, on the CPU: on rows of this size it is several times as fast as torch, and it
starts no threads that have to be waited for where cores are busy.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specdec.errors import SpecdecError

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.int64]

_HEADS = (256, 4096, sys.maxsize)
"""How many of the largest keys `walk` looks at, until their weight suffices."""
_SORTED = 512
"""Keys that are sorted rather than narrowed down once more."""
NEARLY_ALL = 1 - 1e-12
"""The largest share that a walk looks for; up to here rounding leads to no key without a weight."""
COLDEST = 1e-30
"""The lowest temperature that logits are divided by."""


def _nothing_left() -> SpecdecError:
    return SpecdecError(
        "sampling: no token is left to choose from; the model's logits are not numbers, "
        "or --logit-bias excludes every token"
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Logits of the remaining tokens, in ascending order of their ids. Nobody writes to them."""

    logits: Floats  # [n]
    ids: Positions | None = None  # [n], ascending; None: position is id

    def __len__(self) -> int:
        return len(self.logits)

    def token_ids(self) -> Positions:
        """The token of each position, int64 [n]."""
        return np.arange(len(self)) if self.ids is None else self.ids

    def weights(self) -> Doubles:
        """What probabilities are proportional to, float64 [n]; 1 for the best candidate.

        Raises `SpecdecError` if all logits are minus infinity, or one is not a number.
        """
        top = self.logits.max()
        if not -np.inf < top < np.inf:
            raise _nothing_left()
        weights: Doubles = np.exp(self.logits - top).astype(np.float64)
        return weights

    def probabilities(self) -> Doubles:
        """Softmax over the candidates, float64 [n]."""
        weights = self.weights()
        weights /= weights.sum()
        return weights

    def keep(self, mask: Mask) -> Candidates:
        """The candidates where ``mask`` (bool [n]) holds; `SpecdecError` if it holds nowhere."""
        return self.take(mask.nonzero()[0])

    def take(self, positions: Positions) -> Candidates:
        """The candidates at ``positions``, which ascend; `SpecdecError` if there are none."""
        if not len(positions):
            raise _nothing_left()
        ids = positions if self.ids is None else self.ids[positions]
        return Candidates(self.logits[positions], ids)

    def with_logits(self, logits: Floats) -> Candidates:
        """The same tokens with other logits."""
        return Candidates(logits, self.ids)

    def positions_of(self, tokens: Positions) -> tuple[Positions, Mask]:
        """Where ``tokens`` (int64 [m], distinct) are, and which of them are candidates at all.

        Returns positions, int64 [f], and a bool mask [m] with f true values.
        """
        if self.ids is None:
            found = tokens < len(self)
            return tokens[found], found
        slots = self.ids.searchsorted(tokens).clip(max=len(self) - 1)
        found = self.ids[slots] == tokens
        return slots[found], found

    def head(self, n: int) -> Candidates:
        """The ``n`` best candidates, without those at minus infinity.

        Raises `SpecdecError` if none is left or the logits are not numbers.
        """
        best = self if n >= len(self) else self.take(largest(self.logits, n))
        return best.keep(best.logits > -np.inf) if best.logits.min() == -np.inf else best

    def in_order(self) -> Positions:
        """All positions, the best candidate first; for short rows."""
        return (-self.logits).argsort(kind="stable")

    def probability_of(self, token: int) -> float:
        """Softmax probability of one candidate; 0 if it is none."""
        position, found = self.positions_of(np.array([token]))
        return float(self.probabilities()[position[0]]) if found[0] else 0.0

    def draw(self, uniform: float) -> int:
        """The token that ``uniform`` in [0, 1) falls on, walking down from the most probable one.

        Small differences in the logits change the result only if they move a boundary across
        ``uniform``: the order is by logit and id, the sums are float64.
        """
        position = walk(self.logits, self.weights(), uniform, "right")
        return position if self.ids is None else int(self.ids[position])


def largest(keys: Floats, n: int) -> Positions:
    """Positions of the ``n`` largest keys, of equal ones the first, ascending; n < len(keys).

    Empty if one of the keys is not a number.
    """
    near: Positions = (keys >= _floor(keys, n)).nonzero()[0]
    if len(near) <= _SORTED:
        best: Positions = near[(-keys[near]).argsort(kind="stable")[:n]]
        best.sort()
        return best
    values = keys[near]
    edge = np.partition(values, len(near) - n)[len(near) - n]
    kept = values > edge
    ties = (values == edge).nonzero()[0]
    kept[ties[: n - np.count_nonzero(kept)]] = True
    best = near[kept]
    return best


def walk(keys: Floats, weights: Doubles, share: float, side: Literal["left", "right"]) -> int:
    """The position where a walk from the largest key down, equal ones in turn, has met ``share``.

    That is the first one whose running sum of ``weights`` is at least (side "left") or above
    ("right") that share of all. Keys that are passed by on the way are not sorted.
    """
    mass = min(share, NEARLY_ALL) * float(weights.sum())
    if side == "left":
        mass = math.nextafter(mass, -math.inf)  # at least a number is above the one before
    if len(keys) <= _SORTED:
        return _walk_sorted(keys, weights, mass)
    part, passed = _narrowed(keys, weights, mass)
    return int(part[_walk_sorted(keys[part], weights[part], mass - passed)])


def _walk_sorted(keys: Floats, weights: Doubles, mass: float) -> int:
    order = (-keys).argsort(kind="stable")
    slot = weights[order].cumsum().searchsorted(mass, "right")
    return int(order[min(int(slot), len(order) - 1)])


def _narrowed(keys: Floats, weights: Doubles, mass: float) -> tuple[Positions, float]:
    """The positions, in turn, among which a walk has met more than ``mass``, and how much before.

    They are few, unless they are equal.
    """
    passed, above = 0.0, math.inf
    for n in _HEADS:
        floor = _floor(keys, n) if n < len(keys) else -math.inf
        part = (keys >= floor).nonzero()[0]
        met = float(weights[part].sum())
        if met > mass or n >= len(keys):
            break
        passed, above = met, floor
    part = part[keys[part] < above]
    while len(part) > _SORTED:
        upper = keys[part] >= _floor(keys[part], len(part) // 2)
        if upper.all():  # most of them are equal
            break
        met = passed + float(weights[part[upper]].sum())
        if met > mass:
            part = part[upper]
        else:
            passed, part = met, part[~upper]
    return part, passed


def down_to(keys: Floats, position: int) -> Mask:
    """What a walk as in `walk` meets until ``position``, that one included; bool like ``keys``."""
    edge = keys[position]
    met: Mask = keys > edge
    met[: position + 1] |= keys[: position + 1] == edge
    return met


def _floor(keys: Floats, n: int) -> float:
    """A key that at least ``n`` keys reach and not many more; NaN if there is one.

    The n-th largest of the maxima of many short columns: each column has a key of that size.
    """
    width = max(4 * n, 1024)
    n_rows = len(keys) // width
    if n_rows > 1:
        rest = keys[n_rows * width :]
        keys = keys[: n_rows * width].reshape(n_rows, width).max(axis=0)
        keys[: len(rest)] = np.maximum(keys[: len(rest)], rest)
    if np.isnan(keys.max()):
        return math.nan
    return float(np.partition(keys, len(keys) - n)[len(keys) - n])

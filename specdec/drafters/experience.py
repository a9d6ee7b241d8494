"""What a pair of models has shown so far: costs, acceptance, and how much trials may still cost.

Sessions share it. It is kept beside the measured costs, so that the next run starts from it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from specdec.drafters.costs import LARGEST_SURCHARGE
from specdec.drafters.kept import read_numbers, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafters.costs import LiveCosts

log = logging.getLogger(__name__)

PRIOR = 0.5
"""Chance of acceptance before anything is known."""
WEIGHT = 4.0
"""How many observations the chance of the position before, or `PRIOR`, counts for."""
MEMORY = 0.99
"""What a round's observations count for one round later."""
CARRIED = 12.0
"""Observations of earlier requests that count at most: a new text may be another kind of text."""
FIRST_ALLOWANCE = 1.0
"""What trials may cost before anything is known, in rounds without a draft."""
SHARE = 0.0075
"""What they may cost for each token since."""
LARGEST_ALLOWANCE = 2.0
"""More is not saved up, unless a single trial costs more."""


class Acceptance:
    """How often each position is accepted if those before it are, in the recent past."""

    def __init__(self, n_max: int) -> None:
        self.tried = [0.0] * n_max
        self.accepted = [0.0] * n_max

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one draft. Positions behind the first rejected one tell nothing."""
        for position in range(len(self.tried)):
            self.tried[position] *= MEMORY
            self.accepted[position] *= MEMORY
            self.tried[position] += position < min(drafted, accepted + 1)
            self.accepted[position] += position < accepted

    def fade(self) -> None:
        """Lets all that was seen count for little, against what comes."""
        for position, tried in enumerate(self.tried):
            share = min(1.0, CARRIED / tried) if tried else 1.0
            self.tried[position] *= share
            self.accepted[position] *= share

    def chances(self) -> list[float]:
        """p_1, p_2, ...; a position that is seldom reached is taken to be like the one before."""
        chances, before = [], PRIOR
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            before = (accepted + WEIGHT * before) / (tried + WEIGHT)
            chances.append(before)
        return chances


class Experience:
    """The state of `--spec-draft-n-max auto` for a pair of models."""

    def __init__(self, costs: LiveCosts, n_max: int, path: Path | None = None) -> None:
        """What ``path`` holds of an earlier run, if it makes sense; else nothing is known yet."""
        self.costs = costs
        self.acceptance = Acceptance(n_max)
        self.allowance = FIRST_ALLOWANCE
        self._path = path
        self._limit = LARGEST_ALLOWANCE
        if path is not None:
            self._restore(read_numbers(path))

    def affords(self, price: float) -> bool:
        """Whether the allowance covers a trial, and if not, lets it grow that far."""
        self._limit = max(LARGEST_ALLOWANCE, price)
        return price <= self.allowance

    def earn(self, n_tokens: int) -> None:
        """Adds to the allowance for tokens of the reply."""
        self.allowance = min(self.allowance + SHARE * n_tokens, self._limit)

    def pay(self, loss: float) -> None:
        """Takes from the allowance what a trial lost; a gain is a loss below zero."""
        self.allowance = min(self.allowance - loss, self._limit)

    def save(self) -> None:
        """Writes it down for the next run; where that fails the next run starts anew."""
        if self._path is None:
            return
        state = {
            "tried": self.acceptance.tried,
            "accepted": self.acceptance.accepted,
            "allowance": min(max(self.allowance, 0.0), LARGEST_ALLOWANCE),
            "surcharge": self.costs.surcharge,
        }
        try:
            write_json(self._path, state)
        except OSError as error:
            log.debug("acceptance: cannot write %s: %s", self._path, error.strerror or error)

    def _restore(self, rows: Mapping[str, tuple[float, ...]] | None) -> None:
        if rows is None:
            return
        n_max = len(self.acceptance.tried)
        expected = {"tried": n_max, "accepted": n_max, "allowance": 1, "surcharge": 1}
        if {name: len(row) for name, row in rows.items()} != expected:
            return
        tried, accepted = rows["tried"], rows["accepted"]
        (allowance,), (surcharge,) = rows["allowance"], rows["surcharge"]
        most = 1 / (1 - MEMORY) + 1
        is_sane = all(a <= t <= most for a, t in zip(accepted, tried, strict=True))
        is_sane &= 1 / LARGEST_SURCHARGE <= surcharge <= LARGEST_SURCHARGE
        if is_sane and allowance <= LARGEST_ALLOWANCE:
            self.acceptance.tried, self.acceptance.accepted = list(tried), list(accepted)
            self.allowance, self.costs.surcharge = allowance, surcharge

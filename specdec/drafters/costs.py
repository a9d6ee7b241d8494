"""What drafting and verifying cost on this machine, measured once for each pair of models."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specdec.drafters.kept import read_numbers, write_json
from specdec.folders import cache_folder
from specdec.native.build import processor
from specdec.options import SamplingOptions
from specdec.sampling.chain import best_tokens
from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.drafters.base import Drafter
    from specdec.gguf_file import GGUFFile
    from specdec.models.base import Target

log = logging.getLogger(__name__)

PACE_RATE, SURCHARGE_RATE = 0.3, 0.1
"""How fast `LiveCosts` follow: shares, on a logarithmic scale, of what was not expected."""
FRESH = 8
"""Rounds with drafts that are compared with the rounds without one before them."""
LARGEST_SURCHARGE = 4.0
"""Of drafts, against what was measured; also the largest discount."""
LONGEST = 1e4
"""Seconds; a file that speaks of more is damaged."""
BUDGET = 1.0
"""Seconds after which no further repetition begins."""
DEPTH = 128
"""Tokens in the caches while it is measured."""
REPETITIONS, SERIES = 8, 4
"""How often each length is measured, and how many rounds in a row: caches get used to them."""
GREEDY = SamplingOptions(temp=0.0)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths that are measured; what lies between is interpolated."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a round by its draft length k = 0 ... n_max."""

    draft: tuple[float, ...]
    """Drafting k tokens."""
    verify: tuple[float, ...]
    """The target's pass over k + 1 rows."""
    observe: float
    """Showing a token to the drafter."""
    catch_up: float
    """The same for each of many tokens that are shown at once."""

    def round(self, length: int) -> float:
        """A whole round with a draft of ``length`` tokens; without one the drafter rests."""
        return self.draft[length] + self.verify[length] + (self.observe if length else 0.0)


class LiveCosts:
    """Costs that follow what rounds take now: measured ones, times a surcharge for drafts.

    Whatever slows the machine down slows all rounds, so a round with a draft is compared with
    rounds without one that were timed just before. Lengths depend on the ratio alone.
    """

    def __init__(self, costs: Costs) -> None:
        self.measured = costs
        self.surcharge = 1.0
        self._pace: float | None = None
        self._n_since = 0

    def round(self, length: int) -> float:
        """Seconds of a round with a draft of ``length`` tokens."""
        return self.measured.round(length) * (self.surcharge if length else 1.0)

    def catch_up(self, n_tokens: int) -> float:
        """What showing ``n_tokens`` at once costs, in rounds without a draft."""
        return n_tokens * self.measured.catch_up / self.measured.round(0)

    def in_plain_rounds(self, seconds: float) -> float:
        """How many rounds without a draft would have taken that long just now."""
        return seconds / (self.measured.round(0) * (self._pace or 1.0))

    def note(self, length: int, seconds: float) -> None:
        """Takes a round's time into account; a single slow one counts for little."""
        pace = seconds / self.round(length)
        if not length:
            known = self._pace if self._pace is not None and self._n_since < FRESH else pace
            self._pace = known * _within(pace / known, 2.0) ** PACE_RATE
            self._n_since = 0
        elif self._pace is not None and self._n_since < FRESH:
            self._n_since += 1
            surprise = _within(pace / self._pace, 2.0) ** SURCHARGE_RATE
            self.surcharge = _within(self.surcharge * surprise, LARGEST_SURCHARGE)


def _within(factor: float, largest: float) -> float:
    return min(max(factor, 1 / largest), largest)


def costs_path(
    target: Target,
    drafter: Drafter,
    files: Sequence[GGUFFile | None],
    settings: tuple[object, ...],
) -> Path:
    """Where the costs of a pair are kept: a name for everything that they depend on.

    ``settings`` is everything that was chosen and changes what a round costs.
    """
    found = [_identity(file) for file in files if file is not None]
    run = (drafter.name, drafter.n_max, str(target.device), torch.get_num_threads(), *settings)
    backends = type(target.layers[0]).__name__, torch.__version__, __version__, processor()
    name = hashlib.sha256(repr((found, run, backends)).encode()).hexdigest()[:20]
    return cache_folder() / f"costs-{name}.json"


def load_or_measure(
    path: Path,
    target: Target,
    drafter: Drafter,
    n_ctx: int,
    cache_types: tuple[torch.dtype, torch.dtype],
) -> Costs:
    """The costs of a pair, from ``path`` if this machine has measured it before."""
    costs = _read(path, drafter.n_max)
    if costs is None:
        costs = measure(target, drafter, n_ctx, cache_types)
        try:
            write_json(path, asdict(costs))
        except OSError as error:
            log.debug("draft costs: cannot write %s: %s", path, error.strerror or error)
    log.debug(
        "%s: a round without a draft takes %.2f ms, with drafts of 1 to %d tokens %s ms",
        drafter.name,
        costs.round(0) * 1000,
        drafter.n_max,
        ", ".join(f"{costs.round(k) * 1000:.2f}" for k in range(1, drafter.n_max + 1)),
    )
    return costs


@torch.inference_mode()
def measure(
    target: Target, drafter: Drafter, n_ctx: int, cache_types: tuple[torch.dtype, torch.dtype]
) -> Costs:
    """Times rounds with drafts of several lengths; the best of a few repetitions each.

    ``cache_types``: of the target's keys and values.
    """
    rounds = _Rounds(copy.copy(drafter), target, n_ctx, cache_types)
    n_max = drafter.n_max
    lengths = sorted({0, *(k for k in LENGTHS if k < n_max), n_max})
    best = dict.fromkeys(lengths, (math.inf,) * 3)
    started = time.perf_counter()
    for length in lengths * REPETITIONS:
        for _ in range(SERIES):
            if best[length][0] < math.inf and time.perf_counter() - started > BUDGET:
                break
            draft, verify, observe = map(min, best[length], rounds.run(length))
            best[length] = draft, verify, observe
    drafts, passes, observes = ({k: best[k][i] for k in lengths} for i in range(3))
    return Costs(
        _interpolate({**drafts, 0: 0.0}, n_max),
        _interpolate(passes, n_max),
        min(observes.values()),
        rounds.catch_up(),
    )


class _Rounds:
    """Rounds at one place of a text, timed."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        n_ctx: int,
        cache_types: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self._drafter, self._target = drafter, target
        self._depth = depth = max(1, min(DEPTH, n_ctx - drafter.n_max - 2))
        self._tokens = torch.arange(depth + drafter.n_max + 1, device=target.device)
        self._tokens %= target.config.n_vocab
        self._cache = target.new_cache(n_ctx, dtype_k=cache_types[0], dtype_v=cache_types[1])
        text = self._tokens[:depth]
        self._hidden = target(text, self._cache, taps=drafter.taps, logit_rows=0).hidden
        self._cache.checkpoint()
        self.catch_up()
        self.run(1 if drafter.n_max else 0)  # first-time work is no cost of a round

    def run(self, length: int) -> tuple[float, float, float]:
        """Seconds of drafting, of the target's pass and of showing a token to the drafter."""
        clock = [time.perf_counter()]
        if length:
            self._drafter.draft(1, length)
        clock.append(time.perf_counter())
        block = self._tokens[: length + 1]
        output = self._target(block, self._cache, taps=self._drafter.taps)
        best_tokens(output.logits, output.best)
        self._cache.truncate(self._depth)
        clock.append(time.perf_counter())
        if length:
            self._drafter.accept(0)
            self._show(1)
        clock.append(time.perf_counter())
        if length:
            self._drafter.begin(GREEDY, self._depth)
        draft, verify, observe = (b - a for a, b in itertools.pairwise(clock))
        return draft, verify, observe if length else math.inf

    def catch_up(self) -> float:
        """Seconds per token of showing the drafter all tokens at once."""
        self._drafter.begin(GREEDY)
        started = time.perf_counter()
        self._show(self._depth)
        return (time.perf_counter() - started) / self._depth

    def _show(self, n_tokens: int) -> None:
        hidden = None if self._hidden is None else self._hidden[:n_tokens]
        self._drafter.observe(self._tokens[:n_tokens], hidden)


def _interpolate(measured: Mapping[int, float], n_max: int) -> tuple[float, ...]:
    """Values at 0 ... n_max; never less for a longer draft, whatever the clock said."""
    values: list[float] = []
    for length in range(n_max + 1):
        below = max(k for k in measured if k <= length)
        above = min(k for k in measured if k >= length)
        share = (length - below) / (above - below) if above > below else 0.0
        value = measured[below] + share * (measured[above] - measured[below])
        values.append(max(value, values[-1]) if values else value)
    return tuple(values)


def _identity(file: GGUFFile) -> tuple[str, int, int]:
    path = file.path.resolve()
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _read(path: Path, n_max: int) -> Costs | None:
    """What was measured before; None if it is not there or makes no sense."""
    rows = read_numbers(path)
    expected = {"draft": n_max + 1, "verify": n_max + 1, "observe": 1, "catch_up": 1}
    if rows is None or {name: len(row) for name, row in rows.items()} != expected:
        return None
    if not 0 < min(rows["verify"]) or max(max(row) for row in rows.values()) > LONGEST:
        return None
    return Costs(rows["draft"], rows["verify"], rows["observe"][0], rows["catch_up"][0])

"""What a token costs outside of the kernels: Python, torch and numpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from work import N_GENERATE

from specdec.engine import Engine
from specdec.generate import Round
from specdec.native.library import load_library

PROMPT = "Once upon a time there was a fisherman who lived by the sea. Every morning he"


def outside_kernels(engine: Engine, temp: float) -> float:
    """The share of a plain token's time in percent; with ``temp`` 0 greedily, else as by default.

    Medians over the tokens of a reply, text included. Kernels are the calls of compiled functions.
    """
    library, clock = load_library(), Clock()
    before: Any = library._lib
    library._lib = TimedFunctions(before, clock)  # type: ignore[assignment]
    marks: list[tuple[float, float]] = []

    def note(_: Round) -> None:
        marks.append((time.perf_counter(), clock.seconds))

    try:
        options = {"sampling__temp": temp, "sampling__seed": 1, "generate__n_predict": N_GENERATE}
        for _ in engine.session(speculate=False).stream(PROMPT, on_round=note, **options):
            pass
    finally:
        library._lib = before
    tokens = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]
    whole = statistics.median(total for total, _ in tokens)
    return 100 * statistics.median(total - inside for total, inside in tokens) / whole


class Clock:
    """Seconds in compiled functions."""

    def __init__(self) -> None:
        self.seconds = 0.0


class TimedFunctions:
    """The functions of a compiled library, timed."""

    def __init__(self, library: Any, clock: Clock) -> None:
        self._library, self._clock = library, clock

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, clock = getattr(self._library, name), self._clock

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            clock.seconds += time.perf_counter() - started
            return result

        setattr(self, name, timed)
        return timed

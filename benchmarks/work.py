"""The work that both programs do, and the form of their answer. Standard library only."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SHORT = "SPECDEC_BENCH_SHORT" in os.environ
"""Less of everything, for large models."""
PROMPT = [3 + 37 * i % 250 for i in range(512)]
"""Token ids of the prompt: in every vocabulary, and never the same twice in a row."""
N_CONTEXT = 256
"""Tokens of the prompt that are kept for what follows."""
N_GENERATE = 16 if SHORT else 64
DEPTH = N_CONTEXT + N_GENERATE
"""Tokens in the cache when passes are timed."""
PASSES = (1, 2, 4, 8)
"""Tokens of a pass with logits on every row: what verification costs."""
N_TIMED = 5 if SHORT else 25


def timed(run: Callable[[], None]) -> float:
    """The median of several runs in seconds, after one that does not count."""
    return timed_in_turn(lambda _: run(), (1,))[1]


def timed_in_turn(run: Callable[[int], None], numbers: Sequence[int]) -> dict[int, float]:
    """The same for a run with each number, in turn: a slow moment then counts for all of them."""
    seconds: dict[int, list[float]] = {n: [] for n in numbers}
    for _ in range(N_TIMED + 1):
        for n in numbers:
            started = time.perf_counter()
            run(n)
            seconds[n].append(time.perf_counter() - started)
    return {n: statistics.median(values[1:]) for n, values in seconds.items()}


def memory() -> dict[str, float]:
    """Resident memory of this process in MB, now and at its largest, on Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kilobytes = {
        name: int(rest.split()[0])
        for name, _, rest in (x.partition(":") for x in lines)
        if name in ("VmRSS", "VmHWM")
    }
    rows = {"memory, MB": "VmRSS", "largest memory, MB": "VmHWM"}
    return {row: kilobytes[name] * 1024 / 1e6 for row, name in rows.items() if name in kilobytes}


def report(
    load: float,
    prompt: float,
    generate: float,
    passes: Mapping[int, float],
    others: Mapping[str, float] | None = None,
) -> None:
    """Prints what was measured, times in seconds, as one line of JSON."""
    values = {
        "load time, s": load,
        "prompt, tokens/s": len(PROMPT) / prompt,
        "generation, tokens/s": N_GENERATE / generate,
    }
    values |= {f"pass of {n}, ms": 1000 * seconds for n, seconds in passes.items()}
    print(json.dumps(values | dict(others or {})), flush=True)

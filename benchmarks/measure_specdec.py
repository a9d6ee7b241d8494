"""One measurement of specdec, in a process of its own: MODEL THREADS -> a line of JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from work import DEPTH, N_GENERATE, PASSES, PROMPT, report, timed

from specdec.engine import Engine
from specdec.options import Options


@torch.inference_mode()
def main(path: str, n_threads: int) -> None:
    """Loads, reads the prompt, generates greedily, then repeats passes at a fixed depth."""
    started = time.perf_counter()
    options = {"model.path": Path(path), "model.n_threads": n_threads, "model.n_ctx": 2 * DEPTH}
    engine = Engine.load(Options().merge(options | {"model.warmup": False}))
    load = time.perf_counter() - started
    target, cache = engine.target, engine.new_cache()

    def step(tokens: list[int], logit_rows: int | None) -> int:
        output = target(torch.tensor(tokens), cache, logit_rows=logit_rows)
        return int(output.logits[-1].argmax())

    step(PROMPT[:8], 1)  # first-time work
    cache.truncate(0)
    started = time.perf_counter()
    token = step(PROMPT, 1)
    prompt = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(N_GENERATE):
        token = step([token], 1)
    generate = time.perf_counter() - started

    def one_pass(n_tokens: int) -> None:
        step(PROMPT[:n_tokens], None)
        cache.truncate(DEPTH)

    report(load, prompt, generate, {n: timed(lambda n=n: one_pass(n)) for n in PASSES})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

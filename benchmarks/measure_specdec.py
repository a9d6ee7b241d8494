"""One measurement of specdec, in a process of its own: MODEL THREADS -> a line of JSON."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from overhead import outside_kernels
from work import (
    DEPTH,
    N_CONTEXT,
    N_GENERATE,
    PASSES,
    PROMPT,
    memory,
    report,
    timed,
    timed_in_turn,
)

from specdec.engine import Engine
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models.base import Target
from specdec.options import Options, SamplingOptions
from specdec.session import NATIVE_ROWS


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
    n_rows = NATIVE_ROWS if target.is_row_invariant else len(PROMPT)
    for first in range(0, len(PROMPT), n_rows):
        token = step(PROMPT[first : first + n_rows], 1)
    prompt = time.perf_counter() - started
    cache.truncate(N_CONTEXT)
    started = time.perf_counter()
    for _ in range(N_GENERATE):
        token = step([token], 1)
    generate = time.perf_counter() - started

    def one_pass(n_tokens: int) -> None:
        step(PROMPT[:n_tokens], None)
        cache.truncate(DEPTH)

    passes = timed_in_turn(one_pass, PASSES)
    relative = {f"pass of {n} / pass of 1": passes[n] / passes[1] for n in PASSES[1:]}
    resident = memory()
    n_bytes = read_bytes(Path(path)) + cache_bytes(target, cache)
    shares = {"memory limit, %": 100 * n_bytes / bandwidth() / passes[1]}
    if target.is_row_invariant:
        for name, temp in (("greedy", 0.0), ("samplers", SamplingOptions().temp)):
            shares[f"not kernels, {name}, %"] = outside_kernels(engine, temp)
    report(load, prompt, generate, passes, resident | relative | shares)


def read_bytes(path: Path) -> int:
    """Bytes of weights that every token reads: all, without an embedding table of its own."""
    with GGUFFile.open(path) as file:
        names = set(file.tensors)
        if "output.weight" in names:
            names.discard("token_embd.weight")
        return sum(file.raw(name).nbytes for name in names)


def cache_bytes(target: Target, cache: KVCache) -> int:
    """Bytes of keys and values that every token reads."""
    layers = [cache.committed(i, torch.float32) for i in range(target.config.n_layer)]
    return sum(part.numel() * part.element_size() for pair in layers for part in pair)


def bandwidth() -> float:
    """Bytes that all threads together read from memory in a second."""
    data = torch.ones(1 << 27)
    return data.numel() * data.element_size() / timed(lambda: data.sum())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

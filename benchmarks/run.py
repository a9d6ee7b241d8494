"""`make bench`: specdec beside llama.cpp on one model, and what a round costs with each draft.

The two programs take turns, every measurement in a fresh process, and medians are compared. What
cannot be measured is said, never a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from formats import random_model, requantised
from random_drafts import write_missing, write_mtp_target

from specdec.errors import SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.options import Options

HERE = Path(__file__).parent
PEER_VARIABLE = "LLAMA_CPP_PYTHON"
PEER = HERE.parent / "downloads" / "llama.cpp-venv" / "bin" / "python"
SYNTHETIC_LENGTH = 1.5
"""Tokens that a round with a random draft emits, about what the trained ones reach."""
Values = Mapping[str, float]


def main() -> None:
    """Prints everything."""
    options = _arguments()
    load = os.getloadavg()[0]
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(f"{options.model.name}, {options.threads} threads, medians of {options.rounds} rounds")
    if load > 0.5:
        print(f"The machine is busy (load average {load:.1f}): do not publish these numbers.")
    compare(options.model, options.threads, options.rounds)
    if options.formats:
        compare_formats(options.model, options.threads, options.rounds)
    drafts = [path for path in options.drafts if path.exists()]
    for path in set(options.drafts) - set(drafts):
        print(f"not measured: {path} is not there")
    rounds_with_drafts(options.model, drafts, options.threads)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafts", type=Path, nargs="*")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", action="store_true", help="other block formats, too")
    return parser.parse_args()


def compare(model: Path, n_threads: int, n_rounds: int) -> None:
    """The table of both programs; of one if the other is not there."""
    work = [str(model), str(n_threads)]
    programs = {"specdec": [sys.executable, str(HERE / "measure_specdec.py"), *work]}
    peer = os.environ.get(PEER_VARIABLE, str(PEER))
    if Path(peer).exists():
        programs["llama.cpp"] = [peer, str(HERE / "measure_llama_cpp.py"), *work]
    else:
        print(f"not measured: llama.cpp, {peer} is not there; build it with: make bench-peer")
    found: dict[str, list[Values]] = {name: [] for name in programs}
    for _ in range(n_rounds):
        for name, command in programs.items():
            values = _measure(name, command)
            if values is not None:
                found[name].append(values)
    _print_table({name: _medians(runs) for name, runs in found.items() if runs})


def compare_formats(model: Path, n_threads: int, n_rounds: int) -> None:
    """Tables for the model in other formats, and for a large one of random weights."""
    for name in ("Q4_0", "Q8_0"):
        print(f"\nthe same in {name}")
        compare(requantised(model, name), n_threads, n_rounds)
    print("\n1.7 billion random weights in Q4_K")
    os.environ["SPECDEC_BENCH_SHORT"] = "1"
    compare(random_model(model), n_threads, min(n_rounds, 2))
    del os.environ["SPECDEC_BENCH_SHORT"]


def _measure(name: str, command: list[str]) -> Values | None:
    """What one process reports; None if it fails. Its messages go to stderr.

    A peer whose instructions are refused is measured without them from then on.
    """
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode == -signal.SIGILL and command[-1] != "plain":
        print(f"{name}: this machine refuses its instructions; measured without repacked weights")
        command.append("plain")
        return _measure(name, command)
    if result.returncode or not result.stdout.strip():
        print(f"not measured: {name} ended with {result.returncode}", flush=True)
        return None
    values: Values = json.loads(result.stdout.splitlines()[-1])
    return values


def _medians(runs: Sequence[Values]) -> Values:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _print_table(found: Mapping[str, Values]) -> None:
    """Rows of numbers; with both programs also the ratio, above 1 where specdec is better."""
    if not found:
        return
    both = len(found) == 2
    print(f"\n{'':<25}" + "".join(f"{name:>12}" for name in found) + ("   ratio" if both else ""))
    for key in next(iter(found.values())):
        numbers = [values[key] for values in found.values() if key in values]
        line = f"{key:<25}" + "".join(f"{number:>12.2f}" for number in numbers)
        if len(numbers) == 2:
            ours, theirs = numbers
            is_speed = key.endswith("/s")
            line += f"{ours / theirs if is_speed else theirs / ours:>8.2f}"
        print(line)


def rounds_with_drafts(model: Path, drafts: Sequence[Path], n_threads: int) -> None:
    """Milliseconds of a round by its parts, for each draft at one token and at seven.

    Heads of which there is no draft, and MTP layers, are measured with random weights. Their drafts
    are accepted at random, so that they have as much to read as a trained draft.
    """
    run = {
        "model.path": model,
        "model.n_threads": n_threads,
        "sampling.temp": 0.0,
        "sampling.ignore_eos": True,
        "bench.n_max": (1, 7),
        "bench.n_predict": 32,
        "bench.n_repetitions": 1,
    }
    print(f"\n{'ms per round':<22}   n  observe    draft   target   verify   length   tokens/s")
    if drafts:
        _print_rounds(run | {"bench.drafts": tuple(drafts)})
    synthetic = run | {"spec.synth_len": SYNTHETIC_LENGTH}
    with tempfile.TemporaryDirectory() as folder:
        try:
            with GGUFFile.open(model) as target:
                missing = write_missing(Path(folder), target, list(drafts))
                mtp = Path(folder) / "mtp-target.gguf"
                write_mtp_target(mtp, target)
        except SpecdecError as error:
            print(f"not measured: random drafts: {error}")
            return
        print(f"random weights, {SYNTHETIC_LENGTH:g} tokens a round accepted at random:")
        _print_rounds(synthetic | {"bench.drafts": tuple(missing)})
        _print_rounds(synthetic | {"model.path": mtp, "bench.types": (("draft-mtp",),)})


def _print_rounds(layer: Mapping[str, Any]) -> None:
    """A row for each configuration; that of no speculation only where nothing is made up."""
    from specdec.bench import DEFAULT_PROMPTS, run_bench

    try:
        report = run_bench(Options().merge(layer), DEFAULT_PROMPTS[:3])
    except SpecdecError as error:
        print(f"not measured: rounds with drafts: {error}")
        return
    for result in report.results["spec.synth_len" in layer :]:
        one = result.configuration
        times = (result.observe_ms, result.draft_ms, result.target_ms, result.verify_ms)
        print(
            f"{one.name:<22}{one.n_max or 0:>4}"
            + "".join(f"{value:>9.2f}" for value in times)
            + f"{result.acceptance_length:>9.2f}{result.tokens_per_second:>11.1f}"
        )


if __name__ == "__main__":
    main()

"""`make bench` measures what it can and says what it cannot."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from specdec.generate import Finish
from specdec.options import SPEC_TYPES
from specdec.session import Completion

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPT = FOLDER / "run.py"
MODES = ("greedy", "seeded")


def test_without_the_peer_and_without_drafts(tmp_path: Path) -> None:
    model = tiny.write_target(tmp_path / "t.gguf", n_layer=5)
    draft = tmp_path / "none.gguf"
    words = [str(model), str(draft), "--rounds", "1", "--threads", "1"]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env=os.environ | {"LLAMA_CPP_PYTHON": str(tmp_path / "no" / "python")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "not measured: llama.cpp" in out
    assert "make bench-peer" in out
    assert f"not measured: {draft} is not there" in out
    tables = out.partition("ms per round")
    rows = {line[:25].strip(): line[25:].split() for line in tables[0].splitlines()}
    rows |= {line[:22].strip(): line[22:].split() for line in tables[2].splitlines()}
    for key in (
        "load time, s",
        "prompt, tokens/s",
        "generation, tokens/s",
        "pass of 8, ms",
        "memory limit, %",
        "not kernels, greedy, %",
        "not kernels, samplers, %",
    ):
        (number,) = rows[key]
        assert float(number) > 0
    for name in ("draft-dflash", "draft-dspark", "draft-dflash2", "draft-lilicorr", "draft-eagle3"):
        assert rows[name][0] == "7"
    numbers = [float(word) for word in rows["draft-mtp"]]
    assert len(numbers) == 7
    assert all(number > 0 for number in numbers)


def exactness(model: Path, *words: str) -> tuple[int, list[str]]:
    """The exit code and the lines of a run of the comparison."""
    command = [sys.executable, str(FOLDER / "exactness.py"), str(model), "--threads", "1", *words]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return result.returncode, result.stdout.splitlines()


def test_every_drafter_is_compared_with_plain_decoding(tmp_path: Path) -> None:
    model = tiny.write_target(tmp_path / "t.gguf", n_layer=5)
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "a.txt").write_text("one\n")
    (prompts / "b.jsonl").write_text('{"prompt": "two two two two"}\n')
    code, lines = exactness(model, "--prompts", str(prompts), "--n-predict", "6")
    assert code == 0
    rows = [line for line in lines if line.count("2/2") == len(MODES)]
    ways = {name for line in rows for name in line.split()[1].split(",")}
    assert ways.issuperset(set(SPEC_TYPES) - {"none"})
    assert lines[-1] == f"{4 * len(rows)} of {4 * len(rows)} replies are equal"


def test_a_token_or_an_end_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    compare = importlib.import_module("exactness").compare
    plain = Completion(token_ids=[1, 2, 3], finish=Finish.LENGTH)
    others = (
        Completion(token_ids=[1, 2, 3], finish=Finish.LENGTH),
        Completion(token_ids=[1, 2, 4], finish=Finish.LENGTH),
        Completion(token_ids=[1, 2], finish=Finish.LENGTH),
        Completion(token_ids=[1, 2, 3], finish=Finish.STOP),
    )
    replies = compare({m: [plain] * 4 for m in MODES}, {m: list(others) for m in MODES})
    for mode in MODES:
        assert [reply.is_equal for reply in replies[mode]] == [True, False, False, False]
        assert [reply.cell == "DIFFER" for reply in replies[mode]] == [False, True, True, True]

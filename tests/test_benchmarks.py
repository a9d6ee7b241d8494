"""`make bench` measures what it can and says what it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tiny

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "run.py"


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

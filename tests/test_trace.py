"""The trace file holds whole lines only, whatever happens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specdec.drafters.base import Draft
from specdec.errors import UsageError
from specdec.generate import Round, RoundTimes
from specdec.trace import TraceFile, trace_record

ROUND = Round(
    7, Draft([1, 2, 3], end="p_min", drafter="x"), 3, [1, 2], None, RoundTimes(1, 2, 3, 4)
)


def test_a_record() -> None:
    assert trace_record(ROUND) == {
        "position": 7,
        "drafter": "x",
        "drafted": [1, 2, 3],
        "accepted": 1,
        "emitted": [1, 2],
        "draft_end": "p_min",
        "ms": {"draft": 1000, "target": 2000, "verify": 3000},
    }


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace")
    for count in (1, 2, 3):
        file.write(ROUND)
        lines = (tmp_path / "trace").read_text("utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [trace_record(ROUND)] * count
    file.close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace"
    file = TraceFile(path)
    file.write(ROUND)
    whole = path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
    with pytest.raises(UsageError, match="the disk is full"):
        file.write(ROUND)
    file.close()
    assert path.read_bytes() == whole

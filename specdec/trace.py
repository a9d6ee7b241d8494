"""A record of every round, one JSON line each, in a file that never holds half a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import UsageError

if TYPE_CHECKING:
    from specdec.generate import Round


def trace_record(done: Round) -> Mapping[str, Any]:
    """One round in plain values.

    ``position`` is where the first emitted token stands in the text, prompt included; ``accepted``
    counts draft tokens that stand; ``draft_end`` says why the draft was not longer; ``ms`` is where
    the time went.
    """
    return {
        "position": done.position,
        "drafter": done.draft.drafter or None,
        "drafted": done.draft.tokens,
        "accepted": min(done.accepted, len(done.tokens) - 1),
        "emitted": done.tokens,
        "draft_end": done.draft.end,
        "ms": {
            "draft": done.times.draft * 1000,
            "target": done.times.target * 1000,
            "verify": done.times.verify * 1000,
        },
    }


class TraceFile:
    """The file of `--spec-trace`; removed again if no round was written."""

    def __init__(self, path: Path) -> None:
        """Opens and empties the file. Raises `UsageError` if it cannot be written."""
        self.path = path
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise self._failure(error) from None
        self._length = 0

    def write(self, done: Round) -> None:
        """Appends one round. Raises `UsageError` on a full disk, after the last whole line."""
        line = json.dumps(trace_record(done)).encode() + b"\n"
        try:
            written = os.write(self._handle, line)
        except OSError as error:
            raise self._failure(error) from None
        if written < len(line):
            os.ftruncate(self._handle, self._length)
            raise UsageError(f"--spec-trace: cannot write {self.path}: the disk is full")
        self._length += written

    def close(self) -> None:
        """Ends the file."""
        os.close(self._handle)
        if not self._length and self.path.is_file():
            self.path.unlink()

    def _failure(self, error: OSError) -> UsageError:
        return UsageError(f"--spec-trace: cannot write {self.path}: {error.strerror}")

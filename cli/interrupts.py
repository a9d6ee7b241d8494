"""Ctrl-C that ends a run between two steps and not in the middle of one.

An exception out of a signal handler can get lost, in an import or a destructor, or leave a cache
and a drafter at odds. So while a model is loaded or a reply made, the first Ctrl-C is only noted,
and `check`, which is called after each tensor, prompt chunk and round, raises it. A second one is
raised at once.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupts:
    """The interrupts of one run."""

    def __init__(self) -> None:
        self._pending = False
        self._deferring = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Takes care of Ctrl-C inside; only a main thread can, in others nothing changes."""
        try:
            previous = signal.signal(signal.SIGINT, self._handle)
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Notes the first Ctrl-C inside; it is raised by `check` or at the end."""
        self._deferring, self._pending = True, False
        try:
            yield
            self.check()
        finally:
            self._deferring = False

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if one was noted."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._deferring or self._pending:
            self._pending = False
            raise KeyboardInterrupt
        self._pending = True

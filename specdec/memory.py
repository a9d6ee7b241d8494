"""Memory that was freed and that the system should have again."""

from __future__ import annotations

import contextlib
import ctypes


def trim_memory() -> None:
    """Gives what was freed back to the system, with glibc, which would keep most of it.

    It takes about a millisecond: for after a model is loaded or a large buffer replaced.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

"""The exceptions that end a run in one clear line.

Messages have the form *what, where: found, expected; what to do*. The command line prints them
as ``error: MESSAGE`` and leaves with ``exit_code``; any other exception is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecdecError(Exception):
    """A failure with a message that is meant for the user."""

    exit_code = 1


class UsageError(SpecdecError):
    """An option value or a combination of options that cannot work; the message names the flag."""

    exit_code = 2


class ModelFileError(SpecdecError):
    """A file that is missing, no GGUF, truncated, or lacks something it needs."""


class UnsupportedError(ModelFileError):
    """A well-formed file with an architecture, head or block type that is not supported."""


class MismatchError(ModelFileError):
    """A draft that does not fit its target; the message gives both values."""


class ContextFullError(SpecdecError):
    """The prompt does not fit the context."""


class CacheError(SpecdecError):
    """A cache that cannot go back to the length asked for."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not in a table: the nearest known name and the whole list."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"unknown {kind}: {name}{hint}; known: {', '.join(known)}"

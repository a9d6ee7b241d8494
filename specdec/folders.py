"""Where this program keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import UnsupportedError


def cache_folder() -> Path:
    """What can be made or downloaded again: ``$XDG_CACHE_HOME/specdec`` or ``~/.cache/specdec``.

    Raises `UnsupportedError` for a user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "specdec"
    except RuntimeError:
        raise UnsupportedError("there is no home directory: set XDG_CACHE_HOME or HOME") from None

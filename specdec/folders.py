"""Where this program keeps files of its own, and how it writes files."""

from __future__ import annotations

import os
import tempfile
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


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file that nobody ever sees half written; a text as UTF-8. Raises `OSError`."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        written.write_bytes(data.encode() if isinstance(data, str) else data)
        written.replace(path)

"""Small JSON files in the user's cache, for what a run hands to the next one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specdec.folders import write_whole


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Writes values down at once: other runs see all of the file or nothing. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values))


def read_numbers(path: Path) -> dict[str, tuple[float, ...]] | None:
    """The numbers in a file by name, a single one as a row of one.

    None if the file is not there, or holds anything that is not a finite number of 0 or more.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = {
            name: tuple(map(float, value if isinstance(value, list) else [value]))
            for name, value in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    numbers = (number for row in rows.values() for number in row)
    return rows if all(0 <= number < float("inf") for number in numbers) else None

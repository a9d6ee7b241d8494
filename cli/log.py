"""Messages of library and command: to stderr, and to a file if one is named."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from specdec.errors import UsageError

LEVELS = {
    0: logging.CRITICAL + 1,
    1: logging.ERROR,
    2: logging.WARNING,
    3: logging.INFO,
    4: logging.DEBUG + 5,
    5: logging.DEBUG,
}
"""llama.cpp's verbosity -> level of `logging`; 4 is its trace level."""
NAMES = ("specdec", "specdec_cli")


class _Prefixed(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        plain = record.levelno < logging.WARNING or text.startswith(("warn", "DEPRECATED"))
        return text if plain else f"{record.levelname.lower()}: {text}"


def start() -> None:
    """Sends messages of level info and above to stderr, as it is now."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Prefixed("%(message)s"))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def configure(verbosity: int, file: Path | None) -> None:
    """Applies the user's verbosity and log file. Raises `UsageError` if it cannot be written."""
    level = LEVELS[min(max(verbosity, 0), 5)]
    for name in NAMES:
        logging.getLogger(name).setLevel(level)
    if file is None:
        return
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-file: cannot write {file}: {error.strerror}") from None
    handler.setFormatter(_Prefixed("%(asctime)s %(message)s"))
    for name in NAMES:
        logging.getLogger(name).addHandler(handler)

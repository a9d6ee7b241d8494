"""Messages of library and command: to stderr, and to a file if one is named."""

from __future__ import annotations

import json
import logging
import sys

from specdec.errors import UsageError
from specdec.options import OutputOptions

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
COLORS = {logging.WARNING: "\033[35m", logging.ERROR: "\033[31m"}
RESET = "\033[0m"


class MessageFormatter(logging.Formatter):
    """One line a message, as the user asked for it."""

    def __init__(self, options: OutputOptions, *, colored: bool, timed: bool) -> None:
        super().__init__("%(message)s")
        self.options = options
        self.colored = colored
        self.timed = timed

    def format(self, record: logging.LogRecord) -> str:
        """The line for ``record``."""
        text = super().format(record)
        if self.options.log_jsonl:
            return self._as_json(record, text)
        own_prefix = text.startswith(("warn", "DEPRECATED"))
        if self.options.log_prefix and record.levelno >= logging.WARNING and not own_prefix:
            text = f"{record.levelname.lower()}: {text}"
        if self.timed:
            text = f"{self.formatTime(record)} {text}"
        color = COLORS.get(record.levelno) if self.colored else None
        return f"{color}{text}{RESET}" if color else text

    def _as_json(self, record: logging.LogRecord, text: str) -> str:
        fields = {"level": record.levelname.lower(), "message": text}
        if self.timed:
            fields["time"] = self.formatTime(record)
        return json.dumps(fields, ensure_ascii=False)


def stop() -> None:
    """Closes the log file."""
    for name in NAMES:
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            handler.close()
        logger.handlers = []


def start() -> None:
    """Sends messages of level info and above to stderr, as it is now."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MessageFormatter(OutputOptions(), colored=False, timed=False))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def configure(options: OutputOptions) -> None:
    """Applies what the user says about messages. Raises `UsageError` for a file not writable."""
    level = LEVELS[min(max(options.verbosity, 0), 5)]
    colored = options.log_colors == "on" or (
        options.log_colors == "auto" and sys.stderr.isatty() and not options.simple_io
    )
    stderr = MessageFormatter(options, colored=colored, timed=bool(options.log_timestamps))
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        for handler in logger.handlers:
            handler.setFormatter(stderr)
    if options.log_file is None:
        return
    try:
        file = logging.FileHandler(options.log_file, encoding="utf-8")
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"--log-file: cannot write {options.log_file}: {reason}") from None
    timed = options.log_timestamps is not False
    file.setFormatter(MessageFormatter(options, colored=False, timed=timed))
    for name in NAMES:
        logging.getLogger(name).addHandler(file)


def report_error(message: str) -> None:
    """Prints the line a run ends with, whatever the verbosity; the log file gets it too."""
    line = f"error: {' '.join(message.split())}"
    print(line, file=sys.stderr)
    logger = logging.getLogger(NAMES[-1])
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            text = line.removeprefix("error: ")
            handler.handle(logger.makeRecord(logger.name, logging.ERROR, "", 0, text, (), None))

"""What a person types: messages of one or more lines, from a terminal or a pipe."""

from __future__ import annotations

import contextlib
import sys

from specdec.errors import UsageError

SIGN, MORE = "> ", ". "
"""What stands before a message and before its further lines; on a terminal only."""


class Console:
    """Reads messages. A trailing backslash goes on to the next line; with ``multiline`` every line
    goes on and a trailing backslash ends the message."""

    def __init__(self, *, multiline: bool, simple: bool) -> None:
        self.multiline = multiline
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        # input() edits lines only between two terminals; its sign would go into a redirected reply
        self._edits = self.is_terminal and sys.stdout.isatty() and not simple
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (switches line editing on)

    def message(self) -> str | None:
        """The next message; None at the end of the input."""
        lines: list[str] = []
        while (line := self._line(MORE if lines else SIGN)) is not None:
            is_command = not lines and line.startswith("/")
            continues = line.endswith("\\")
            lines.append(line.removesuffix("\\"))
            if is_command or continues == self.multiline:
                break
        return "\n".join(lines) if lines else None

    def _line(self, sign: str) -> str | None:
        if self._edits:
            try:
                return input(sign)
            except EOFError:
                print()
                return None
        if self.is_terminal:
            print(sign, end="", file=sys.stderr, flush=True)
        if sys.stdin is None:
            return None
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 (byte {error.start})") from None
        return line.removesuffix("\n") if line else None

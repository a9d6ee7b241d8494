"""A conversation: turns of a person and replies of the model, with a few commands."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.chat import Message
from specdec.errors import SpecdecError
from specdec_cli.console import Console

if TYPE_CHECKING:
    from specdec.session import Completion

COMMANDS = "/exit, /regen, /clear, /read FILE, /glob PATTERN"
Answer = Callable[[list[Message]], "Completion"]


class Conversation:
    """The turns so far, and what was read from files for the next one."""

    def __init__(self, answer: Answer, console: Console, system_prompt: str) -> None:
        """``answer`` shows and returns the reply to messages."""
        self._answer = answer
        self._console = console
        self._system = [Message(role="system", content=system_prompt)] if system_prompt else []
        self.messages = list(self._system)
        self.replies: list[str] = []
        self._files: list[str] = []

    def run(self, first: str | None, *, single_turn: bool) -> None:
        """Holds the conversation until its end; ``first`` is the first turn if there is one."""
        if self._console.is_terminal:
            _say(f"commands: {COMMANDS}; Ctrl-C stops a reply, Ctrl-D ends the conversation")
        message = self._console.message() if first is None else first
        while message is not None:
            if self._obeys(message):
                if message.strip() == "/exit":
                    return
            elif message.strip():
                self._turn(message)
                if single_turn:
                    return
            message = self._console.message()

    def _obeys(self, message: str) -> bool:
        """Whether the message was a command, which is carried out."""
        word, _, rest = message.strip().partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/exit": lambda _: None,
            "/regen": lambda _: self._regenerate(),
            "/clear": lambda _: self._clear(),
            "/read": self._read,
            "/glob": self._glob,
        }
        if word not in commands:
            return False
        commands[word](rest.strip())
        return True

    def _turn(self, message: str) -> None:
        self.messages.append(Message(role="user", content="".join([*self._files, message])))
        self._files = []
        self._reply()

    def _reply(self) -> None:
        """Adds the model's answer; one that was stopped counts, one that failed takes its turn."""
        try:
            completion = self._answer(self.messages)
        except SpecdecError as error:
            if not self._console.is_terminal:
                raise
            self.messages.pop()
            _say(f"error: {error}")
            return
        self.messages.append(Message(role="assistant", content=completion.text))
        self.replies.append(completion.text)

    def _regenerate(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            _say("there is no reply to do again")
            return
        self.messages.pop()
        self._reply()

    def _clear(self) -> None:
        self.messages = list(self._system)
        self._files = []
        _say("the conversation is cleared")

    def _read(self, name: str) -> None:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            _say(f"cannot read {name!r}: {reason}")
            return
        self._files.append(f"--- File: {name} ---\n{text}\n")
        _say(f"{name}: {len(text)} characters go before the next message")

    def _glob(self, pattern: str) -> None:
        names = sorted(n for n in glob.glob(pattern, recursive=True) if Path(n).is_file())
        if not names:
            _say(f"no file matches {pattern!r}")
        for name in names:
            self._read(name)


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)

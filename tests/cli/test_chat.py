"""Conversations: from a pipe, and on a terminal as a person has them."""

from __future__ import annotations

import ast
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_commands

SIGN = b"> "


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_commands.write(tmp_path_factory.mktemp("chat"))


def specdec(words: list[str], text: str) -> subprocess.CompletedProcess[str]:
    """The command with ``text`` on a pipe."""
    command = [sys.executable, "-m", "specdec_cli", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, words: list[str], kind: str = "dumb") -> None:
        handle, theirs = pty.openpty()
        command = [sys.executable, "-m", "specdec_cli", *words]
        environ = {**os.environ, "TERM": kind}
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(theirs),
        )
        os.close(theirs)
        self.handle = handle
        self.seen = b""

    def until(self, mark: bytes, timeout: float = 60) -> bytes:
        """What was shown up to ``mark``."""
        end = time.monotonic() + timeout
        while mark not in self.seen:
            left = end - time.monotonic()
            ready, _, _ = select.select([self.handle], [], [], max(left, 0))
            assert ready, self.seen
            try:
                self.seen += os.read(self.handle, 4096)
            except OSError:
                raise AssertionError(self.seen) from None
        shown, _, self.seen = self.seen.partition(mark)
        return shown

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def interrupt(self) -> int:
        """The exit code after Ctrl-C at the prompt.

        Typed again until it works: a program that is about to wait for a line can miss a signal.
        """
        end = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.type("\x03")
                while select.select([self.handle], [], [], 0.5)[0]:
                    os.read(self.handle, 4096)
        return self.wait()

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(timeout=60)
        os.close(self.handle)
        return code


def _take_terminal(handle: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(handle, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Those that a test opens; none is left behind."""
    opened: list[Terminal] = []
    yield opened
    for one in opened:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_a_conversation_through_a_pipe(target: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a note", encoding="utf-8")
    reply = tmp_path / "replies.txt"
    words = tiny_commands.chat(target, "-n", "6", "-cnv", "-sys", "be kind", "-o", str(reply))
    words += ["--logit-bias", "13-inf", "--logit-bias", "16-inf"]  # no line ends in replies
    note = tmp_path / "note.txt"
    commands = f"/regen\n/clear\n/read {note}\n/glob {tmp_path}/*.nothing\n"
    typed = f"one \\\nmore\n{commands}last\n/exit\nno\n"
    found = specdec([*words, "--verbose-prompt", "-p", "first"], typed)
    assert found.returncode == 0
    lines = found.stdout.removesuffix("\n").split("\n")
    assert len(lines) == 4
    assert lines[1] == lines[2]  # greedy, so the same again
    assert reply.read_text("utf-8") == found.stdout
    prompts = _prompts(found.stderr)
    assert prompts[0] == "system:be kind;user:first;assistant:"
    assert prompts[1].startswith(prompts[0])
    assert prompts[1].endswith(";user:one \nmore;assistant:")
    assert prompts[2] == prompts[1]
    file = f"--- File: {note} ---\na note\n"
    assert prompts[3] == f"system:be kind;user:{file}last;assistant:"
    assert f"no file matches '{tmp_path}/*.nothing'" in found.stderr


def _prompts(err: str) -> list[str]:
    """The prompts that `--verbose-prompt` showed; the three bytes of a space are no text alone."""
    parts = err.split("number of tokens in prompt = ")[1:]
    tokens = [re.findall(r"^ *\d+ -> ('.*'|\".*\")$", part, re.M) for part in parts]
    texts = ["".join(ast.literal_eval(token) for token in found) for found in tokens]
    return [text.replace("\ufffd" * 3, " ") for text in texts]


def test_the_cache_of_the_common_prefix_is_kept(target: Path) -> None:
    words = tiny_commands.chat(target, "-n", "4", "-cnv", "-lv", "4", "-sys", "x" * 200)
    found = specdec(words, "one\ntwo\n")
    assert found.returncode == 0
    counts = [int(n) for n in re.findall(r"prompt of (\d+) tokens", found.stderr, re.M)]
    assert counts[0] > 200
    assert counts[1] < 40


def test_multiline_input(target: Path) -> None:
    words = tiny_commands.chat(target, "-n", "2", "-cnv", "-mli", "--verbose-prompt")
    found = specdec(words, "one\ntwo\\\nthree\n")
    assert [re.findall("user:(.*?);", p, re.S)[-1] for p in _prompts(found.stderr)] == [
        "one\ntwo",
        "three",
    ]


def test_one_turn_from_a_pipe(target: Path) -> None:
    words = tiny_commands.chat(target, "-n", "2", "-cnv", "-st", "--verbose-prompt")
    found = specdec(words, "one\ntwo\n")
    assert _prompts(found.stderr) == ["user:one\ntwo;assistant:"]


def test_a_failing_turn_in_a_pipe_is_an_error(target: Path) -> None:
    found = specdec(tiny_commands.chat(target, "-n", "2", "-cnv"), f"hi\n{'x' * 500}\nhi\n")
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("error: prompt: ")
    assert len(found.stdout.splitlines()) == 1


def test_a_conversation_on_a_terminal(target: Path, terminals: list[Terminal]) -> None:
    words = tiny_commands.chat(target, "-n", "-1", "--ignore-eos", "-c", "100000")
    terminals.append(terminal := Terminal(words))
    terminal.until(b"commands: /exit, /regen")
    terminal.until(SIGN)
    terminal.type("hello\n")
    terminal.until(b"hello\r\n")
    terminal.until(b"\xef")  # the reply has begun; its bytes are no text
    terminal.type("\x03")
    shown = terminal.until(SIGN)
    assert b"t/s" in shown
    assert b"Traceback" not in shown
    terminal.type("x" * 3 + "\n")
    terminal.until(b"\xef")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until(SIGN)
    assert terminal.interrupt() == 130


def test_end_of_input_ends_a_conversation(target: Path, terminals: list[Terminal]) -> None:
    words = tiny_commands.chat(target, "-n", "3", "--simple-io", "-cnv", "-p", "hi")
    terminals.append(terminal := Terminal(words))
    assert b"t/s" in terminal.until(SIGN)
    terminal.type("y" * 500 + "\n")
    assert b"error: prompt: " in terminal.until(SIGN)
    terminal.type("\x04")
    assert terminal.wait() == 0


def test_progress_and_colours_on_a_terminal(target: Path, terminals: list[Terminal]) -> None:
    words = tiny_commands.generate(target, "-p", "x" * 600, "-n", "8")
    words[words.index("-c") + 1] = "700"
    words += ["-md", str(target), "--color", "on", "-ub", "64"]
    terminals.append(terminal := Terminal(words, "xterm"))
    shown = terminal.until(b"per position")
    assert b"loading the model" in shown
    assert b"reading the prompt" in shown
    assert b"\033[32m" in shown
    assert terminal.wait() == 0
    plain = specdec(words, "")
    assert "\033" not in plain.stdout + plain.stderr
    assert "loading" not in plain.stderr


def test_the_sign_never_goes_into_a_file(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "out"
    handle, theirs = pty.openpty()
    words = tiny_commands.chat(target, "-n", "3", "-cnv", "--no-show-timings")
    with path.open("wb") as out:
        command = [sys.executable, "-m", "specdec_cli", *words]
        process = subprocess.Popen(command, stdin=theirs, stdout=out, stderr=subprocess.PIPE)
    os.write(handle, b"hi\n\x04")
    _, err = process.communicate(timeout=60)
    os.close(theirs)
    os.close(handle)
    assert process.returncode == 0
    assert err.count(SIGN) == 2
    assert SIGN not in path.read_bytes()
    assert path.read_bytes()

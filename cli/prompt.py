"""Where the prompt comes from: a flag, a file, a pipe, or a person who is asked."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from specdec.errors import UsageError
from specdec.options import GenerateOptions, Options

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescape(text: str) -> str:
    r"""``text`` with ``\n \r \t \' \" \\ \xHH`` read; any other backslash stays."""

    def replace(match: re.Match[str]) -> str:
        body = match[1]
        return chr(int(body[1:], 16)) if body[0] == "x" and len(body) > 1 else _ESCAPES[body]

    return re.sub(r"\\(x[0-9a-fA-F]{1,2}|[nrt'\"\\])", replace, text)


def has_prompt(options: GenerateOptions) -> bool:
    """Whether a flag names a prompt."""
    return any(v is not None for v in (options.prompt, options.prompt_file, options.binary_file))


def is_conversation(options: Options, *, has_template: bool) -> bool:
    """Whether a conversation is held instead of one prompt answered.

    `-cnv` asks for one, with the prompt as its first turn; so does a terminal without a prompt, if
    the model can chat. `--single-turn`, `--json` and `--spec-check` are for one reply: a person is
    asked for it only where there is nothing else to read.
    """
    request = options.generate
    if request.conversation is False or request.prompt == "-":
        return False
    asks = _is_terminal() and not has_prompt(request)
    if options.output.json or options.output.spec_check:
        return False
    if request.conversation and not request.single_turn:
        return True
    return asks and (has_template or bool(request.conversation))


def read_prompt(options: GenerateOptions) -> str:
    """The prompt text. Escapes are read in `--prompt` and `--file`, not in bytes or a pipe.

    Raises `UsageError` without any source, or for one that cannot be read.
    """
    sources = {
        "--prompt": options.prompt,
        "--file": options.prompt_file,
        "--binary-file": options.binary_file,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other; give one prompt")
    if options.binary_file is not None:
        return _read(options.binary_file, "--binary-file")
    if options.prompt_file is not None:
        text = _read(options.prompt_file, "--file").removesuffix("\n")
    elif options.prompt is not None and options.prompt != "-":
        text = options.prompt
    else:
        return _read_stdin(asked=options.prompt == "-")
    return unescape(text) if options.escape else text


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag}: {path} is not UTF-8 text (byte {error.start})") from None


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _read_stdin(*, asked: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise UsageError("--prompt is required; give -p TEXT, -f FILE or a pipe")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt: standard input is not UTF-8 (byte {error.start})") from None

"""`specdec tokenize`: text to token ids and back, with the flags of llama-tokenize."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ModelFileError, UsageError
from specdec_cli.flags.tools import TOKENIZE
from specdec_cli.given import Given
from specdec_cli.prompt import unescape

if TYPE_CHECKING:
    from specdec.options import Options
    from specdec.tokenizer import Tokenizer

PANELS = (TOKENIZE,)


def tokenize(given: Given) -> None:
    """Shows the tokens of a text, or with [bold]--decode[/bold] the text of tokens.

    [bold]specdec tokenize -m model.gguf -p "Hello world" --ids[/bold]
    """
    options = given.options()
    if options.output.verbosity == 0:
        logging.getLogger("specdec").setLevel(logging.ERROR)
    if options.model.path is None:
        raise UsageError("--model is required; give a GGUF file with -m")
    text = _read(options)
    tokenizer = _open(options.model.path)
    if text is None:
        assert options.tokenize.decode is not None
        _write(tokenizer.decode_bytes(options.tokenize.decode, special=True) + b"\n")
        return
    tokens = tokenizer.encode(
        unescape(text) if options.generate.escape else text,
        add_special=tokenizer.add_bos and not options.tokenize.no_bos,
        parse_special=not options.tokenize.no_parse_special,
    )
    if options.tokenize.ids:
        _write(f"[{', '.join(map(str, tokens))}]\n".encode())
    else:
        _write(b"".join(b"%6d -> '%b'\n" % (token, tokenizer.piece(token)) for token in tokens))
    if options.tokenize.show_count:
        _write(f"Total number of tokens: {len(tokens)}\n".encode())


def _read(options: Options) -> str | None:
    """The text from its one source; None for `--decode`, which has none."""
    request = options.generate
    sources = {
        "--prompt": request.prompt is not None,
        "--file": request.prompt_file is not None,
        "--stdin": options.tokenize.stdin,
        "--decode": options.tokenize.decode is not None,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise UsageError(f"tokenize needs one of {', '.join(sources)}; found {found}")
    if request.prompt is not None:
        return request.prompt
    if request.prompt_file is not None:
        return _decode(_read_bytes(request.prompt_file), str(request.prompt_file))
    if options.tokenize.stdin:
        return _decode(sys.stdin.buffer.read(), "--stdin")
    return None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--file: cannot read {path}: {error.strerror}") from None


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 text (byte {error.start})") from None


def _open(path: Path) -> Tokenizer:
    from specdec.gguf_file import GGUFFile
    from specdec.tokenizer import Tokenizer

    with GGUFFile.open(path) as file:
        try:
            return Tokenizer.from_metadata(file.metadata)
        except ModelFileError as error:
            raise type(error)(f"{path}: {error}") from None


def _write(data: bytes) -> None:
    """Bytes as they are: a token may hold half a character."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()

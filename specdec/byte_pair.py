"""Byte-pair tokenization: the merges of a GGUF file, run by the `tokenizers` package.

Knows words and merges; special tokens are cut out before (`tokenizer.py`), and which words a text
has is up to the pre-tokenizer (`pretokenizer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import ModelFileError
from specdec.pretokenizer import PreTokenizer, build_pre_tokenizer
from specdec.sentencepiece import SPACE
from specdec.vocabulary import PREFIX, Vocabulary, read_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

_NEWLINES = re.compile("(\n+)")


class Encoder(Protocol):
    """Text without special tokens to ids."""

    def encode(self, text: str) -> list[int]: ...


class BytePairEncoder:
    """Text to ids by byte-pair merging with the `tokenizers` package; knows no special tokens."""

    def __init__(
        self, vocabulary: Vocabulary, merges: Iterable[tuple[str, str]], row: PreTokenizer
    ) -> None:
        self._engine = _build_engine(vocabulary, merges, row)
        self._escape_whitespaces = row.escape_whitespaces

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; bytes that the vocabulary cannot write are left out."""
        if self._escape_whitespaces:
            text = text.replace(" ", SPACE)
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids


class NewlineRunEncoder:
    """Gemma 4: a run of newlines that is one token is that token, whatever the merges say."""

    def __init__(self, encoder: Encoder, ids_by_text: Mapping[str, int]) -> None:
        self._encoder = encoder
        self._ids_by_text = ids_by_text

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = []
        for piece in filter(None, _NEWLINES.split(text)):
            token = self._ids_by_text.get(piece) if piece[0] == "\n" else None
            ids += self._encoder.encode(piece) if token is None else [token]
        return ids


def _build_engine(
    vocabulary: Vocabulary, merges: Iterable[tuple[str, str]], row: PreTokenizer
) -> Engine:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models

    known, texts = vocabulary.ids_by_text, vocabulary.tokens
    usable = dict.fromkeys(
        (texts[known[left]], texts[known[right]])  # no strings of their own
        for left, right in merges
        if left in known and right in known and left + right in known
    )
    model = models.BPE(
        vocab=known,
        merges=list(usable),
        ignore_merges=row.ignore_merges,
        byte_fallback=not row.byte_level,
    )
    engine = Engine(model)
    engine.pre_tokenizer = build_pre_tokenizer(row)
    return engine


def read_merges(metadata: Mapping[str, Any], pre: str | None) -> Iterator[tuple[str, str]]:
    """The pairs of symbols that become one, best first. Raises `ModelFileError`."""
    if PREFIX + "merges" not in metadata and pre == "kimi-k2":
        return
    for rank, text in enumerate(read_texts(metadata, "merges")):
        cut = text.find(" ", 1)  # a first symbol may itself begin with a space
        if cut < 0:
            raise ModelFileError(
                f"{PREFIX}merges: entry {rank} is {text!r}, expected two symbols and a space"
            )
        yield text[:cut], text[cut + 1 :]


@cache
def bytes_by_symbol() -> dict[str, int]:
    """GPT-2's printable alphabet: which byte each of its 256 characters stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(256 + place): byte for place, byte in enumerate(others)}

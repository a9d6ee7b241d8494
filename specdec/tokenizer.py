"""Text to token ids and back, built from the metadata of a GGUF file.

Byte-pair vocabularies run on the `tokenizers` package (`byte_pair.py`), SentencePiece ones on
`sentencepiece.py`. Special tokens are cut out of the text first, as llama.cpp's
`tokenizer_st_partition` does, so that only a caller who asks for it can turn text into control
tokens. Nothing here knows about models or chats.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Self

from specdec.byte_pair import (
    BytePairEncoder,
    Encoder,
    NewlineRunEncoder,
    bytes_by_symbol,
    read_merges,
)
from specdec.errors import UnsupportedError, UsageError
from specdec.pretokenizer import find_pre_tokenizer
from specdec.sentencepiece import SPACE, SentencePieceEncoder
from specdec.vocabulary import (
    PREFIX,
    TokenType,
    Vocabulary,
    load_vocabulary,
    read_flag,
)

SUPPORTED_MODELS = ("gpt2", "llama", "gemma4")
SHOWN_AS_TEXT = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)

_C_SPACE = " \t\n\v\f\r"  # isspace() of the C locale
_BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")


QUOTE_MARK = "\ufdd0"
"""A code point that is no character; see `Tokenizer.quote`."""


class VocabType(IntEnum):
    """llama.cpp's number of the kind of vocabulary."""

    SPM = 1
    BPE = 2


class Tokenizer:
    """The tokenizer of one model; immutable after `from_metadata`."""

    vocab_type: VocabType
    add_bos: bool
    add_eos: bool

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        vocab_type: VocabType,
        *,
        byte_level: bool,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool,
        clean_spaces: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._byte_level = byte_level
        self._pieces: list[bytes | None] = [None] * len(vocabulary.tokens)
        self.vocab_type = vocab_type
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = add_eos and self.eos_id is not None
        self.add_space_prefix = add_space_prefix
        self.clean_spaces = clean_spaces

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The tokenizer that a GGUF file's metadata describe.

        Raises `UnsupportedError` for another kind of tokenizer and `ModelFileError`, naming the
        key, for arrays that are missing, too short or malformed.
        """
        model = metadata.get(PREFIX + "model")
        if model not in SUPPORTED_MODELS:
            raise UnsupportedError(
                f"{PREFIX}model: found {model!r}, supported are {', '.join(SUPPORTED_MODELS)}"
            )
        build = cls._build_sentencepiece if model == "llama" else cls._build_byte_pair
        return build(metadata, model)

    @classmethod
    def _build_sentencepiece(cls, metadata: Mapping[str, Any], model: str) -> Self:
        vocabulary = load_vocabulary(metadata, model, metadata.get(PREFIX + "pre"))
        if not vocabulary.scores:
            vocabulary.scores = [0.0] * len(vocabulary.tokens)
        encoder = SentencePieceEncoder(
            vocabulary.ids_by_text, vocabulary.scores, vocabulary.ids.get("unknown")
        )
        return cls(
            vocabulary,
            encoder,
            VocabType.SPM,
            byte_level=False,
            add_bos=read_flag(metadata, "add_bos_token", True),
            add_eos=read_flag(metadata, "add_eos_token", False),
            add_space_prefix=read_flag(metadata, "add_space_prefix", True),
            clean_spaces=False,
        )

    @classmethod
    def _build_byte_pair(cls, metadata: Mapping[str, Any], model: str) -> Self:
        pre = "gemma4" if model == "gemma4" else metadata.get(PREFIX + "pre")
        row = find_pre_tokenizer(pre)
        vocabulary = load_vocabulary(metadata, model, pre)
        encoder: Encoder = BytePairEncoder(vocabulary, read_merges(metadata, pre), row)
        is_gemma4 = pre in ("gemma4", "granite-embed-multi-311m")
        if is_gemma4:
            encoder = NewlineRunEncoder(encoder, vocabulary.ids_by_text)
        return cls(
            vocabulary,
            encoder,
            VocabType.BPE,
            byte_level=not row.escape_whitespaces,
            add_bos=is_gemma4 or read_flag(metadata, "add_bos_token", row.add_bos),
            add_eos=read_flag(metadata, "add_eos_token", False),
            add_space_prefix=read_flag(metadata, "add_space_prefix", False),
            clean_spaces=row.clean_spaces,
        )

    # What the vocabulary holds

    @property
    def tokens(self) -> Sequence[str]:
        """The texts of all tokens as the file writes them, by id."""
        return self._vocabulary.tokens

    @property
    def n_vocab(self) -> int:
        """How many tokens there are."""
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self._vocabulary.ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text."""
        return self._vocabulary.ids.get("eos")

    @property
    def eot_id(self) -> int | None:
        """The token that ends a turn."""
        return self._vocabulary.ids.get("eot")

    @property
    def padding_id(self) -> int | None:
        """The token that fills up batches."""
        return self._vocabulary.ids.get("padding")

    @property
    def mask_id(self) -> int | None:
        """The token that stands for one to be predicted."""
        return self._vocabulary.ids.get("mask")

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end a generation (llama.cpp's end-of-generation ids)."""
        return self._vocabulary.end_tokens

    @property
    def control_ids(self) -> list[int]:
        """The ids of all control tokens, ascending."""
        return [id for id, kind in enumerate(self._vocabulary.types) if kind == TokenType.CONTROL]

    def is_control(self, id: int) -> bool:
        """Whether that token is markup for the model and no text."""
        return self._vocabulary.types[self._checked(id)] == TokenType.CONTROL

    def token_text(self, id: int) -> str:
        """The token as the file writes it, `Ġthe` or `▁the`."""
        return self._vocabulary.tokens[self._checked(id)]

    def _checked(self, id: int) -> int:
        if not 0 <= id < self.n_vocab:
            raise UsageError(f"token id {id}: the vocabulary has ids 0 to {self.n_vocab - 1}")
        return id

    # Text to ids

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """The ids of `text`.

        `add_special` adds the begin and end tokens that the file asks for. `parse_special` reads
        control tokens written in the text as such; user-defined tokens always are. Lone surrogates
        count as U+FFFD.
        """
        pieces = self._split_special(_valid_unicode(text), parse_special)
        return self._encode(pieces, add_special)

    def _encode(self, pieces: Iterable[str | int], add_special: bool) -> list[int]:
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        follows_special = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                follows_special = True
                continue
            prefix = " " if self.add_space_prefix and follows_special and self._is_spm else ""
            ids += self._encoder.encode(prefix + piece)
            follows_special = False
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def quote(self, text: str) -> str:
        """`text` with a mark in every control token written in it, for a message's content.

        `encode_chat` takes the marks out again and reads such text as text.
        """
        vocabulary = self._vocabulary
        for token in vocabulary.special:
            name = vocabulary.tokens[token]
            if len(name) > 1 and name in text and vocabulary.types[token] in HIDDEN:
                text = text.replace(name, f"{name[0]}{QUOTE_MARK}{name[1:]}")
        return text

    def encode_chat(self, prompt: str) -> list[int]:
        """The ids of a prompt that a chat template wrote from `quote`d messages.

        Control tokens are read, and a begin or end token that both the template and `add_special`
        put there comes only once.
        """
        pieces = self._split_special(_valid_unicode(prompt), parse_special=True)
        unquoted = [p if isinstance(p, int) else p.replace(QUOTE_MARK, "") for p in pieces]
        ids = self._encode(unquoted, add_special=True)
        if self.add_bos and ids[1:2] == [self.bos_id]:
            del ids[0]
        if self.add_eos and ids[-2:-1] == [self.eos_id]:
            del ids[-1]
        return ids

    @property
    def _is_spm(self) -> bool:
        return self.vocab_type is VocabType.SPM

    def _split_special(self, text: str, parse_special: bool) -> list[str | int]:
        pieces: list[str | int] = [text] if text else []
        vocabulary = self._vocabulary
        for token in vocabulary.special:
            if vocabulary.tokens[token] not in text:
                continue
            if parse_special or vocabulary.types[token] == TokenType.USER_DEFINED:
                pieces = [
                    part
                    for piece in pieces
                    for part in ([piece] if isinstance(piece, int) else self._cut(piece, token))
                ]
        return pieces

    def _cut(self, piece: str, token: int) -> Iterable[str | int]:
        parts = piece.split(self._vocabulary.tokens[token])
        for place, part in enumerate(parts):
            if place > 0:
                yield token
                if token in self._vocabulary.strips_right:
                    part = part.lstrip(_C_SPACE)
            if place < len(parts) - 1 and token in self._vocabulary.strips_left:
                part = part.rstrip(_C_SPACE)
            if part:
                yield part

    # Ids to text

    def piece(self, id: int) -> bytes:
        """The bytes that token writes; control tokens write their name."""
        piece = self._pieces[self._checked(id)]
        if piece is None:
            piece = self._pieces[id] = self._make_piece(id)
        return piece

    def _make_piece(self, id: int) -> bytes:
        text, kind = self._vocabulary.tokens[id], self._vocabulary.types[id]
        if kind in SHOWN_AS_TEXT:
            return text.encode("utf-8", "replace")
        if kind == TokenType.BYTE:
            match = _BYTE_TEXT.match(text)
            return bytes([int(match[1], 16)]) if match else b""
        if kind != TokenType.NORMAL:
            return b""
        if not self._byte_level:
            return text.replace(SPACE, " ").encode("utf-8", "replace")
        symbols = bytes_by_symbol()
        return b"".join(
            bytes([symbols[symbol]]) if symbol in symbols else _unknown_symbol(symbol, text)
            for symbol in text
        )

    def visible_piece(self, id: int, *, special: bool = False) -> bytes:
        """`piece(id)`, but nothing for control and unknown tokens unless `special`."""
        hidden = not special and self._vocabulary.types[self._checked(id)] in HIDDEN
        return b"" if hidden else self.piece(id)

    def decode_bytes(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of a whole text (llama.cpp's `detokenize`).

        The space that encoding put in front is taken off, and `clean_spaces` is obeyed.
        """
        pieces = [self.visible_piece(id, special=special) for id in ids]
        if pieces and self.add_space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        return _clean_spaces(text) if self.clean_spaces else text

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """`decode_bytes` as text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, special=special).decode("utf-8", "replace")

    def stream_decoder(self, *, special: bool = False) -> StreamDecoder:
        """A new decoder for text that arrives token by token."""
        return StreamDecoder(self, special=special)


class StreamDecoder:
    """Token ids in, whole characters out."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that is complete with this token; half a character waits for its rest."""
        return self._decoder.decode(self._tokenizer.visible_piece(id, special=self._special))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never got complete."""
        return self._decoder.decode(b"", final=True)


def _unknown_symbol(symbol: str, text: str) -> bytes:
    return f"[UNK_BYTE_0x{symbol.encode('utf-8', 'replace').hex()}{text}]".encode(
        "utf-8", "replace"
    )


def _valid_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _clean_spaces(text: bytes) -> bytes:
    """llama.cpp's `clean_up_tokenization_spaces`, pass by pass."""
    text = re.sub(rb" (?=[?!.,])", b"", text)
    text = re.sub(rb" ' ", b"'", text)
    return re.sub(rb" (?='(?:[sm]|re|ve))", b"", text)

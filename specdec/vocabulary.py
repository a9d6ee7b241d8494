"""What a GGUF file says about its tokens: texts, types, scores, special ids and end tokens.

Follows llama.cpp's `llama_vocab::impl::load`, including the special tokens it recognises by their
text. The arrays come from a file, so their types and lengths are checked before use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from specdec.errors import ModelFileError

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Name here -> key in the file; a later key wins only where an earlier one is missing.
ID_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unknown": ("unknown_token_id",),
    "separator": ("seperator_token_id",),  # the key is spelled like this
    "padding": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}

# Ids of a file that names none, by tokenizer.ggml.model.
DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
}

# Special tokens that are found by their text when the file does not name their id.
WELL_KNOWN_TEXTS = {
    "eot": (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

# Tokens that end a generation whatever the file says about them.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)

# Harmony's markup is text that a caller wants to see.
VISIBLE_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass(slots=True)
class Vocabulary:
    """The tokens of one file; `types` and `ids` are final after `load_vocabulary`."""

    tokens: list[str]
    ids_by_text: dict[str, int]
    types: bytearray  # one TokenType each
    scores: list[float]  # empty if the file has none
    ids: dict[str, int]  # the keys of ID_KEYS that are known
    end_tokens: frozenset[int] = frozenset()
    strips_left: frozenset[int] = frozenset()  # special tokens that swallow the space before them
    strips_right: frozenset[int] = frozenset()  # ... and after them
    special: list[int] = field(default_factory=list)  # longest text first


def _plain(value: Any) -> Any:
    """A NumPy scalar or array as the Python object it stands for."""
    return value.tolist() if hasattr(value, "tolist") else value


def read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean `tokenizer.ggml.NAME`, or `default` if the file has none."""
    value = _plain(metadata.get(PREFIX + name))
    if value is None:
        return default
    if not isinstance(value, (bool, int)):
        raise ModelFileError(f"{PREFIX}{name}: found {value!r}, expected true or false")
    return bool(value)


def read_texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """The string array `tokenizer.ggml.NAME`; an error if it is missing or holds something else."""
    value = metadata.get(PREFIX + name)
    if value is None:
        raise ModelFileError(f"{PREFIX}{name} is missing; the file has no complete vocabulary")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ModelFileError(f"{PREFIX}{name}: expected an array of strings")
    texts = list(value)
    if not set(map(type, texts)) <= {str}:
        raise ModelFileError(f"{PREFIX}{name}: expected an array of strings")
    return texts


def _read_numbers(metadata: Mapping[str, Any], name: str, n_vocab: int) -> list[Any] | None:
    numbers = _plain(metadata.get(PREFIX + name))
    if numbers is None:
        return None
    if not isinstance(numbers, Sequence) or isinstance(numbers, (str, bytes)):
        raise ModelFileError(f"{PREFIX}{name}: expected an array of numbers")
    if len(numbers) < n_vocab:
        raise ModelFileError(
            f"{PREFIX}{name}: found {len(numbers)} values, expected one for each of the "
            f"{n_vocab} tokens"
        )
    if not set(map(type, numbers)) <= {int, float}:
        raise ModelFileError(f"{PREFIX}{name}: expected an array of numbers")
    return list(numbers[:n_vocab])


def load_vocabulary(metadata: Mapping[str, Any], model: str, pre: str | None) -> Vocabulary:
    """The vocabulary in `metadata`; `model` and `pre` are the names of the tokenizer."""
    tokens = read_texts(metadata, "tokens")
    if not tokens:
        raise ModelFileError(f"{PREFIX}tokens: found no token")
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(tokens)]
    ids_by_text = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
    if len(ids_by_text) < len(tokens):
        logger.warning("%stokens: some texts occur twice; the first id is used", PREFIX)
    types = _read_numbers(metadata, "token_type", len(tokens))
    scores = _read_numbers(metadata, "scores", len(tokens))
    vocabulary = Vocabulary(
        tokens=tokens,
        ids_by_text=ids_by_text,
        types=_token_types(types, len(tokens)),
        scores=scores or [],
        ids=_special_ids(metadata, model, pre, len(tokens)),
    )
    _find_well_known(vocabulary)
    _find_end_tokens(vocabulary)
    _collect_special(vocabulary, metadata, pre or "")
    return vocabulary


def _token_types(types: list[Any] | None, n_vocab: int) -> bytearray:
    if types is None:
        return bytearray([TokenType.NORMAL]) * n_vocab
    known = range(TokenType.NORMAL, TokenType.BYTE + 1)
    return bytearray(int(kind) if kind in known else TokenType.UNDEFINED for kind in types)


def _special_ids(
    metadata: Mapping[str, Any], model: str, pre: str | None, n_vocab: int
) -> dict[str, int]:
    ids = {name: id for name, id in DEFAULT_IDS.get(model, {}).items() if id < n_vocab}
    if pre in ("chatglm-bpe", "glm4", "glm5"):
        ids.pop("bos", None)
    for name, keys in ID_KEYS.items():
        key = next((key for key in keys if PREFIX + key in metadata), None)
        if key is None:
            continue
        value = _plain(metadata[PREFIX + key])
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFileError(f"{PREFIX}{key}: found {value!r}, expected a token id")
        if 0 <= value < n_vocab:
            ids[name] = value
        else:
            logger.warning(
                "%s%s: %d is no id of a vocabulary of %d tokens; it is ignored",
                PREFIX,
                key,
                value,
                n_vocab,
            )
    return ids


def _present(vocabulary: Vocabulary, texts: Iterable[str]) -> list[int]:
    found = vocabulary.ids_by_text
    return [found[text] for text in texts if text in found]


def _find_well_known(vocabulary: Vocabulary) -> None:
    """Adds special ids by text. llama.cpp takes the first in the order of its hash table; here an
    end of turn that is not the end of text as well comes first, which is the one that says more."""
    for name, texts in WELL_KNOWN_TEXTS.items():
        if name in vocabulary.ids:
            continue
        candidates = _present(vocabulary, texts)
        if not candidates:
            continue
        if name == "eot":
            candidates.sort(key=lambda token: token == vocabulary.ids.get("eos"))
        vocabulary.ids[name] = candidates[0]
        vocabulary.types[candidates[0]] = TokenType.CONTROL


def _find_end_tokens(vocabulary: Vocabulary) -> None:
    types, ids = vocabulary.types, vocabulary.ids
    ends = {ids[name] for name in ("fim_pad", "fim_rep", "fim_sep") if name in ids}
    for token in _present(vocabulary, END_TEXTS):
        ends.add(token)
        types[token] = TokenType.CONTROL
    for token in _present(vocabulary, VISIBLE_TEXTS):
        types[token] = TokenType.USER_DEFINED
    ends |= {ids[name] for name in ("eos", "eot", "eom") if name in ids}

    texts = {vocabulary.tokens[token] for token in ends}
    harmony = {"<|return|>", "<|call|>"} <= texts
    solar = "<|flush|>" in texts and bool({"<|call|>", "<|calls|>"} & texts)
    if "<|end|>" in texts and (harmony or solar):  # there it ends a message, not the reply
        token = vocabulary.ids_by_text["<|end|>"]
        ends.discard(token)
        types[token] = TokenType.USER_DEFINED
    if {"<|tool_response>", "</s>"} <= texts:  # gemma4, where </s> is markup
        token = vocabulary.ids_by_text["</s>"]
        ends.discard(token)
        types[token] = TokenType.NORMAL
    vocabulary.end_tokens = frozenset(ends)


def _collect_special(vocabulary: Vocabulary, metadata: Mapping[str, Any], pre: str) -> None:
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    special = [token for token, kind in enumerate(vocabulary.types) if kind in kinds]
    special.sort(key=lambda token: -len(vocabulary.tokens[token].encode("utf-8", "replace")))
    vocabulary.special = special

    # GGUF has no key for stripping; llama.cpp goes by names.
    name = str(metadata.get("general.name", "")).lower()
    architecture = str(metadata.get("general.architecture", ""))
    jina = any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
    if jina or any(part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")):
        vocabulary.strips_left = frozenset(_present(vocabulary, ["<mask>"]))
    elif "phi-3" in name or "phi3" in name:
        keeps = _present(vocabulary, ["<unk>", "<s>", "<|endoftext|>"])
        strips = {*special, *_present(vocabulary, ["</s>"])}
        vocabulary.strips_right = frozenset(strips.difference(keeps))
    elif "modern-bert" in name:
        vocabulary.strips_left = frozenset(_present(vocabulary, ["[MASK]"]))

"""How each pre-tokenizer name cuts text into the words that byte-pair merging works on.

The table is `data/pretokenizers.json`: for every `tokenizer.ggml.pre` that llama.cpp knows, the
patterns (each one is applied to the pieces the previous one left, matched or not) and the flags
that come with the name. The patterns are written for Oniguruma, the engine of the `tokenizers`
package, and say what llama.cpp *does*, which is not always what its regular expressions say:

- case classes (`\\p{Lu}`, `\\p{Lo}`, ...) match any letter there, so they are `\\p{L}` here;
- `~` is not part of `\\p{S}`;
- `\\d` and `\\b` know ASCII only, and `$` is the end of the text;
- a class of wide characters never contains white space;
- `afmoe` leaves the text before a number in one piece with the number's first digits.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer as EnginePreTokenizer

logger = logging.getLogger(__name__)

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One row of the table: the patterns, and the flags unless the file says otherwise."""

    split: tuple[str, ...]
    byte_level: bool = True  # words are mapped byte by byte to GPT-2's printable alphabet
    escape_whitespaces: bool = False  # a space is written ▁ in the vocabulary
    clean_spaces: bool = True  # decoding drops the space before punctuation
    ignore_merges: bool = False  # a word that is a token is not merged up to it
    add_bos: bool = False


def _load_table() -> dict[str, PreTokenizer]:
    text = resources.files("specdec.data").joinpath("pretokenizers.json").read_text("utf-8")
    return {
        name: PreTokenizer(split=tuple(group["split"]), **group["flags"])
        for group in json.loads(text)
        for name in group["names"]
    }


def known_names() -> list[str]:
    """Every pre-tokenizer name of the table, sorted."""
    return sorted(_load_table())


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The row of that name; the default row, with a warning, if the name is missing or unknown."""
    table = _load_table()
    if name is not None and name in table:
        return table[name]
    what = "no tokenizer.ggml.pre" if name is None else f"unknown tokenizer.ggml.pre '{name}'"
    logger.warning(
        "%s: using the pre-tokenizer '%s'; generation quality may suffer, "
        "convert the model again to mend this",
        what,
        DEFAULT_NAME,
    )
    return table[DEFAULT_NAME]


def build_pre_tokenizer(row: PreTokenizer) -> EnginePreTokenizer:
    """The row as an object of the `tokenizers` package."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[EnginePreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.split
    ]
    if row.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)

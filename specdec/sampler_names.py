"""Names of the samplers as users write them: llama.cpp's spellings, aliases and letters.

Only names live here; what they do is in `specdec.sampling`. Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from specdec.errors import unknown_name

logger = logging.getLogger(__name__)


class SamplerName(NamedTuple):
    """One row: the canonical name, its letter in `--sampler-seq`, and other spellings."""

    name: str
    letter: str
    aliases: tuple[str, ...] = ()


NAMES = (
    SamplerName("penalties", "e"),
    SamplerName("dry", "d"),
    SamplerName("top_n_sigma", "s"),
    SamplerName("top_k", "k"),
    SamplerName("typ_p", "y", ("typical", "typical_p", "typ")),
    SamplerName("top_p", "p", ("nucleus",)),
    SamplerName("min_p", "m"),
    SamplerName("xtc", "x"),
    SamplerName("temperature", "t", ("temp",)),
    SamplerName("infill", "i"),
    SamplerName("adaptive_p", "a"),
)
SAMPLER_NAMES = tuple(row.name for row in NAMES)
"""Every name that may stand in `SamplingOptions.samplers`."""


def _plain(spelling: str) -> str:
    return spelling.strip().lower().replace("-", "").replace("_", "")


_BY_SPELLING = {_plain(word): row.name for row in NAMES for word in (row.name, *row.aliases)}
_BY_LETTER = {row.letter: row.name for row in NAMES}


def parse_samplers(text: str) -> tuple[str, ...]:
    """The samplers of a `;` list such as ``"top-k;temp"``, in its order.

    Case does not matter; `-` or nothing may stand for `_`. As in llama.cpp, an unknown name is
    dropped with a warning, and empty entries are ignored.
    """
    return _known(((word, _BY_SPELLING.get(_plain(word))) for word in text.split(";")), "name")


def parse_sampler_seq(letters: str) -> tuple[str, ...]:
    """The samplers of a letter sequence such as ``"kt"``, in its order; unknown letters warn."""
    return _known(((letter, _BY_LETTER.get(letter)) for letter in letters), "letter")


def _known(words: Iterable[tuple[str, str | None]], kind: str) -> tuple[str, ...]:
    names: list[str] = []
    for word, name in words:
        if name is not None:
            names.append(name)
        elif word.strip():
            known = SAMPLER_NAMES if kind == "name" else tuple(_BY_LETTER)
            logger.warning("%s; dropped", unknown_name(f"sampler {kind}", word.strip(), known))
    return tuple(names)

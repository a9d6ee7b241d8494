"""Speculative decoding: the drafters, the draft model and their limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specdec.errors import unknown_name
from specdec.options.checks import CACHE_TYPES, check_layers, check_range, require

SPEC_TYPES = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "draft-dspark",
    "draft-dflash2",
    "draft-lilicorr",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
"""The spec types in the order llama.cpp lists them."""

DFLASH_TYPES = ("draft-dflash", "draft-dspark", "draft-dflash2", "draft-lilicorr")
"""Spec types whose draft is a member of the DFlash family; at most one of them may be on."""

AUTO = -1
"""A draft length that is chosen from measured costs, up to `AUTO_LONGEST`."""
AUTO_LONGEST = 16

DraftSampling = Literal["greedy", "probabilistic"]


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The draft model and the limits of all `draft-*` types."""

    path: Path | None = None
    """The draft's GGUF file."""
    hf_repo: str | None = None
    """The draft on the Hugging Face hub, `user/repo[:quant]`."""
    n_max: int = 3
    """Longest draft in tokens; `AUTO` = whatever gives the most tokens per second."""
    n_min: int = 0
    """Shorter drafts are dropped."""
    p_min: float = 0.0
    """A draft ends before the first token with a lower confidence."""
    sampling: DraftSampling = "greedy"
    """`probabilistic`: sample drafts and verify them by rejection sampling."""
    device: str | None = None
    """Device of the draft; None = the target's."""
    n_gpu_layers: str = "auto"
    """Draft layers on the accelerator: 0 = the CPU, anything else = the whole draft."""
    cache_type_k: str | None = None
    """Type of the draft's key cache; None = the type of the computation."""
    cache_type_v: str | None = None
    """Type of the draft's value cache; None = the type of the computation."""

    def __post_init__(self) -> None:
        require(
            self.n_max >= 0 or self.n_max == AUTO,
            f"--spec-draft-n-max must be auto, or 0 or more, got {self.n_max}",
        )
        check_layers("--spec-draft-ngl", self.n_gpu_layers)
        require(not math.isnan(self.p_min), "--spec-draft-p-min must be a number")
        require(
            self.sampling in ("greedy", "probabilistic"),
            "--spec-draft-sampling: invalid value, must be one of: greedy, probabilistic",
        )
        for flag, name in (
            ("--spec-draft-type-k", self.cache_type_k),
            ("--spec-draft-type-v", self.cache_type_v),
        ):
            require(name is None or name in CACHE_TYPES, f"{flag}: Unsupported cache type: {name}")


def _check_ngram(flag: str, size_n: int, size_m: int, min_hits: int) -> None:
    check_range(f"{flag}-size-n", size_n, 1, 1024, "ngram size N")
    check_range(f"{flag}-size-m", size_m, 1, 1024, "ngram size M")
    require(min_hits >= 1, f"{flag}-min-hits: ngram min hits must be at least 1, got {min_hits}")


@dataclass(frozen=True, slots=True)
class NgramSimpleOptions:
    """`ngram-simple`: copy what followed the last occurrence of the newest n tokens."""

    size_n: int = 12
    """Length of the pattern looked for."""
    size_m: int = 48
    """Longest draft."""

    def __post_init__(self) -> None:
        _check_ngram("--spec-ngram-simple", self.size_n, self.size_m, 1)


@dataclass(frozen=True, slots=True)
class NgramMapKOptions:
    """`ngram-map-k`: as ngram-simple, with an index and a memory of accepted lengths."""

    size_n: int = 12
    """Key length."""
    size_m: int = 48
    """Longest draft."""

    def __post_init__(self) -> None:
        _check_ngram("--spec-ngram-map-k", self.size_n, self.size_m, 1)


@dataclass(frozen=True, slots=True)
class NgramMapK4VOptions:
    """`ngram-map-k4v`: up to four values a key, drafts only a clear majority."""

    size_n: int = 12
    """Key length."""
    size_m: int = 48
    """Value length and longest draft."""
    min_hits: int = 1
    """Look-ups of a key before it drafts."""

    def __post_init__(self) -> None:
        _check_ngram("--spec-ngram-map-k4v", self.size_n, self.size_m, self.min_hits)


@dataclass(frozen=True, slots=True)
class NgramModOptions:
    """`ngram-mod`: one hash table from n tokens to the next one, shared by all requests."""

    n_match: int = 24
    """Length of the hashed context."""
    n_min: int = 48
    """A chain that breaks off earlier gives no draft."""
    n_max: int = 64
    """Longest chain."""

    def __post_init__(self) -> None:
        check_range("--spec-ngram-mod-n-match", self.n_match, 1, 1024, "ngram size N")
        check_range("--spec-ngram-mod-n-min", self.n_min, 0, 1024, "ngram n-min")
        check_range("--spec-ngram-mod-n-max", self.n_max, 0, 1024, "ngram n-max")


@dataclass(frozen=True, slots=True)
class NgramCacheOptions:
    """`ngram-cache`: three tables of counted continuations."""

    static_path: Path | None = None
    """Read-only statistics of a corpus."""
    dynamic_path: Path | None = None
    """Statistics of earlier runs; read at the start, written back at the end."""


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Speculative decoding: which drafters, with which limits."""

    types: tuple[str, ...] | None = None
    """Spec types as given; None = not given, so a draft file decides."""
    draft: DraftOptions = field(default_factory=DraftOptions)
    ngram_simple: NgramSimpleOptions = field(default_factory=NgramSimpleOptions)
    ngram_map_k: NgramMapKOptions = field(default_factory=NgramMapKOptions)
    ngram_map_k4v: NgramMapK4VOptions = field(default_factory=NgramMapK4VOptions)
    ngram_mod: NgramModOptions = field(default_factory=NgramModOptions)
    ngram_cache: NgramCacheOptions = field(default_factory=NgramCacheOptions)
    synth_len: float | None = None
    """Benchmark: mean number of tokens a round emits, at random."""
    synth_rates: tuple[float, ...] | None = None
    """Benchmark: acceptance probability of each draft position."""

    def __post_init__(self) -> None:
        for name in self.types or ():
            require(
                name in SPEC_TYPES,
                f"--spec-type: {unknown_name('speculative type', name, SPEC_TYPES)}",
            )
        family = set(self.enabled) & set(DFLASH_TYPES)
        require(
            len(family) < 2,
            "--spec-type: draft-dflash, draft-dflash2, draft-dspark and draft-lilicorr "
            "cannot be combined",
        )
        require(
            self.synth_len is None or self.synth_rates is None,
            "--spec-synth-len, --spec-synth-rates: "
            "synthetic acceptance length and rates are mutually exclusive",
        )

    @property
    def enabled(self) -> tuple[str, ...]:
        """The spec types that are on, each once; `none` switches nothing off (flag notes, 2.1)."""
        return tuple(dict.fromkeys(name for name in self.types or () if name != "none"))

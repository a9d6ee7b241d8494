"""The sampler chain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.options.checks import check_finite, require

RANDOM_SEED = 2**32 - 1
"""The seed that means "draw one"; llama.cpp stores -1 this way."""

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""The filters of the sampler chain in their default order."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampler chain (reference: llama.cpp's `common/sampling.cpp`)."""

    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """Which filters run, in which order."""
    seed: int = RANDOM_SEED
    """Seed of all random streams; -1 = random."""
    ignore_eos: bool = False
    """Ban every end-of-generation token."""
    temp: float = 0.8
    """Temperature; 0 = always the best token."""
    top_k: int = 40
    """Keep the k best tokens; 0 or less = off."""
    top_p: float = 0.95
    """Keep the smallest set with this probability; 1 = off."""
    min_p: float = 0.05
    """Keep tokens with this share of the best one's probability; 0 = off."""
    top_n_sigma: float = -1.0
    """Keep logits within n standard deviations of the best; 0 or less = off."""
    typ_p: float = 1.0
    """Locally typical sampling; 1 = off."""
    xtc_probability: float = 0.0
    """Chance to drop the top choices; 0 = off."""
    xtc_threshold: float = 0.1
    """Probability that makes a token a top choice; above 0.5 = off."""
    repeat_last_n: int = 64
    """Window of the penalties in tokens; 0 = off."""
    repeat_penalty: float = 1.0
    """Divides (or multiplies) the logit of seen tokens; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of seen tokens."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence of a seen token."""
    dry_multiplier: float = 0.0
    """Strength of the DRY repetition penalty; 0 = off."""
    dry_base: float = 1.75
    """DRY: growth per repeated token."""
    dry_allowed_length: int = 2
    """DRY: repeats up to this length are free."""
    dry_penalty_last_n: int = 64
    """DRY: window in tokens; 0 = off."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """DRY: strings that end the look-back."""
    adaptive_target: float = -1.0
    """Adaptive-p: probability to aim at; negative = off."""
    adaptive_decay: float = 0.9
    """Adaptive-p: memory of the running mean."""
    dynatemp_range: float = 0.0
    """Half width of the entropy-driven temperature; 0 = off."""
    dynatemp_exponent: float = 1.0
    """Exponent of the entropy-driven temperature."""
    mirostat: int = 0
    """1 or 2 replaces the filters by temperature and Mirostat."""
    mirostat_eta: float = 0.1
    """Mirostat: learning rate."""
    mirostat_tau: float = 5.0
    """Mirostat: target surprise in bits."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Additions to single tokens' logits, (token id, bias)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temp", max(self.temp, 0.0))
        if self.dry_base < 1:  # as in llama.cpp, without a word
            object.__setattr__(self, "dry_base", 1.75)
        if self.seed == -1:
            object.__setattr__(self, "seed", RANDOM_SEED)
        require(
            0 <= self.seed <= RANDOM_SEED, f"--seed must be -1 or in 0..2^32-1, got {self.seed}"
        )
        require(not math.isnan(self.temp), "--temp must be a number")
        require(
            self.repeat_last_n >= 0,
            f"--repeat-last-n: invalid repeat-last-n = {self.repeat_last_n}",
        )
        require(
            self.dry_penalty_last_n >= 0,
            f"--dry-penalty-last-n: invalid dry-penalty-last-n = {self.dry_penalty_last_n}",
        )
        require(
            math.isfinite(self.repeat_penalty) and self.repeat_penalty > 0,
            "--repeat-penalty must be finite and greater than 0",
        )
        check_finite("--presence-penalty", self.presence_penalty)
        check_finite("--frequency-penalty", self.frequency_penalty)
        require(self.mirostat in (0, 1, 2), f"--mirostat must be 0, 1 or 2, got {self.mirostat}")
        require(
            0.0 <= self.adaptive_decay <= 0.99,
            f"--adaptive-decay must be between 0.0 and 0.99, got {self.adaptive_decay}",
        )
        require(
            self.adaptive_target <= 1.0,
            f"--adaptive-target must be at most 1, got {self.adaptive_target}",
        )

    @property
    def stateful(self) -> bool:
        """Whether a sampler updates itself from the token it drew (Mirostat, adaptive-p)."""
        return self.temp > 0 and (
            self.mirostat != 0 or ("adaptive_p" in self.samplers and self.adaptive_target >= 0)
        )

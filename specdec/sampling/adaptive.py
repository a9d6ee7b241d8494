"""Last steps of a chain that steer themselves by the tokens they drew: Mirostat and adaptive-p.

Their state follows every drawn token, so verification by rejection, which does not draw from the
chain, cannot be used with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specdec.sampling.candidates import Candidates, Floats


class Adaptive(Protocol):
    """The last step of a chain: what is drawn from, and what is learned from the draw."""

    def begin(self) -> None:
        """Forgets everything."""

    def apply(self, candidates: Candidates) -> Candidates:
        """The candidates to draw from; the state stays as it is."""

    def update(self, before: Candidates, after: Candidates, token: int) -> None:
        """Learns that ``token`` was drawn, where `apply` made ``after`` from ``before``."""


@dataclass(slots=True)
class _Mirostat:
    tau: float
    eta: float
    mu: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.mu = 2.0 * self.tau

    def update(self, before: Candidates, after: Candidates, token: int) -> None:
        surprise = -math.log2(max(after.probability_of(token), 1e-45))
        self.mu -= self.eta * (surprise - self.tau)


@dataclass(slots=True)
class Mirostat1(_Mirostat):
    """Mirostat (Basu et al. 2020, arXiv:2007.14966): a top-k whose k follows the surprise.

    k = (e * 2^mu / (1 - N^-e))^(1/s), e = s - 1, with s estimated from the 100 best tokens;
    after a draw mu -= eta * (surprise in bits - tau). mu starts at 2 tau.
    """

    n_vocab: int

    def apply(self, candidates: Candidates) -> Candidates:
        best = candidates.head(100)
        return candidates.head(self._k(best.logits[best.in_order()]))

    def _k(self, best: Floats) -> int:
        if len(best) < 2:
            return 1
        ranks = np.arange(1.0, len(best))
        t = np.log((ranks + 1) / ranks)
        b = best[:-1] - best[1:]  # ln(p_i / p_(i+1))
        s = float(t @ b / (t @ t))
        if s <= 0:
            return self.n_vocab
        e = s - 1
        log_n = math.log(self.n_vocab)
        # the quotient tends to 1 / ln N for e -> 0
        log_quotient = -math.log(log_n) if abs(e) < 1e-9 else math.log(e / -math.expm1(-e * log_n))
        log_k = (log_quotient + self.mu * math.log(2)) / s
        return self.n_vocab if log_k >= log_n else max(1, int(math.exp(log_k)))


@dataclass(slots=True)
class Mirostat2(_Mirostat):
    """Mirostat 2.0: tokens with more than mu bits of surprise are removed, the best one never."""

    def apply(self, candidates: Candidates) -> Candidates:
        logits, total = candidates.logits, float(candidates.weights().sum())
        mask = logits >= float(logits.max()) + math.log(total) - self.mu * math.log(2)
        return candidates.keep(mask) if mask.any() else candidates.head(1)


_PEAK_LOGIT = 5.0
_SHARPNESS = 10.0
_WIDTH = 0.3


@dataclass(slots=True)
class AdaptiveP:
    """Adaptive-p (llama.cpp's `llama_sampler_adaptive_p`): prefers tokens of a set probability.

    New logit 5 - 10 d^2 / (1 + d), d = abs(p - aim) / 0.3, where the aim is
    clip(2 target - mean, 0, 1) and the mean is that of the drawn tokens' original p with
    exponential weights decay^age, started as if it were at the target.
    """

    target: float
    decay: float
    _sum: float = field(init=False)
    _weight: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._weight = 1.0 / (1.0 - self.decay)
        self._sum = self.target * self._weight

    @property
    def aim(self) -> float:
        """The probability the next draw aims at."""
        return min(max(2 * self.target - self._sum / self._weight, 0.0), 1.0)

    def apply(self, candidates: Candidates) -> Candidates:
        distance = np.abs(candidates.probabilities() - self.aim) / _WIDTH
        logits = (_PEAK_LOGIT - _SHARPNESS * distance**2 / (1 + distance)).astype(np.float32)
        logits[candidates.logits == -np.inf] = -np.inf
        return candidates.with_logits(logits)

    def update(self, before: Candidates, after: Candidates, token: int) -> None:
        self._sum = before.probability_of(token) + self.decay * self._sum
        self._weight = 1.0 + self.decay * self._weight

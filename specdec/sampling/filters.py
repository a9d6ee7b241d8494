"""Filters that look at the logits only: candidates in, candidates out.

Each acts on what the filter before it left. Names, order of operations and edge cases are those
of llama.cpp's `llama-sampler.cpp`; a removed token is gone, also where llama.cpp keeps it in the
list at minus infinity. Values that switch a filter off are the caller's business.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from specdec.sampling.candidates import COLDEST, Candidates, Doubles, down_to, walk


def top_k(candidates: Candidates, k: int) -> Candidates:
    """The ``k`` largest logits; of equal ones the lower ids."""
    return candidates.head(k)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """The smallest head whose probability reaches ``p``, the token that reaches it included.

    Nucleus sampling: Holtzman et al. 2019, arXiv:1904.09751.
    """
    logits, weights = candidates.logits, candidates.weights()
    return candidates.keep(down_to(logits, walk(logits, weights, p, "left")))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Tokens with at least ``p`` times the probability of the best: logit >= max + ln p.

    ``p`` above 0; 1 or more leaves the best. Nguyen et al. 2024, arXiv:2407.01082.
    """
    logits = candidates.logits
    return candidates.keep(logits >= logits.max() + math.log(min(p, 1.0)))


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Tokens within ``n`` standard deviations (population form, finite logits) of the best.

    Tang et al. 2024, arXiv:2411.07641.
    """
    logits = candidates.logits
    if len(candidates) <= 1:
        return candidates
    deviation = float(logits[logits > -np.inf].std(dtype=np.float64))
    return candidates.keep(logits >= logits.max() - n * deviation)


def typical(candidates: Candidates, p: float) -> Candidates:
    """The tokens whose surprise is nearest to the entropy, until their probability exceeds ``p``.

    Locally typical sampling: Meister et al. 2022, arXiv:2202.00666.
    """
    logits, weights = candidates.logits, candidates.weights()
    total = float(weights.sum())
    # The surprise of a token is shift - logit.
    shift = float(logits.max()) + math.log(total)
    nearness = -np.abs(shift - _entropy(weights / total) - logits)
    return candidates.keep(down_to(nearness, walk(nearness, weights, p, "right")))


def xtc(
    candidates: Candidates, probability: float, threshold: float, generator: torch.Generator
) -> Candidates:
    """With ``probability``, all but the last of the tokens at or above ``threshold`` are removed.

    "Exclude top choices". One number is drawn whenever there are two candidates or more.
    """
    if threshold > 0.5 or len(candidates) < 2:
        return candidates
    if float(torch.rand((), generator=generator)) > probability:
        return candidates
    top = candidates.probabilities() >= threshold
    choices = np.flatnonzero(top)
    if len(choices) < 2:
        return candidates
    values = candidates.logits[choices]
    top[choices[np.flatnonzero(values == values.min())[-1]]] = False
    return candidates.keep(~top)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Logits divided by ``t``; 0 or less leaves the best token alone (the lowest id of equals).

    So does what is so close to 0 that quotients might leave float32.
    """
    if t < COLDEST:
        return candidates.head(1)
    return candidates.with_logits(candidates.logits / t)


def dynamic_temperature(
    candidates: Candidates, t: float, spread: float, exponent: float
) -> Candidates:
    """Logits divided by a temperature in ``t`` +- ``spread`` that grows with the entropy.

    T = Tmin + (Tmax - Tmin) * (entropy / ln N)^exponent, Tmin = max(0, t - spread).
    """
    n = np.count_nonzero(candidates.logits > -np.inf)
    if n <= 1:
        return candidates
    low = max(0.0, t - spread)
    share = max(0.0, _entropy(candidates.probabilities())) / math.log(n)
    return temperature(candidates, low + (t + spread - low) * share**exponent)


def _entropy(probabilities: Doubles) -> float:
    """In nats."""
    positive = probabilities[probabilities > 0]
    return -float(positive @ np.log(positive))

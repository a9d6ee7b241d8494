"""Mirostat and adaptive-p: what is left to draw from and how the state moves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdec.sampling import Candidates
from specdec.sampling.adaptive import AdaptiveP, Mirostat1, Mirostat2


def row(*probabilities: float) -> Candidates:
    return Candidates(np.log(np.array(probabilities, np.float32)))


def test_mirostat_2_removes_surprising_tokens() -> None:
    sampler = Mirostat2(tau=1.0, eta=0.1)  # mu = 2 bits
    tokens = row(0.5, 0.25, 0.15, 0.1)
    assert sampler.apply(tokens).token_ids().tolist() == [0, 1]
    sampler.mu = 0.5
    assert sampler.apply(tokens).token_ids().tolist() == [0]


def test_mirostat_mu_moves_by_the_surprise_among_the_kept() -> None:
    sampler = Mirostat2(tau=1.0, eta=0.1)
    tokens = row(0.5, 0.25, 0.15, 0.1)
    kept = sampler.apply(tokens)
    sampler.update(tokens, kept, 1)  # p = 1/3 of the kept
    assert sampler.mu == pytest.approx(2.0 - 0.1 * (math.log2(3) - 1.0), rel=1e-6)
    sampler.begin()
    assert sampler.mu == 2.0


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.3])
def test_mirostat_1_estimates_k_from_a_zipf_row(exponent: float) -> None:
    n = 1000
    logits = (-exponent * np.log(np.arange(1, n + 1))).astype(np.float32)
    sampler = Mirostat1(tau=3.0, eta=0.1, n_vocab=n)
    kept = sampler.apply(Candidates(logits))
    if exponent == 1.0:
        expected = 2**6.0 / math.log(n)
    else:
        e = exponent - 1
        expected = (e * 2**6.0 / (1 - n**-e)) ** (1 / exponent)
    assert abs(len(kept) - expected) <= 1
    assert kept.token_ids().tolist() == list(range(len(kept)))


def test_mirostat_1_copes_with_flat_and_single_rows() -> None:
    sampler = Mirostat1(tau=5.0, eta=0.1, n_vocab=50)
    assert len(sampler.apply(Candidates(np.zeros(50, np.float32)))) == 50
    only = np.full(50, -math.inf, np.float32)
    only[7] = 1.0
    assert sampler.apply(Candidates(only)).token_ids().tolist() == [7]


def test_adaptive_p_prefers_the_target_probability() -> None:
    sampler = AdaptiveP(target=0.3, decay=0.9)
    tokens = row(0.6, 0.3, 0.1)
    after = sampler.apply(tokens)
    assert sampler.aim == pytest.approx(0.3)
    expected = [5 - 10 * d * d / (1 + d) for d in (1.0, 0.0, 2 / 3)]
    assert after.logits.tolist() == pytest.approx(expected, abs=1e-4)


def test_adaptive_p_corrects_for_what_was_drawn() -> None:
    sampler = AdaptiveP(target=0.3, decay=0.5)  # sum 0.6, weight 2
    tokens = row(0.6, 0.3, 0.1)
    sampler.update(tokens, sampler.apply(tokens), 0)
    assert sampler.aim == pytest.approx(0.6 - (0.6 + 0.5 * 0.6) / (1 + 0.5 * 2), abs=1e-6)
    sampler.begin()
    assert sampler.aim == pytest.approx(0.3)


def test_adaptive_p_leaves_banned_tokens_banned() -> None:
    banned = Candidates(np.array([0.0, -2.0, -math.inf], np.float32))
    after = AdaptiveP(target=0.0, decay=0.9).apply(banned)
    assert after.logits[2] == -math.inf

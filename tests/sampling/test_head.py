"""Sampling from the best logits alone, against the chain that sees all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.options import SamplingOptions
from specdec.sampling import SamplerChain, build_chain
from specdec.sampling.head import Best, HeadSampler
from specdec.verify import Verifier

N_VOCAB = 500


def chain_of(**options: Any) -> SamplerChain:
    return build_chain(SamplingOptions(**options), n_vocab=N_VOCAB, end_tokens=frozenset({3}))


def best_of(logits: Tensor, n: int = 64) -> Best:
    order = logits.sort(descending=True, stable=True)
    ids, values = order.indices[:, :n], order.values[:, :n]
    return Best(n, ids.flatten().tolist(), values.flatten().tolist())


CHAINS: dict[str, dict[str, Any]] = {
    "default": {},
    "one": {"top_k": 1},
    "all": {"top_k": 64, "top_p": 1.0, "min_p": 0.0, "temp": 1.0},
    "narrow": {"top_p": 0.3, "temp": 0.2},
    "none of the probability": {"top_p": 0.0},
    "wide": {"top_p": 0.9999, "min_p": 1e-9, "temp": 5.0},
    "the best": {"min_p": 1.0},
    "cold": {"temp": 1e-31},
    "banned": {"ignore_eos": True, "logit_bias": ((7, -math.inf), (8, -math.inf))},
    "banned, greedy": {"ignore_eos": True, "temp": 0.0},
    "other order": {"samplers": ("top_k", "temperature", "min_p", "top_p")},
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("kind", ["different", "equal", "few values"])
def test_draws_are_those_of_the_whole_chain(name: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(len(name))
    logits = 3 * torch.randn(300, N_VOCAB, generator=generator)
    if kind == "equal":
        logits[:] = 1.5
    elif kind == "few values":
        logits = logits.round()
    whole, head = chain_of(seed=7, **CHAINS[name]), chain_of(seed=7, **CHAINS[name])
    assert head.head is not None
    expected = [whole.sample(row) for row in logits]
    best, found = best_of(logits), []
    for row in range(len(logits)):
        known = best.head(row, head.head.n)
        assert known is not None
        found.append(head.sample_head(*known))
    assert found == expected


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"samplers": ("top_p", "top_k", "temperature")},
        {"repeat_penalty": 1.1},
        {"typ_p": 0.9},
        {"xtc_probability": 0.5},
        {"dynatemp_range": 0.5},
        {"mirostat": 2},
        {"logit_bias": ((5, 1.0),)},
    ],
)
def test_other_chains_need_all_logits(options: dict[str, Any]) -> None:
    assert chain_of(**options).head is None


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("first", [0, -1])
@pytest.mark.parametrize("top_k", [40, 65])
def test_verification_emits_the_same_tokens(temp: float, first: int, top_k: int) -> None:
    """Also where the best are not known, or too few of them."""
    logits = torch.randn(40, N_VOCAB, generator=torch.Generator().manual_seed(1))
    best = best_of(logits)
    ids = list(best.ids)
    ids[:: 3 * best.n] = [first if first < 0 else token for token in ids[:: 3 * best.n]]
    best = Best(best.n, ids, best.logits)
    options = {"temp": temp, "top_k": top_k, "seed": 5}
    plain = Verifier(chain_of(**options), frozenset())
    drafted = [plain.verify(Draft(), row[None])[0] for row in logits]
    for draft in (Draft(drafted[:-1]), Draft([*drafted[:20], 0, *drafted[21:-1]])):
        verifier = Verifier(chain_of(**options), frozenset())
        emitted = verifier.verify(draft, logits, best)
        assert emitted == drafted[: len(emitted)]
        assert len(emitted) == (40 if draft.tokens == drafted[:-1] else 21)


def test_a_uniform_number_next_to_one_has_a_token() -> None:
    sampler = HeadSampler(2, [])
    assert sampler.draw([5, 6], [0.0, -30.0], math.nextafter(1.0, 0.0)) == 5
    assert sampler.draw([5, 6], [0.0, 0.0], math.nextafter(1.0, 0.0)) == 6

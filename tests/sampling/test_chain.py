"""The chain: options to filters, draws, seeds, and the text the penalties see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import UsageError
from specdec.options import DEFAULT_SAMPLERS, SamplingOptions
from specdec.sampler_names import SAMPLER_NAMES
from specdec.sampling import SAMPLERS, STREAMS, Candidates, SamplerChain, build_chain, stream_seed
from specdec.sampling.chain import host_rows

PLAIN: dict[str, Any] = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def chain_of(
    n_vocab: int = 50, end_tokens: frozenset[int] = frozenset(), **options: Any
) -> SamplerChain:
    suppressed = options.pop("suppressed", ())
    return build_chain(
        SamplingOptions(**{"seed": 1, **options}),
        n_vocab=n_vocab,
        end_tokens=end_tokens,
        suppressed=suppressed,
        encode=lambda text: [ord(letter) for letter in text],
        token_bytes=lambda token: bytes([token]),
    )


def some_logits(n: int = 50, rows: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * 3


def run(chain: SamplerChain, rows: torch.Tensor, prompt: tuple[int, ...] = ()) -> list[int]:
    chain.begin(prompt)
    tokens = []
    for logits in rows:
        tokens.append(chain.sample(logits))
        chain.accept(tokens[-1])
    return tokens


def test_every_name_has_a_row() -> None:
    assert {*SAMPLERS, "adaptive_p"} == set(SAMPLER_NAMES)


@given(
    st.permutations(SAMPLER_NAMES),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.integers(0, 50),
    st.integers(0, 10**6),
)
def test_distribution_sums_to_one_and_holds_what_is_sampled(
    samplers: list[str], mirostat: int, temp: float, top_k: int, seed: int
) -> None:
    chain = chain_of(
        samplers=tuple(samplers),
        mirostat=mirostat,
        temp=temp,
        top_k=top_k,
        seed=seed,
        typ_p=0.9,
        top_n_sigma=2.0,
        xtc_probability=1.0,
        repeat_penalty=1.3,
        dry_multiplier=0.8,
        adaptive_target=0.4,
        end_tokens=frozenset({3}),
    )
    chain.begin([1, 2, 3, 1, 2])
    logits = some_logits(seed=seed)[0]
    p = chain.distribution(logits)
    assert p.shape == logits.shape
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    assert p[chain.sample(logits)] > 0


def test_default_chain_by_hand() -> None:
    logits = torch.tensor([5.0, 4.0, 1.0, 3.5, -2.0])
    p = chain_of(5).distribution(logits)
    # top_p 0.95 keeps 0, 1 and 3 (0.64, 0.23, 0.14 of 1.01); min_p keeps them all
    expected = torch.zeros(5)
    kept = torch.tensor([0, 1, 3])
    expected[kept] = (logits[kept] / 0.8).softmax(0)
    assert torch.allclose(p, expected, atol=1e-6)


def test_order_of_filters_is_the_users() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    options = {**PLAIN, "temp": 0.5, "top_p": 0.6}
    before = chain_of(3, samplers=("top_p", "temperature"), **options).distribution(logits)
    after = chain_of(3, samplers=("temperature", "top_p"), **options).distribution(logits)
    assert (before > 0).tolist() == [True, True, False]
    assert (after > 0).tolist() == [True, False, False]


def test_half_precision_logits_are_widened() -> None:
    logits = some_logits().bfloat16()
    rows = host_rows(logits)
    assert rows.dtype == np.float32
    p = chain_of(**PLAIN).distribution(rows[0])
    assert torch.allclose(p, logits[0].float().softmax(0))


def test_rows_of_the_usual_type_are_not_copied() -> None:
    logits = some_logits()
    assert np.shares_memory(host_rows(logits), logits.numpy())


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        {"temp": 0.9},
        {"samplers": (*DEFAULT_SAMPLERS, "adaptive_p"), "adaptive_target": 0.2},
        {"mirostat": 2, "mirostat_tau": 2.0},
    ],
)
def test_sample_follows_distribution(options: dict[str, Any]) -> None:
    n, draws = 12, 2000
    logits = some_logits(n)[0] / 3
    chain = chain_of(n, seed=1234, **options)
    p = chain.distribution(logits).double()
    counts = torch.zeros(n)
    for _ in range(draws):
        if chain.stateful:
            chain._adaptive.begin()  # the same distribution each time
        counts[chain.sample(logits)] += 1
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * draws
    statistic = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_same_seed_same_tokens() -> None:
    rows = some_logits()
    first = run(chain_of(seed=5), rows)
    chain = chain_of(seed=5)
    assert run(chain, rows) == first
    assert run(chain, rows) == first  # begin starts all streams again
    assert run(chain_of(seed=6), rows) != first


def test_one_number_is_drawn_for_each_token() -> None:
    rows = some_logits()
    certain = rows.clone()
    certain[:20, 7] = 100.0
    assert run(chain_of(), certain)[20:] == run(chain_of(), rows)[20:]


def test_asking_for_the_distribution_draws_nothing() -> None:
    rows = some_logits()
    chain = chain_of()
    chain.begin(())
    tokens = []
    for logits in rows:
        chain.distribution(logits)
        tokens.append(chain.sample(logits))
    assert tokens == run(chain_of(), rows)


def test_xtc_does_not_share_the_stream_of_the_draw() -> None:
    rows = some_logits()
    rows[:, 0] += 30.0  # one top choice: xtc tosses its coin and changes nothing
    with_coin = run(chain_of(**PLAIN, xtc_probability=0.5), rows)
    assert with_coin == run(chain_of(**PLAIN), rows)


def test_random_seed_is_drawn_and_visible() -> None:
    rows = some_logits()
    chain = chain_of(seed=-1, **PLAIN)
    tokens = run(chain, rows)
    assert 0 <= chain.seed < 2**32 - 1
    assert run(chain_of(seed=chain.seed, **PLAIN), rows) == tokens
    used = chain.seed
    chain.begin(())
    assert chain.seed != used


def test_streams_of_one_seed_differ() -> None:
    assert stream_seed(7, "verifier") == 7 ^ 0x9E3779B9
    assert stream_seed(7, "draft") == 7 ^ 0x85EBCA6B
    assert len({stream_seed(7, purpose) for purpose in STREAMS}) == len(STREAMS)


@pytest.mark.parametrize(
    ("options", "greedy"),
    [
        ({"temp": 0.0}, True),
        ({"temp": -1.0}, True),
        ({"temp": 0.0, "mirostat": 2}, True),
        ({"temp": 0.0, "dry_multiplier": 0.5, "dry_penalty_last_n": 0}, True),
        ({"temp": 0.5}, False),
        ({"temp": 0.0, "repeat_penalty": 1.1}, False),
        ({"temp": 0.0, "dry_multiplier": 0.5}, False),
        ({"temp": 0.0, "logit_bias": ((1, 1.0),)}, False),
        ({"temp": 0.0, "suppressed": (4,)}, False),
        ({"temp": 0.0, "xtc_probability": 0.5}, False),
        ({"temp": 0.0, "typ_p": 0.5}, False),
        ({"temp": 0.0, "dynatemp_range": 0.5}, False),
        ({"temp": 0.0, "samplers": ("top_k",)}, False),
    ],
)
def test_greedy(options: dict[str, Any], greedy: bool) -> None:
    chain = chain_of(**options)
    assert chain.greedy == greedy
    logits = some_logits()[0]
    if greedy:
        assert chain.sample(logits) == int(logits.argmax())
        assert chain.distribution(logits)[logits.argmax()] == 1


@pytest.mark.parametrize(
    ("options", "stateful"),
    [
        ({}, False),
        ({"mirostat": 1}, True),
        ({"mirostat": 2}, True),
        ({"samplers": ("adaptive_p",), "adaptive_target": 0.5}, True),
        ({"samplers": ("adaptive_p",)}, False),
        ({"adaptive_target": 0.5}, False),
    ],
)
def test_stateful(options: dict[str, Any], stateful: bool) -> None:
    assert chain_of(**options).stateful == stateful


def test_penalties_see_the_prompt_and_accepted_tokens_only() -> None:
    logits = torch.tensor([2.0, 1.9, 1.0])
    chain = chain_of(3, temp=0.0, repeat_penalty=4.0, repeat_last_n=2)
    chain.begin([0])
    assert chain.sample(logits) == 1
    assert chain.sample(logits) == 1  # sampled, not accepted
    chain.accept(1)
    assert chain.sample(logits) == 2
    chain.accept(2)  # 0 has left the window
    assert chain.sample(logits) == 0


def test_dry_runs_in_the_chain() -> None:
    chain = chain_of(temp=0.0, dry_multiplier=5.0, dry_sequence_breakers=("\n",))
    logits = torch.zeros(50)
    logits[[3, 4]] = torch.tensor([2.0, 1.0])
    chain.begin([1, 2, 3, 9, 1, 2])
    assert chain.sample(logits) == 4
    chain.begin([1, 2, 3, 9, 1, 10, 2])  # token 10 is the newline
    assert chain.sample(logits) == 3


def test_bias_comes_first_and_bans_end_tokens() -> None:
    logits = torch.zeros(50)
    chain = chain_of(
        temp=1.0,
        top_k=1,
        logit_bias=((8, 1.0), (8, 1.0), (9, 1.5)),
        ignore_eos=True,
        end_tokens=frozenset({8, 70}),
    )
    assert chain.sample(logits) == 9
    assert chain_of(temp=0.0, suppressed=(0, 1)).sample(logits) == 2


def test_mirostat_replaces_the_filters() -> None:
    logits = some_logits()[0]
    p = chain_of(mirostat=2, mirostat_tau=50.0, top_k=1, temp=0.7).distribution(logits)
    assert torch.allclose(p, (logits / 0.7).softmax(0), atol=1e-6)


def test_mirostat_learns_from_each_draw() -> None:
    chain = chain_of(mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5)
    logits = torch.zeros(50)
    logits[4] = 9.0  # hardly a surprise: mu rises, the tail comes in
    narrow = int((chain.distribution(logits) > 0).sum())
    for _ in range(40):
        chain.sample(logits)
    assert int((chain.distribution(logits) > 0).sum()) > narrow
    chain.begin(())
    assert int((chain.distribution(logits) > 0).sum()) == narrow


def test_bad_options_are_named() -> None:
    with pytest.raises(UsageError, match="--logit-bias: token 50 is not in the vocabulary"):
        chain_of(logit_bias=((50, 1.0),))
    with pytest.raises(UsageError, match="--logit-bias: the bias of token 3"):
        chain_of(logit_bias=((3, math.inf),))
    with pytest.raises(UsageError, match="--samplers: unknown sampler: topk"):
        chain_of(samplers=("topk",))


def test_large_rows_agree_with_small_ones() -> None:
    logits = torch.full((5000,), -30.0)
    logits[4000:4050] = some_logits()[0]
    for options in (PLAIN, {"top_k": 0}, {"temp": 2.0}, {"mirostat": 1}):
        large = chain_of(5000, **options).distribution(logits)[4000:4050]
        small = Candidates(logits.numpy()).head(1)
        assert float(large.sum()) == pytest.approx(1.0, abs=1e-4)
        assert int(large.argmax()) + 4000 == int(small.token_ids()[0])

"""Verification case by case; `contracts/test_rejection.py` tests the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafters.base import Candidates, Draft
from specdec.errors import UsageError
from specdec.options import SamplingOptions, SpecOptions
from specdec.sampling import SamplerChain, build_chain
from specdec.verify import Verifier, synthetic_rates

N_VOCAB = 8
END = 7
ENDS = frozenset({END})
GREEDY = SamplingOptions(temp=0)
SAMPLED = SamplingOptions(temp=1.0, seed=4, samplers=("temperature",))


def chain_of(options: SamplingOptions) -> SamplerChain:
    return build_chain(options, n_vocab=N_VOCAB, end_tokens=ENDS)


def scores(*best: int) -> Tensor:
    """Logits [len(best), N_VOCAB] that are sure of one token a row."""
    return 100.0 * torch.nn.functional.one_hot(torch.tensor(best), N_VOCAB).float()


class Recording:
    """A chain that lists what it is asked to accept."""

    def __init__(self, chain: SamplerChain) -> None:
        self.chain = chain
        self.accepted: list[int] = []
        self.n_sampled = 0
        self.greedy, self.stateful, self.seed = chain.greedy, chain.stateful, chain.seed

    def accept(self, token: int) -> None:
        self.accepted.append(token)
        self.chain.accept(token)

    def sample(self, logits: Tensor) -> int:
        self.n_sampled += 1
        return self.chain.sample(logits)

    def distribution(self, logits: Tensor) -> Tensor:
        return self.chain.distribution(logits)


def certain(tokens: list[int]) -> Candidates:
    """The q of a draft that was sure of its tokens."""
    return Candidates(torch.tensor(tokens)[:, None], torch.ones(len(tokens), 1))


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
class TestMatching:
    def test_all_tokens_match(self, options: SamplingOptions) -> None:
        verifier = Verifier(chain_of(options), ENDS)
        assert verifier.verify(Draft([1, 2, 3]), scores(1, 2, 3, 4)) == [1, 2, 3, 4]

    def test_the_first_difference_is_corrected(self, options: SamplingOptions) -> None:
        verifier = Verifier(chain_of(options), ENDS)
        assert verifier.verify(Draft([1, 5, 3]), scores(1, 2, 3, 4)) == [1, 2]
        assert verifier.verify(Draft([5, 2, 3]), scores(1, 2, 3, 4)) == [1]

    def test_an_empty_draft_gives_one_token(self, options: SamplingOptions) -> None:
        assert Verifier(chain_of(options), ENDS).verify(Draft(), scores(6)) == [6]

    def test_nothing_follows_an_end_token_in_the_draft(self, options: SamplingOptions) -> None:
        verifier = Verifier(chain_of(options), ENDS)
        assert verifier.verify(Draft([1, END, 3]), scores(1, END, 3, 4)) == [1, END]

    def test_an_end_token_as_last_drafted_one_has_a_bonus(self, options: SamplingOptions) -> None:
        """As in llama.cpp; the loop throws the bonus away."""
        verifier = Verifier(chain_of(options), ENDS)
        assert verifier.verify(Draft([1, END]), scores(1, END, 3)) == [1, END, 3]

    def test_the_chain_accepts_what_is_emitted(self, options: SamplingOptions) -> None:
        chain = Recording(chain_of(options))
        emitted = Verifier(chain, ENDS).verify(Draft([1, 5, 3]), scores(1, 2, 3, 4))
        assert chain.accepted == emitted == [1, 2]


@given(st.lists(st.integers(0, N_VOCAB - 1), max_size=6), st.integers(0, 1000))
def test_matching_emits_the_tokens_of_plain_sampling(drafted: list[int], seed: int) -> None:
    options = SamplingOptions(temp=1.5, seed=seed, repeat_penalty=1.3)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(drafted) + 1, N_VOCAB, generator=generator)
    plain_chain = chain_of(options)
    plain: list[int] = []
    for row in logits:
        plain.append(plain_chain.sample(row))
        plain_chain.accept(plain[-1])
    emitted = Verifier(chain_of(options), frozenset()).verify(Draft(drafted), logits)
    assert emitted == plain[: len(emitted)]
    assert emitted[:-1] == drafted[: len(emitted) - 1]
    assert len(emitted) == len(drafted) + 1 or emitted[-1] != drafted[len(emitted) - 1]


class TestRejection:
    def test_a_token_that_p_prefers_is_accepted(self) -> None:
        verifier = Verifier(chain_of(SAMPLED), ENDS)
        draft = Draft([1, 2], certain([1, 2]))
        assert verifier.verify(draft, scores(1, 2, 3)) == [1, 2, 3]

    def test_a_token_with_no_probability_is_replaced_by_one_of_the_rest(self) -> None:
        verifier = Verifier(chain_of(SAMPLED), ENDS)
        draft = Draft([1, 2], certain([1, 2]))
        assert verifier.verify(draft, scores(1, 5, 3)) == [1, 5]

    def test_a_token_outside_its_own_candidates_is_refused(self) -> None:
        verifier = Verifier(chain_of(SAMPLED), ENDS)
        assert verifier.verify(Draft([1], certain([2])), scores(1, 3)) == [1]

    def test_where_rounding_leaves_nothing_the_target_decides(self) -> None:
        """p equals q but for the drafted token, which the draft left out of q."""
        q = Candidates(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]))
        p = torch.full((2, N_VOCAB), -math.inf)
        p[:, :2] = 0.0
        assert Verifier(chain_of(SAMPLED), ENDS).verify(Draft([2], q), p)[0] in (0, 1)

    def test_nothing_follows_an_end_token(self) -> None:
        verifier = Verifier(chain_of(SAMPLED), ENDS)
        draft = Draft([1, END, 2], certain([1, END, 2]))
        assert verifier.verify(draft, scores(1, END, 2, 3)) == [1, END]

    def test_the_chain_accepts_what_is_emitted(self) -> None:
        chain = Recording(chain_of(SAMPLED))
        draft = Draft([1, 2], certain([1, 2]))
        assert chain.accepted == []
        assert Verifier(chain, ENDS).verify(draft, scores(1, 5, 3)) == chain.accepted == [1, 5]

    def test_the_same_seed_gives_the_same_tokens(self) -> None:
        logits = torch.randn(4, N_VOCAB, generator=torch.Generator().manual_seed(1))
        q = Candidates(torch.arange(N_VOCAB).repeat(3, 1), torch.full((3, N_VOCAB), 1 / N_VOCAB))
        runs = [
            [Verifier(chain_of(SAMPLED), ENDS).verify(Draft([1, 2, 3], q), logits)]
            for _ in range(2)
        ]
        assert runs[0] == runs[1]

    @pytest.mark.parametrize(
        "options",
        [GREEDY, SamplingOptions(temp=1.0, mirostat=2, seed=1)],
        ids=["temperature 0", "mirostat"],
    )
    def test_matching_takes_its_place(self, options: SamplingOptions) -> None:
        """There rejection would accept token 1, which q makes unlikely and p possible."""
        logits = torch.zeros(2, N_VOCAB)
        logits[:, 0] = 0.01
        q = Candidates(torch.tensor([[1, 2]]), torch.tensor([[0.001, 0.999]]))
        chain = chain_of(options)
        expected = chain_of(options).sample(logits[0])
        assert Verifier(chain, ENDS).verify(Draft([1], q), logits)[0] == expected != 1


class TestSynthetic:
    N_TRIALS = 3000

    def accepted(
        self, rates: tuple[float, ...], drafted: list[int], n_trials: int = 30
    ) -> list[int]:
        verifier = Verifier(chain_of(SAMPLED), ENDS, rates=rates)
        logits = scores(*[0] * (len(drafted) + 1))
        return [len(verifier.verify(Draft(drafted), logits)) - 1 for _ in range(n_trials)]

    def test_rates_are_met_position_by_position(self) -> None:
        rates = (0.8, 0.5, 0.1)
        lengths = self.accepted(rates, [1, 2, 3], self.N_TRIALS)
        for position, rate in enumerate(rates):
            found = sum(length > position for length in lengths) / self.N_TRIALS
            assert abs(found - rate) < 4 * math.sqrt(rate * (1 - rate) / self.N_TRIALS)

    def test_a_length_is_met_on_average(self) -> None:
        rates = synthetic_rates(SpecOptions(synth_len=2.5), 3)
        assert rates is not None
        mean = 1 + sum(self.accepted(rates, [1, 2, 3], self.N_TRIALS)) / self.N_TRIALS
        assert abs(mean - 2.5) < 0.08

    def test_rates_of_zero_and_one(self) -> None:
        assert set(self.accepted((1.0, 0.0, 0.0), [1, 2, 3])) == {1}
        assert set(self.accepted((1.0, 1.0, 1.0), [1, 2, 3])) == {3}

    def test_a_drafted_end_token_is_never_accepted(self) -> None:
        assert set(self.accepted((1.0, 1.0, 1.0), [1, END, 3])) == {1}

    def test_a_refused_token_gives_way_to_the_targets(self) -> None:
        verifier = Verifier(chain_of(GREEDY), ENDS, rates=(0.0,))
        assert verifier.verify(Draft([1]), scores(5, 6)) == [5]

    def test_the_chain_samples_at_every_position(self) -> None:
        chain = Recording(chain_of(GREEDY))
        emitted = Verifier(chain, ENDS, rates=(1.0, 1.0)).verify(Draft([1, 2]), scores(5, 6, 4))
        assert emitted == chain.accepted == [1, 2, 4]
        assert chain.n_sampled == 3

    def test_positions_past_the_rates_are_refused(self) -> None:
        assert set(self.accepted((1.0,), [1, 2])) == {1}


class TestSyntheticRates:
    def test_without_the_options_there_are_none(self) -> None:
        assert synthetic_rates(SpecOptions(), 3) is None

    @given(st.integers(1, 16), st.floats(0, 1))
    def test_powers_of_p_add_up_to_the_length(self, n_max: int, share: float) -> None:
        length = 1 + share * n_max
        rates = synthetic_rates(SpecOptions(synth_len=length), n_max)
        assert rates is not None
        assert len(rates) == n_max
        assert abs(1 + sum(rates) - length) < 1e-4 * n_max
        assert rates == pytest.approx([rates[0] ** i for i in range(1, n_max + 1)])

    def test_given_rates_are_used_as_they_are(self) -> None:
        options = SpecOptions(synth_rates=(0.9, 0.9, 0.0))
        assert synthetic_rates(options, 3) == (0.9, 0.9, 0.0)

    @pytest.mark.parametrize(
        ("options", "n_max", "text"),
        [
            (
                SpecOptions(synth_len=2.0),
                0,
                "synthetic acceptance requires at least one speculative token",
            ),
            (
                SpecOptions(synth_rates=(0.5, 0.4)),
                3,
                "synthetic acceptance rates must contain 3 values, got 2",
            ),
            (
                SpecOptions(synth_rates=(0.5, math.nan)),
                2,
                "synthetic acceptance rates must be finite and within [0, 1]",
            ),
            (
                SpecOptions(synth_rates=(1.5, 0.4)),
                2,
                "synthetic acceptance rates must be finite and within [0, 1]",
            ),
            (
                SpecOptions(synth_rates=(0.4, 0.5)),
                2,
                "synthetic acceptance rates must be monotonically non-increasing",
            ),
            (
                SpecOptions(synth_len=4.5),
                3,
                "synthetic acceptance length must be finite and within [1, 4]",
            ),
            (
                SpecOptions(synth_len=0.5),
                3,
                "synthetic acceptance length must be finite and within [1, 4]",
            ),
            (
                SpecOptions(synth_len=math.nan),
                3,
                "synthetic acceptance length must be finite and within [1, 4]",
            ),
        ],
    )
    def test_errors_have_llama_cpps_words(
        self, options: SpecOptions, n_max: int, text: str
    ) -> None:
        with pytest.raises(UsageError) as info:
            synthetic_rates(options, n_max)
        assert text in str(info.value)
        assert str(info.value).startswith("--spec-synth-")

    def test_length_and_rates_exclude_each_other(self) -> None:
        with pytest.raises(UsageError, match="length and rates are mutually exclusive"):
            SpecOptions(synth_len=2.0, synth_rates=(0.5,))

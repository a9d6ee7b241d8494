"""Rejection sampling emits the target's distribution p, whatever the draft's q is.

Chi-square tests with fixed seeds. The acceptance probability must be sum(min(p, q)); and the test
itself is tested: a draft whose token does not come from the q it claims must fail it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from contracts.cases import CASES as DRAFTERS
from contracts.cases import N_CTX, Case, build, tiny_target
from torch import Tensor

from specdec.drafters.base import Candidates, Draft, DraftSampler, as_candidates
from specdec.generate import Limits, decode
from specdec.options import DraftOptions, SamplingOptions
from specdec.sampling import SamplerChain, build_chain
from specdec.verify import Verifier

N_VOCAB = 6
N_TRIALS = 2000
PLAIN = SamplingOptions(temp=1.0, seed=3, samplers=("temperature",))
FILTERED = SamplingOptions(temp=0.8, seed=3, top_k=4, top_p=0.9, min_p=0.1)


def distribution(seed: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(N_VOCAB, generator=generator)).softmax(0)


def point(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), N_VOCAB).float()


def chi_square(counts: Tensor, p: Tensor) -> float:
    """The probability of counts as far from p as these or farther; 0 if p rules one out."""
    if counts[p == 0].sum() > 0:
        return 0.0
    counts, p = counts[p > 0].double(), p[p > 0].double()
    expected = p * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(p) - 1) / 2, dtype=torch.float64)
    return 1.0 if len(p) == 1 else float(torch.special.gammaincc(freedom, statistic / 2))


def candidates(q: Tensor, rows: int = 1) -> Candidates:
    return Candidates(torch.arange(N_VOCAB).repeat(rows, 1), q.repeat(rows, 1))


def new_chain(options: SamplingOptions) -> SamplerChain:
    return build_chain(options, n_vocab=N_VOCAB, end_tokens=frozenset())


def emit(p: Tensor, q: Tensor, options: SamplingOptions, pick: Callable[[], int]) -> list[int]:
    """What rounds with one drafted token emit first; a bonus token is left out."""
    chain = new_chain(options)
    verifier = Verifier(chain, frozenset())
    logits = p.log().repeat(2, 1)
    return [verifier.verify(Draft([pick()], candidates(q)), logits)[0] for _ in range(N_TRIALS)]


def draw_from(q: Tensor, seed: int = 17) -> Callable[[], int]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: int(torch.multinomial(q, 1, generator=generator))


HALVES = (torch.tensor([0.5, 0.3, 0.2, 0, 0, 0]), torch.tensor([0, 0, 0, 0.1, 0.2, 0.7]))
PAIRS = {
    "random": (distribution(1), distribution(2)),
    "another": (distribution(3, 0.5), distribution(4, 2.5)),
    "sharp p": (distribution(5, 4.0), distribution(6, 0.5)),
    "equal": (distribution(7), distribution(7)),
    "disjoint": HALVES,
    "overlapping": ((HALVES[0] + distribution(8)) / 2, HALVES[0]),
    "q is a point": (distribution(9), point(2)),
    "p is a point": (point(4), distribution(10)),
    "both are the same point": (point(1), point(1)),
}


@pytest.mark.parametrize("options", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize("name", PAIRS)
def test_the_emitted_token_has_the_targets_distribution(
    name: str, options: SamplingOptions
) -> None:
    raw, q = PAIRS[name]
    p = new_chain(options).distribution(raw.log())
    counts = torch.bincount(torch.tensor(emit(raw, q, options, draw_from(q))), minlength=N_VOCAB)
    assert chi_square(counts, p) > 1e-3


@pytest.mark.parametrize("name", PAIRS)
def test_the_acceptance_probability_is_the_overlap(name: str) -> None:
    p, q = PAIRS[name]
    verifier = Verifier(new_chain(PLAIN), frozenset())
    pick, logits = draw_from(q), p.log().repeat(2, 1)
    drafts = [Draft([pick()], candidates(q)) for _ in range(N_TRIALS)]
    accepted = sum(len(verifier.verify(draft, logits)) == 2 for draft in drafts) / N_TRIALS
    overlap = float(torch.minimum(p, q).sum())
    assert abs(accepted - overlap) <= 4 * math.sqrt(overlap * (1 - overlap) / N_TRIALS) + 1e-6


def test_a_token_that_is_not_drawn_from_its_q_is_found_out() -> None:
    """The classic mistake: the token is the argmax, q is the softmax."""
    p, q = PAIRS["random"]
    best = int(q.argmax())
    counts = torch.bincount(torch.tensor(emit(p, q, PLAIN, lambda: best)), minlength=N_VOCAB)
    assert chi_square(counts, p) < 1e-9


def test_swapping_p_and_q_is_found_out() -> None:
    p, q = PAIRS["random"]
    counts = torch.bincount(torch.tensor(emit(q, p, PLAIN, draw_from(p))), minlength=N_VOCAB)
    assert chi_square(counts, p) < 1e-9


def test_two_steps_have_the_joint_distribution() -> None:
    """Rounds are put end to end; the pairs of the long text are independent draws from p."""
    p, q = PAIRS["random"]
    verifier, pick = Verifier(new_chain(PLAIN), frozenset()), draw_from(q)
    logits, text = p.log().repeat(3, 1), []
    while len(text) < 2 * N_TRIALS:
        text += verifier.verify(Draft([pick(), pick()], candidates(q, 2)), logits)
    pairs = torch.tensor(text[: 2 * N_TRIALS]).view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * N_VOCAB + pairs[:, 1], minlength=N_VOCAB**2)
    assert chi_square(counts, torch.outer(p, p).flatten()) > 1e-3


def test_penalties_see_the_accepted_tokens_of_the_block() -> None:
    """The second row's p depends on the first emitted token."""
    raw, q = PAIRS["random"]
    pick, logits = draw_from(q), raw.log().repeat(3, 1)
    counts = torch.zeros(N_VOCAB, N_VOCAB)
    for seed in range(N_TRIALS):
        options = SamplingOptions(
            temp=1.0, seed=seed, samplers=("penalties", "temperature"), presence_penalty=2.0
        )
        chain = new_chain(options)
        emitted = Verifier(chain, frozenset()).verify(
            Draft([pick(), pick()], candidates(q, 2)), logits
        )
        if len(emitted) == 1:  # the next round would go on like this
            emitted.append(chain.sample(logits[0]))
        counts[emitted[0], emitted[1]] += 1
    second = torch.stack([(raw.log() - 2.0 * point(first)).softmax(0) for first in range(N_VOCAB)])
    assert chi_square(counts.flatten(), (raw[:, None] * second).flatten()) > 1e-3


def test_candidates_that_leave_out_most_of_the_vocabulary() -> None:
    """q is zero outside its candidates, in any order of ids."""
    p, ids = PAIRS["random"][0], torch.tensor([[4, 1]])
    q = torch.tensor([[0.25, 0.75]])
    verifier, pick = Verifier(new_chain(PLAIN), frozenset()), draw_from(q[0])
    logits = p.log().repeat(2, 1)
    tokens = [
        verifier.verify(Draft([int(ids[0, pick()])], Candidates(ids, q)), logits)[0]
        for _ in range(N_TRIALS)
    ]
    assert chi_square(torch.bincount(torch.tensor(tokens), minlength=N_VOCAB), p) > 1e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_the_draft_sampler_draws_from_the_q_it_reports(seed: int) -> None:
    options = SamplingOptions(temp=0.7, seed=seed, samplers=("temperature",))
    sampler = DraftSampler(DraftOptions(sampling="probabilistic"), options)
    draft_logits, raw = distribution(20).log(), distribution(21)
    verifier = Verifier(new_chain(options), frozenset())
    logits, tokens = raw.log().repeat(2, 1), []
    for _ in range(N_TRIALS):
        pick = sampler.pick(draft_logits)
        tokens.append(verifier.verify(Draft([pick.token], as_candidates([pick])), logits)[0])
    p = (raw.log() / 0.7).softmax(0)
    assert chi_square(torch.bincount(torch.tensor(tokens), minlength=N_VOCAB), p) > 1e-3


@pytest.mark.parametrize("case", [case for case in DRAFTERS if case.sampled], ids=lambda c: c.id)
def test_a_sampled_drafter_end_to_end(case: Case) -> None:
    """The first token that a real draft was made for, over many seeds, against the target's p.

    Only the ten best tokens are kept, so that the counts are large.
    """
    target, prompt = tiny_target(case.target), [70, 71, 72]
    options = SamplingOptions(temp=1.0, samplers=("top_k", "temperature"), top_k=10, seed=0)
    cache = target.new_cache(N_CTX)
    logits = target(torch.tensor(prompt), cache, logit_rows=1).logits[0]
    p = build_chain(options, n_vocab=len(logits), end_tokens=frozenset()).distribution(logits)
    drafter, counts, n_drafted = build(case, 2), torch.zeros(len(logits)), 0
    for seed in range(150):
        seeded = SamplingOptions(temp=1.0, samplers=options.samplers, top_k=10, seed=seed)
        chain = build_chain(seeded, n_vocab=len(logits), end_tokens=frozenset())
        drafter.begin(seeded)
        cache.truncate(0)
        verifier = Verifier(chain, frozenset())
        done = next(decode(target, cache, drafter, verifier, prompt, Limits(N_CTX)))
        n_drafted += len(done.draft.tokens)
        counts[done.tokens[0]] += 1
    assert n_drafted == 300
    assert chi_square(counts, p) > 1e-3

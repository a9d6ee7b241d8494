"""Verified by matching, the output is that of plain decoding, token for token, for every drafter.

At any temperature: each emitted token is drawn by the target's own chain, one draw a position.
"""

from __future__ import annotations

import pytest
from contracts.cases import (
    CASES,
    DETERMINISTIC,
    N_CTX,
    PROMPT,
    WITHOUT_FILE,
    Case,
    build,
    name,
    tiny_target,
)
from fakes import ScriptedTarget
from tiny import END, N_VOCAB

from specdec.drafters import DRAFTERS
from specdec.drafters.base import FirstOf
from specdec.generate import Finish, Limits, decode
from specdec.options import SamplingOptions
from specdec.sampling import build_chain
from specdec.stats import Statistics
from specdec.verify import Verifier

SAMPLING = {
    "greedy": SamplingOptions(temp=0),
    "seeded": SamplingOptions(temp=0.3, seed=11),
    "penalties": SamplingOptions(
        temp=0.3, seed=12, repeat_penalty=1.3, repeat_last_n=8, frequency_penalty=0.2
    ),
    "mirostat": SamplingOptions(temp=0.5, seed=13, mirostat=2, mirostat_tau=2.0),
}


def run(
    target: object,
    drafter: FirstOf,
    sampling: SamplingOptions,
    limits: Limits,
    prompt: list[int] = PROMPT,
) -> tuple[list[int], Finish | None, Statistics]:
    chain = build_chain(sampling, n_vocab=N_VOCAB, end_tokens=limits.end_tokens)
    chain.begin(prompt)
    drafter.begin(sampling)
    tokens, finish, statistics = [], None, Statistics()
    cache = target.new_cache(limits.n_ctx)
    verifier = Verifier(chain, limits.end_tokens)
    for done in decode(target, cache, drafter, verifier, prompt, limits):
        statistics.add(done)
        tokens += done.tokens
        finish = done.finish
    assert cache.length == len(prompt) + len(tokens) - 1
    return tokens, finish, statistics


def agree(
    target: object,
    case: Case,
    n_max: int,
    sampling: SamplingOptions,
    limits: Limits,
    prompt: list[int] = PROMPT,
) -> Statistics:
    """Fails unless drafting changes nothing; the statistics of the drafting run."""
    plain = run(target, FirstOf([]), sampling, limits, prompt)
    drafted = run(target, build(case, n_max), sampling, limits, prompt)
    assert drafted[:2] == plain[:2]
    return drafted[2]


def cycle(text: list[int]) -> int:
    """A long period with a deviation now and then."""
    return 90 if len(text) % 23 == 0 else (70, 71, 72, 73, 74)[len(text) % 5]


def scripted() -> ScriptedTarget:
    return ScriptedTarget(cycle, N_VOCAB)


def test_every_spec_type_without_a_file_has_a_row() -> None:
    wanted = {name for name in DRAFTERS if not name.startswith("draft-")}
    assert wanted == {name for case in WITHOUT_FILE for name in case.types}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("case", DETERMINISTIC, ids=name)
def test_real_target(case: Case, sampling: SamplingOptions) -> None:
    statistics = agree(tiny_target(case.target), case, 4, sampling, Limits(N_CTX, n_predict=40))
    assert statistics.drafted > 0


@pytest.mark.parametrize("case", DETERMINISTIC, ids=name)
def test_other_architecture(case: Case) -> None:
    limits = Limits(N_CTX, n_predict=40)
    agree(tiny_target("qwen3"), case, 4, SAMPLING["greedy"], limits)


@pytest.mark.parametrize("n_max", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("case", DETERMINISTIC, ids=name)
def test_every_draft_length(case: Case, n_max: int) -> None:
    statistics = agree(tiny_target(case.target), case, n_max, SAMPLING["seeded"], Limits(N_CTX, 16))
    assert statistics.drafted >= statistics.accepted


@pytest.mark.parametrize("n_max", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("case", WITHOUT_FILE, ids=name)
def test_scripted_target(case: Case, n_max: int) -> None:
    statistics = agree(scripted(), case, n_max, SAMPLING["greedy"], Limits(N_CTX, n_predict=120))
    assert 0 < statistics.accepted < statistics.drafted
    assert statistics.emitted == 120


@pytest.mark.parametrize("case", WITHOUT_FILE, ids=name)
def test_every_limit(case: Case) -> None:
    """Blocks end at the token limit wherever it falls."""
    for n_predict in range(1, 20):
        limits = Limits(N_CTX, n_predict=n_predict)
        statistics = agree(scripted(), case, 5, SAMPLING["greedy"], limits)
        assert statistics.emitted == n_predict


@pytest.mark.parametrize("case", WITHOUT_FILE, ids=name)
def test_every_context_length(case: Case) -> None:
    """Blocks end at the context's end wherever it falls."""
    for n_ctx in range(len(PROMPT) + 1, len(PROMPT) + 20):
        statistics = agree(scripted(), case, 5, SAMPLING["greedy"], Limits(n_ctx))
        assert statistics.emitted == n_ctx - len(PROMPT)


@pytest.mark.parametrize("case", DETERMINISTIC, ids=name)
def test_end_token_anywhere(case: Case) -> None:
    """Each token of a plain reply in turn ends it, so the end falls on every slot of a block."""
    greedy = SAMPLING["greedy"]
    plain, _, _ = run(tiny_target(case.target), FirstOf([]), greedy, Limits(N_CTX, n_predict=12))
    drafter = build(case)
    for token in dict.fromkeys(plain):
        limits = Limits(N_CTX, n_predict=12, end_tokens=frozenset({token}))
        reply, finish, _ = run(tiny_target(case.target), drafter, greedy, limits)
        assert reply == plain[: plain.index(token) + 1]
        assert finish is Finish.STOP


@pytest.mark.parametrize("case", WITHOUT_FILE, ids=name)
def test_end_token_in_the_middle_of_a_draft(case: Case) -> None:
    """The prompt teaches the end token, so drafts run across it."""
    period = [80, 81, END, 82, 83, 84]
    target = ScriptedTarget(lambda text: period[len(text) % 6], N_VOCAB)
    for extra in range(6):
        prompt = period * 4 + period[:extra]
        limits = Limits(N_CTX, n_predict=30, end_tokens=frozenset({END}))
        agree(target, case, 5, SAMPLING["greedy"], limits, prompt)


def test_a_perfect_draft_is_accepted_whole() -> None:
    case = next(case for case in CASES if case.id == "draft-simple-perfect")
    statistics = agree(tiny_target(), case, 4, SAMPLING["greedy"], Limits(N_CTX, n_predict=50))
    assert statistics.acceptance_rate == 1.0
    assert statistics.acceptance_length == 5.0


LUCKY = [case.id for case in CASES if case.id.endswith("-lucky")]


@pytest.mark.parametrize("id_", LUCKY)
def test_a_lucky_draft_is_accepted_now_and_then(id_: str) -> None:
    case = next(case for case in CASES if case.id == id_)
    statistics = agree(tiny_target(), case, 4, SAMPLING["greedy"], Limits(N_CTX, n_predict=60))
    assert 0 < statistics.accepted < statistics.drafted


def test_a_lying_draft_is_refused_whole() -> None:
    case = next(case for case in CASES if case.id == "draft-simple-liar")
    statistics = agree(tiny_target(), case, 4, SAMPLING["greedy"], Limits(N_CTX, n_predict=20))
    assert statistics.accepted == 0
    assert statistics.acceptance_length == 1.0

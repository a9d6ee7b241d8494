"""How the prompt reaches a drafter does not matter: in one piece, in chunks, or partly kept."""

from __future__ import annotations

import copy

import pytest
from contracts.cases import (
    CASES,
    PROMPT,
    Case,
    Recorder,
    assert_same_draft,
    build,
    forced_rounds,
    name,
)

from specdec.drafters.base import FirstOf
from specdec.options import SamplingOptions

SAMPLING = SamplingOptions(temp=0.8, seed=5)
ACCEPTED = (2, 0, 1, 4)


def compare(left: Recorder, right: Recorder) -> None:
    assert any(draft.tokens for draft in right.drafts)
    for found, expected in zip(left.drafts, right.drafts, strict=True):
        assert_same_draft(found, expected)


def request(
    case: Case, drafter: FirstOf, kept: int = 0, n_batch: int = 512, prompt: list[int] = PROMPT
) -> Recorder:
    """The drafts of one request."""
    recorder = Recorder(drafter)
    assert recorder.begin(SAMPLING, kept) == kept
    forced_rounds(case, recorder, ACCEPTED, prompt, n_batch, kept)
    return recorder


@pytest.mark.parametrize("n_batch", [1, 3, 7])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_chunks(case: Case, n_batch: int) -> None:
    compare(request(case, build(case), n_batch=n_batch), request(case, build(case)))


@pytest.mark.parametrize("kept", [1, 5, len(PROMPT) - 1])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_kept_prefix(case: Case, kept: int) -> None:
    """A request that goes on from a kept prefix drafts as if it had read the prefix itself."""
    reused, again = build(case), build(case)
    before = [*PROMPT[:kept], *range(100, 110)]
    for drafter in (reused, again):
        request(case, drafter, prompt=before)
    compare(request(case, reused, kept=kept), request(case, again))


@pytest.mark.parametrize(
    "case", [case for case in CASES if "ngram-mod" not in case.types], ids=name
)
def test_second_request(case: Case) -> None:
    """Earlier requests leave nothing behind (but in ngram-mod's shared table)."""
    used = build(case)
    request(case, used, prompt=PROMPT[::-1])
    compare(request(case, used), request(case, build(case)))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_copy_is_a_second_session(case: Case) -> None:
    """`copy.copy` and `begin` leave the first session as it was."""
    first, undisturbed = build(case), build(case)
    for drafter in (first, undisturbed):
        drafter.begin(SAMPLING)
    prompt = PROMPT[:9]
    forced_rounds(case, first, (1,), prompt)
    forced_rounds(case, undisturbed, (1,), prompt)
    second = copy.copy(first)
    if "ngram-mod" in case.types:  # the shared table would learn from the second session
        second = FirstOf([one for one in second.drafters if one.name != "ngram-mod"])
    request(case, second, prompt=[*range(90, 110)])
    assert_same_draft(first.draft(70, 8), undisturbed.draft(70, 8))

"""After any rounds a drafter is in the state of one that only ever saw the text that stands.

Losslessness cannot find a wrong rollback: the text stays right and only gets slower. So drafters
are driven through every accept count, and their next draft is compared with that of a fresh one.
Where drafts depend on earlier rounds by design (ngram-map-k and -k4v remember accepted lengths and
found positions, ngram-mod's table learns in steps) the same rounds must give the same drafts
however the text is shown, and every draft must continue an earlier place of the text.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from contracts.cases import (
    CASES,
    PROMPT,
    WITHOUT_FILE,
    Case,
    Recorder,
    assert_same_draft,
    build,
    forced_rounds,
    name,
    show,
)

from specdec.options import SamplingOptions

K = 4
SAMPLING = SamplingOptions(temp=0.8, seed=5)
ACCEPTED = [(5, a, b) for a, b in itertools.product(range(K + 1), repeat=2)]

BY_HISTORY = tuple(case for case in CASES if not case.follows_rounds)
BY_ROUNDS = tuple(case for case in CASES if case.follows_rounds)


@pytest.mark.parametrize("case", BY_HISTORY, ids=name)
def test_next_draft_is_that_of_a_fresh_drafter(case: Case) -> None:
    drafter, fresh = Recorder(build(case, K)), build(case, K)
    for accepted in ACCEPTED:
        drafter.begin(SAMPLING)
        text = forced_rounds(case, drafter, accepted)
        fresh.begin(SAMPLING)
        show(case, fresh, text[:-1])
        assert_same_draft(drafter.draft(text[-1], 8), fresh.draft(text[-1], 8))
    assert any(draft.tokens for draft in drafter.drafts)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_same_rounds_give_the_same_drafts_however_the_text_is_shown(case: Case) -> None:
    for accepted in ACCEPTED[:: 1 if case in WITHOUT_FILE else 4]:
        whole, pieces = Recorder(build(case, K)), Recorder(build(case, K), piece=1)
        whole.begin(SAMPLING)
        pieces.begin(SAMPLING)
        forced_rounds(case, whole, accepted)
        forced_rounds(case, pieces, accepted)
        assert len(whole.drafts) == len(pieces.drafts)
        for left, right in zip(whole.drafts, pieces.drafts, strict=True):
            assert_same_draft(left, right)


@pytest.mark.parametrize("case", BY_ROUNDS, ids=name)
def test_drafts_continue_an_earlier_place_of_the_text(case: Case) -> None:
    """A rejected token that got into the history would be found again and drafted."""
    if case.write_draft is not None:
        case = Case(case.id, tuple(name for name in case.types if name.startswith("ngram")))
    for accepted in ACCEPTED:
        drafter = Recorder(build(case, K))
        drafter.begin(SAMPLING)
        text = forced_rounds(case, drafter, accepted)
        for draft in drafter.drafts:
            seen = list(itertools.pairwise(text))
            assert all(pair in seen for pair in itertools.pairwise(draft.tokens))


@pytest.mark.parametrize("case", BY_HISTORY, ids=name)
def test_an_empty_draft_leaves_no_trace(case: Case) -> None:
    """No `accept` follows it; the next draft is that of a drafter that was not asked."""
    asked, fresh = build(case, K), build(case, K)
    for drafter in (asked, fresh):
        drafter.begin(SAMPLING)
        show(case, drafter, PROMPT)
    unseen = 200
    if asked.draft(unseen, 8).tokens:
        asked.accept(0)
    for drafter in (asked, fresh):
        show(case, drafter, [*PROMPT, unseen], len(PROMPT))
    assert_same_draft(asked.draft(PROMPT[0], 8), fresh.draft(PROMPT[0], 8))


def test_the_map_drafts_no_more_than_was_accepted_the_last_time() -> None:
    for name_, accepted in itertools.product(("ngram-map-k", "ngram-map-k4v"), range(1, K + 1)):
        drafter = build(Case("map", (name_,)), K)
        drafter.begin(SAMPLING)
        drafter.observe(torch.tensor([*PROMPT[3:9], *range(100, 110)]), None)
        assert len(drafter.draft(PROMPT[4], 8).tokens) == K
        drafter.accept(accepted)
        assert len(drafter.draft(PROMPT[4], 8).tokens) == accepted
        drafter.accept(0)
        assert drafter.draft(PROMPT[4], 8).tokens == []

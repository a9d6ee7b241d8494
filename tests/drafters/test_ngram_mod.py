"""ngram-mod against its rules written out as plain loops, and its shared table."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from contracts.cases import Case
from contracts.cases import build as build_case
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters import ngram_mod
from specdec.drafters.ngram_mod import NgramMod, NgramTable
from specdec.options import NgramModOptions, SamplingOptions

SAMPLING = SamplingOptions()


class Reference:
    """The table of all requests and the state of the one that runs."""

    def __init__(self, n: int, low: int, high: int) -> None:
        self.n, self.min, self.max = n, low, high
        self.table: dict[int, int] = {}
        self.n_low = 0
        self.begin()

    def begin(self) -> None:
        self.begun = False
        self.last = 0

    def index(self, tokens: list[int]) -> int:
        x = 0
        for token in tokens:
            x = (x * 6364136223846793005 + token) % 2**64
        return x % (4 * 1024 * 1024)

    def add(self, h: list[int], low: int, high: int) -> None:
        for i in range(low, high):
            self.table[self.index(h[i : i + self.n])] = h[i + self.n]

    def draft(self, h: list[int], id_last: int) -> list[int]:
        n = self.n
        if not self.begun and len(h) >= n:
            self.add(h, 0, len(h) - n)
            self.last = len(h) - n
        self.begun = True
        if len(h) < n:
            return []
        if self.last + 32 < len(h):
            self.add(h, self.last, len(h) - n)
            self.last = len(h) - n
        window = [*h[len(h) - n + 1 :], id_last]
        drafted: list[int] = []
        for i in range(self.max):
            token = self.table.get(self.index(window))
            if token is None:
                if i < self.min:
                    return []
                break
            drafted.append(token)
            window = [*window[1:], token]
        self.drafted = len(drafted)
        return drafted

    def accept(self, n_accepted: int) -> None:
        if n_accepted / self.drafted < 0.25:
            self.n_low += 1
            if self.n_low == 5:
                self.table, self.n_low, self.last = {}, 0, 0
        else:
            self.n_low = 0


REQUEST = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=70),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=25),
)


@given(
    st.lists(REQUEST, min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(0, 8),
)
def test_against_the_rules(
    requests: list[tuple[list[int], list[tuple[int, int]]]], n: int, low: int, high: int
) -> None:
    drafter = NgramMod(NgramModOptions(n_match=n, n_min=low, n_max=high))
    reference = Reference(n, low, high)
    for prompt, rounds in requests:
        drafter.begin(SAMPLING)
        reference.begin()
        h, id_last = prompt[:-1], prompt[-1]
        drafter.observe(torch.tensor(h, dtype=torch.int64), None)
        for n_accepted, token in rounds:
            expected = reference.draft(h, id_last)
            assert drafter.draft(id_last, 1000).tokens == expected
            n_accepted = min(n_accepted, len(expected))
            if expected:
                drafter.accept(n_accepted)
                reference.accept(n_accepted)
            block = [id_last, *expected[:n_accepted]]
            drafter.observe(torch.tensor(block), None)
            h, id_last = h + block, token


def observed(drafter: NgramMod, text: list[int]) -> NgramMod:
    drafter.begin(SAMPLING)
    drafter.observe(torch.tensor(text), None)
    return drafter


OPTIONS = NgramModOptions(n_match=2, n_min=2, n_max=6)


def test_copies_and_later_requests_share_the_table() -> None:
    first = observed(NgramMod(OPTIONS), [1, 2, 3, 4, 5, 6])
    first.draft(9, 10)
    second = observed(copy.copy(first), [8, 8, 1])
    assert second.draft(2, 10).tokens == [3, 4, 5, 6]
    assert observed(first, [7, 7, 2]).draft(3, 10).tokens == [4, 5, 6]


def test_room_cuts_the_draft_but_not_the_judgement_of_its_length() -> None:
    drafter = observed(NgramMod(OPTIONS), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    draft = drafter.draft(2, 1)
    assert (draft.tokens, draft.end) == ([3], "room")
    for _ in range(4):
        drafter.accept(1)  # 1 of 6 is a low acceptance
        assert drafter.draft(2, 1).tokens == [3]
    drafter.accept(1)
    assert drafter.table.used == 0


def test_a_short_chain_is_no_draft() -> None:
    drafter = observed(NgramMod(OPTIONS), [1, 2, 3, 9, 9, 1])
    drafter.table.clear()
    drafter = observed(drafter, [5, 1, 2, 3, 7, 1])
    draft = drafter.draft(2, 10)
    assert draft.tokens == [3, 7, 1]
    assert draft.end == "no match"
    assert (
        observed(NgramMod(NgramModOptions(2, 4, 6)), [5, 1, 2, 3, 7, 1]).draft(2, 9).end == "n_min"
    )


def test_five_bad_drafts_in_a_row_empty_the_table_also_across_requests() -> None:
    drafter = NgramMod(OPTIONS)
    for request in range(5):
        text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
        assert observed(drafter, text).draft(2, 10).tokens, request
        drafter.accept(0)
    assert drafter.table.used == 0


def test_a_good_draft_forgives() -> None:
    drafter = observed(NgramMod(OPTIONS), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    for accepted in (0, 0, 0, 0, 2, 0, 0, 0, 0):
        assert drafter.draft(2, 10).tokens
        drafter.accept(accepted)
    assert drafter.draft(2, 10).tokens


def test_a_full_table_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the prompt that was just added."""
    monkeypatch.setattr(ngram_mod, "TABLE_SIZE", 16)
    drafter = observed(NgramMod(OPTIONS), list(range(12)))
    assert drafter.draft(1, 10).tokens == []
    assert drafter.table.used == 0


def test_used_counts_the_slots_that_are_not_empty() -> None:
    table = NgramTable(1)
    table.add(np.array([1, 2, 1, 2, 1, 3], np.int32), 0, 5)
    assert table.used == 2
    table.add(np.array([4, 4, 4], np.int32), 0, 2)
    assert table.used == 3


def test_a_short_match_length_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="specdec"):
        build_case(Case("mod", ("ngram-mod",)))
    assert "--spec-ngram-mod-n-match 2" in caplog.text


@pytest.mark.parametrize(("n_waiting", "expected"), [(32, []), (33, [112, 113, 114])])
def test_the_reply_is_added_when_more_than_32_tokens_are_waiting(
    n_waiting: int, expected: list[int]
) -> None:
    drafter = observed(NgramMod(NgramModOptions(2, 1, 3)), [100, 101, 102, 103])
    assert drafter.draft(104, 10).tokens == []  # adds the prompt, but for its last two tokens
    reply = [*range(104, 104 + n_waiting - 3), 110]
    drafter.observe(torch.tensor(reply), None)
    assert drafter.draft(111, 10).tokens == expected

"""ngram-simple, ngram-map-k and -k4v against the rules written out as plain loops."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.base import Drafter
from specdec.drafters.ngram import NgramMap, NgramMap4V, NgramSimple
from specdec.options import SamplingOptions

SAMPLING = SamplingOptions()


def simple(h: list[int], id_last: int, n: int, m: int) -> list[int]:
    """The draft of ngram-simple."""
    length = len(h)
    key = [*h[length - n + 1 :], id_last]
    if length <= n + m + 1:
        return []
    for j in range(length - n - 1, 0, -1):
        if h[j : j + n] == key:
            c = min(m, length - (j + n))
            return [] if c < n else h[j + n : j + n + c]
    return []


class Map:
    """One request of ngram-map-k, or of -k4v when ``min_hits`` is given."""

    def __init__(self, n: int, m: int, min_hits: int | None = None) -> None:
        self.n, self.m, self.min_hits = n, m, min_hits
        self.table: dict[int, int] = {}
        self.last = 0
        self.begin: int | None = None
        self.records: list[dict] = []
        self.used: dict | None = None

    def hash(self, tokens: list[int]) -> int:
        x = 0
        for token in tokens:
            x = (x * 2654435761 + token) % 2**32
        return x % 262144

    def draft(self, h: list[int], id_last: int) -> list[int]:
        n, m, length = self.n, self.m, len(h)
        self.used = None
        if self.begin is None:
            self.begin = length
        if length < 2 * n + m:
            return []
        key = [*h[length - n + 1 :], id_last]
        first = range(self.begin - n - m - 1, self.last, -1)
        second = range(length - n - m - 1, max(self.begin, self.last), -1)
        j = self.table.get(self.hash(key), 0)
        if not (0 < j < length - n - m - 1 and h[j : j + n] == key):
            j = next((i for i in [*first, *second] if i > 0 and h[i : i + n] == key), 0)
        for i in [*first, *second]:
            if i > 0:
                self.table.setdefault(self.hash(h[i : i + n]), i)
        self.last = max(self.last, length - n - m - 1)
        if not j:
            return []
        record = next((r for r in self.records if r["key"] == key), None)
        if record is None:
            values = [{"start": 0, "count": 0, "accepted": m} for _ in range(4)]
            record = {"key": key, "stat": 0, "hits": 0, "values": values}
            self.records.append(record)
        record["hits"] += 1
        slot = self.choose(record, h, j)
        if slot is None:
            return []
        self.used = slot
        return h[j + n : j + n + min(m, slot["accepted"])]

    def choose(self, record: dict, h: list[int], j: int) -> dict | None:
        n, m = self.n, self.m
        if self.min_hits is None:
            return record["values"][0]
        if record["hits"] < self.min_hits:
            return None
        for i in range(record["stat"], j + 1):
            if h[i : i + n] != record["key"]:
                continue
            for value in record["values"]:
                if value["start"] == 0:
                    value["start"] = i + n
                start = value["start"]
                if h[start : start + m] == h[i + n : i + n + m]:
                    value["count"] += 1
                    break
        record["stat"] = j
        counts = [value["count"] for value in record["values"]]
        best = counts.index(max(counts))
        others = sum(counts) - counts[best]
        return None if others and counts[best] < 2 * others else record["values"][best]

    def accept(self, n_accepted: int) -> None:
        if self.used is not None:
            self.used["accepted"] = n_accepted


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=60)
ROUNDS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), max_size=25)
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 6))


def replay(
    drafter: Drafter,
    draft: Callable[[list[int], int], list[int]],
    accept: Callable[[int], None],
    prompt: list[int],
    rounds: list[tuple[int, int]],
) -> None:
    """One request: in every round both draft the same, some of it is accepted, a token follows."""
    drafter.begin(SAMPLING)
    h, id_last = prompt[:-1], prompt[-1]
    drafter.observe(torch.tensor(h, dtype=torch.int64), None)
    for n_accepted, token in rounds:
        expected = draft(h, id_last)
        assert drafter.draft(id_last, 1000).tokens == expected
        n_accepted = min(n_accepted, len(expected))
        if expected:
            drafter.accept(n_accepted)
            accept(n_accepted)
        block = [id_last, *expected[:n_accepted]]
        drafter.observe(torch.tensor(block), None)
        h, id_last = h + block, token


@given(TEXT, ROUNDS, SIZES)
def test_simple(prompt: list[int], rounds: list[tuple[int, int]], sizes: tuple[int, int]) -> None:
    n, m = sizes
    drafter = NgramSimple(n, m)
    replay(drafter, lambda h, last: simple(h, last, n, m), lambda _: None, prompt, rounds)


@given(st.lists(TEXT, min_size=1, max_size=3), ROUNDS, SIZES)
def test_map_k(
    prompts: list[list[int]], rounds: list[tuple[int, int]], sizes: tuple[int, int]
) -> None:
    drafter = NgramMap(*sizes)
    for prompt in prompts:
        reference = Map(*sizes)
        replay(drafter, reference.draft, reference.accept, prompt, rounds)


@given(st.lists(TEXT, min_size=1, max_size=3), ROUNDS, SIZES, st.integers(1, 3))
def test_map_k4v(
    prompts: list[list[int]],
    rounds: list[tuple[int, int]],
    sizes: tuple[int, int],
    min_hits: int,
) -> None:
    drafter = NgramMap4V(*sizes, min_hits)
    for prompt in prompts:
        reference = Map(*sizes, min_hits)
        replay(drafter, reference.draft, reference.accept, prompt, rounds)


def observed(drafter: Drafter, text: list[int]) -> Drafter:
    drafter.begin(SAMPLING)
    drafter.observe(torch.tensor(text), None)
    return drafter


def test_simple_copies_what_followed_the_most_recent_match() -> None:
    text = [9, 1, 2, 5, 5, 5, 9, 1, 2, 7, 8, 3, 4, 1]
    drafter = observed(NgramSimple(2, 3), text)
    assert drafter.draft(2, 100).tokens == [7, 8, 3]
    assert drafter.draft(2, 100).end == "n_max"
    assert drafter.draft(6, 100).end == "no match"


def test_simple_drops_a_match_with_fewer_than_n_tokens_behind_it() -> None:
    drafter = observed(NgramSimple(3, 2), [9, 9, 9, 9, 9, 1, 2, 3, 4, 1, 2])
    assert drafter.draft(3, 100).end == "no match" or drafter.draft(3, 100).tokens == []
    drafter = observed(NgramSimple(3, 3), [9, 9, 9, 9, 9, 7, 1, 2, 3, 1, 2])
    assert drafter.draft(3, 100).end == "n_min"


def test_a_match_at_the_very_start_is_none() -> None:
    drafter = observed(NgramSimple(2, 2), [1, 2, 7, 8, 9, 9, 9, 1])
    assert drafter.draft(2, 100).tokens == []


def test_drafts_fit_the_room() -> None:
    text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 1]
    for drafter in (NgramSimple(2, 4), NgramMap(2, 4), NgramMap4V(2, 4, 1)):
        draft = observed(drafter, text).draft(2, 3)
        assert (draft.tokens, draft.end) == ([3, 4, 5], "room")


def test_map_k_does_not_find_keys_at_the_end_of_the_prompt() -> None:
    """Positions within n + m tokens of the prompt's end are never searched, also not later."""
    prompt = [*range(20, 40), 1, 2, 3, 4]
    drafter = observed(NgramMap(2, 4), prompt)
    assert drafter.draft(50, 100).tokens == []
    drafter.observe(torch.tensor([50, *range(60, 70), 1]), None)
    assert drafter.draft(2, 100).tokens == []
    assert drafter.draft(61, 100).tokens == []
    assert NgramSimple(2, 4).begin(SAMPLING) == 0
    drafter = observed(NgramSimple(2, 4), [*prompt, 50, *range(60, 70), 1])
    assert drafter.draft(2, 100).tokens == [3, 4, 50, 60]


def test_map_k4v_wants_a_clear_favourite() -> None:
    def draft(first: int, second: int) -> list[int]:
        text = [9]
        for i in range(first):
            text += [1, 5, 6, 30 + i]
        for i in range(second):
            text += [1, 7, 8, 40 + i]
        return observed(NgramMap4V(1, 2, 1), [*text, *range(50, 60)]).draft(1, 100).tokens

    assert draft(1, 1) == draft(2, 2) == draft(3, 2) == []
    # The favourite is 5 6, but what is drafted followed at the position found, the last one.
    assert draft(2, 1) == draft(4, 2) == [7, 8]
    assert draft(1, 2) == [7, 8]
    assert draft(3, 0) == [5, 6]


@pytest.mark.parametrize("drafter", [NgramSimple(12, 48), NgramMap(12, 48), NgramMap4V(12, 48, 1)])
@pytest.mark.parametrize("alphabet", [1, 2, 1000])
def test_a_long_text_is_no_burden(drafter: Drafter, alphabet: int) -> None:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(alphabet, (30_000,), generator=generator)
    drafter.begin(SAMPLING)
    drafter.observe(text, None)
    drafter.draft(0, 48)
    started = time.process_time()
    for token in range(20):
        drafter.draft(token, 48)
        drafter.observe(torch.tensor([token]), None)
    assert (time.process_time() - started) / 20 < 0.05  # a search token by token takes seconds

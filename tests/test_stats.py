"""Counters, rates and the names they go by in JSON."""

from __future__ import annotations

import json

import pytest

from specdec.drafters.base import Draft
from specdec.generate import Round, RoundTimes
from specdec.stats import Statistics


def round_of(
    drafted: int, accepted: int, kept: int | None = None, drafter: str = "ngram-mod"
) -> Round:
    """One round; ``kept`` tokens of the emitted ones survive the limits."""
    return Round(
        position=1,
        draft=Draft([1] * drafted, drafter=drafter if drafted else ""),
        accepted=accepted,
        tokens=[1] * (accepted + 1 if kept is None else kept),
        finish=None,
        times=RoundTimes(draft=1.0, target=2.0, verify=3.0, observe=4.0),
    )


def counted(*rounds: Round) -> Statistics:
    statistics = Statistics()
    for one in rounds:
        statistics.add(one)
    return statistics


def test_nothing_has_happened_yet() -> None:
    statistics = Statistics()
    assert statistics.acceptance_rate == statistics.acceptance_length == 0
    assert statistics.mean_draft_length == statistics.generate_speed == statistics.prompt_speed == 0
    assert statistics.per_position == []


def test_rates() -> None:
    """3 of 4 accepted, none of 4, a round without a draft."""
    statistics = counted(round_of(4, 3), round_of(4, 0), round_of(0, 0))
    assert (statistics.rounds, statistics.emitted) == (3, 6)
    assert (statistics.drafted, statistics.accepted) == (8, 3)
    assert statistics.acceptance_rate == 3 / 8
    assert statistics.acceptance_length == 6 / 3
    assert statistics.mean_draft_length == 1 + 3 / 2  # llama.cpp's, which leaves the last one out
    assert statistics.per_position == [0.5, 0.5, 0.5]


def test_positions() -> None:
    statistics = counted(round_of(3, 1), round_of(3, 3), round_of(3, 2), round_of(3, 0))
    assert statistics.per_position == [0.75, 0.5, 0.25]


def test_accepted_tokens_that_a_limit_cut_off_do_not_count() -> None:
    statistics = counted(round_of(4, 4, kept=2))
    assert (statistics.emitted, statistics.accepted) == (2, 1)


def test_each_drafter_has_its_own_share() -> None:
    statistics = counted(
        round_of(4, 2), round_of(3, 3, drafter="draft-simple"), round_of(2, 0), round_of(0, 0)
    )
    mod, simple = statistics.drafters["ngram-mod"], statistics.drafters["draft-simple"]
    assert (mod.drafts, mod.drafts_accepted, mod.drafted, mod.accepted) == (2, 1, 6, 2)
    assert mod.per_position == [0.5, 0.5]
    assert (simple.drafts, simple.drafted, simple.per_position) == (1, 3, [1.0, 1.0, 1.0])
    assert statistics.per_position == [2 / 3, 2 / 3, 1 / 3]
    assert mod.draft_seconds == 2.0


def test_times_and_speeds() -> None:
    statistics = counted(round_of(4, 3), round_of(0, 0))
    statistics.n_prompt, statistics.prompt_seconds = 10, 4.0
    assert statistics.generate_seconds == 20.0
    assert statistics.generate_speed == 5 / 20
    assert statistics.prompt_speed == 2.5
    parts = (statistics.draft_seconds, statistics.target_seconds)
    assert parts == (2.0, 4.0)
    assert (statistics.verify_seconds, statistics.observe_seconds) == (6.0, 8.0)


def test_json() -> None:
    numbers = json.loads(json.dumps(counted(round_of(4, 3), round_of(0, 0)).as_mapping()))
    assert numbers["acceptance_length"] == 2.5
    assert numbers["acceptance_rate"] == 0.75
    assert (numbers["rounds"], numbers["drafted"], numbers["accepted"]) == (2, 4, 3)
    assert numbers["per_position"] == [1.0, 1.0, 1.0]
    one = numbers["drafters"]["ngram-mod"]
    assert (one["drafts"], one["drafts_accepted"], one["draft_ms"]) == (1, 1, pytest.approx(1000))

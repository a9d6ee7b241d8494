"""Draft lengths from costs and acceptance, and how costs are measured and kept."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor

from specdec.drafters import auto_length
from specdec.drafters import costs as costs_module
from specdec.drafters.auto_length import AutoLength, best_length
from specdec.drafters.base import Draft, Drafter
from specdec.drafters.costs import Costs, LiveCosts, load_or_measure, measure
from specdec.drafters.experience import (
    CARRIED,
    FIRST_ALLOWANCE,
    LARGEST_ALLOWANCE,
    SHARE,
    Acceptance,
    Experience,
)
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.options import AUTO, DraftOptions, Options, SamplingOptions

N_MAX = 8
F32 = (torch.float32, torch.float32)
CHEAP = Costs(tuple(0.02 * k for k in range(9)), tuple(1 + 0.03 * k for k in range(9)), 0.0, 0.0)
"""Further rows cost next to nothing."""
SLOW = Costs(tuple(0.4 * k for k in range(9)), tuple(1 + 0.2 * k for k in range(9)), 0.1, 0.0)
"""Only drafts that are nearly always accepted pay."""
MODERATE = Costs(
    tuple(0.1 + 0.02 * k for k in range(9)), tuple(1 + 0.15 * k for k in range(9)), 0.03, 0.002
)
"""About what a small draft on a processor costs."""
DEAR = Costs(tuple(2.0 * k for k in range(9)), tuple(1.0 + k for k in range(9)), 0.0, 0.0)
"""A drafted token costs two passes, and every row of a pass a whole one."""


class Always:
    """Drafts as many tokens as it may."""

    name, taps, n_max = "draft-always", (), N_MAX

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None: ...

    def draft(self, last_token: int, room: int) -> Draft:
        length = min(room, self.n_max)
        return Draft([1] * length, end="n_max" if length == self.n_max else "room")

    def accept(self, accepted: int) -> None: ...


def auto(drafter: Drafter, costs: Costs) -> AutoLength:
    return AutoLength(drafter, Experience(LiveCosts(costs), drafter.n_max))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, in one element."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def rounds(
    drafter: AutoLength, costs: Costs, chance: float, clock: list[float], seed: int = 1
) -> Iterator[tuple[int, int]]:
    """(drafted, emitted) of a reply's rounds, each token accepted with the same chance."""
    generator = random.Random(seed)
    drafter.begin(SamplingOptions())
    while True:
        length = len(drafter.draft(0, 100).tokens)
        n_accepted = accepted(length, chance, generator)
        clock[0] += costs.round(length)
        if length:
            drafter.accept(n_accepted)
        drafter.observe(torch.zeros(n_accepted + 1), None)
        yield length, n_accepted + 1


def lengths(costs: Costs, chance: float, clock: list[float], n_rounds: int = 400) -> list[int]:
    found = rounds(auto(Always(), costs), costs, chance, clock)
    return [length for length, _ in itertools.islice(found, n_rounds)]


def seconds_a_token(costs: Costs, found: Iterator[tuple[int, int]], n_tokens: int) -> float:
    """Of a reply of at least ``n_tokens`` tokens."""
    total, n_emitted = 0.0, 0
    while n_emitted < n_tokens:
        length, emitted = next(found)
        total, n_emitted = total + costs.round(length), n_emitted + emitted
    return total / n_emitted


def fixed(length: int, chance: float, seed: int) -> Iterator[tuple[int, int]]:
    generator = random.Random(seed)
    while True:
        yield length, accepted(length, chance, generator) + 1


def accepted(length: int, chance: float, generator: random.Random) -> int:
    hits = (generator.random() < chance for _ in range(length))
    return next((i for i, hit in enumerate(hits) if not hit), length)


def test_the_best_length_maximises_tokens_per_second() -> None:
    assert best_length(LiveCosts(CHEAP), [1.0] * N_MAX) == N_MAX
    assert best_length(LiveCosts(CHEAP), [0.0] * N_MAX) == 0
    assert best_length(LiveCosts(DEAR), [0.9] * N_MAX) == 0
    assert best_length(LiveCosts(DEAR), [0.9] * N_MAX, shortest=1) == 1
    steps = Costs((0.0, 0.1, 0.1, 0.1), (1.0, 1.1, 1.5, 2.6), 0.0, 0.0)
    speeds = [1.0, 1.7 / 1.2, 2.19 / 1.6, 2.533 / 2.7]
    assert speeds.index(max(speeds)) == best_length(LiveCosts(steps), [0.7] * 3) == 1


def test_lengths_follow_the_acceptance(clock: list[float]) -> None:
    always = lengths(CHEAP, 1.0, clock)[50:]
    assert set(always) == {0, N_MAX}
    assert always.count(0) < 0.05 * len(always), "only to see what it takes"
    assert set(lengths(DEAR, 0.5, clock)) == {0}, "no draft could pay"
    slow = lengths(SLOW, 0.2, clock)[100:]
    assert 0.95 * len(slow) < slow.count(0) < len(slow)
    never = lengths(CHEAP, 0.0, clock)
    assert never[0] > 0
    assert never[100:].count(0) > 0.8 * len(never[100:])
    assert any(never[100:]), "an attempt now and then"


def test_acceptance_of_positions_is_conditional_and_forgets() -> None:
    seen = Acceptance(3)
    for _ in range(300):
        seen.add(drafted=3, accepted=1)
    first, second, third = seen.chances()
    assert first > 0.95
    assert second < 0.1
    assert third == pytest.approx(second)
    for _ in range(300):
        seen.add(drafted=3, accepted=3)
    assert min(seen.chances()) > 0.9


def test_acceptance_of_earlier_requests_fades() -> None:
    seen = Acceptance(2)
    for _ in range(200):
        seen.add(drafted=2, accepted=1)
    before = seen.chances()
    seen.fade()
    assert seen.tried == pytest.approx([CARRIED, CARRIED])
    assert seen.accepted == pytest.approx([CARRIED, 0])
    assert seen.chances() == pytest.approx(before, abs=0.2)


def test_costs_follow_the_rounds() -> None:
    live = LiveCosts(CHEAP)
    live.note(3, 100.0)
    assert live.surcharge == 1.0, "nothing to compare it with"
    for slowness in (1, 3, 0.5):
        for _ in range(100):
            live.note(0, slowness * CHEAP.round(0))
            live.note(5, slowness * CHEAP.round(5))
        assert live.surcharge == pytest.approx(1.0, abs=0.15), "all rounds alike"
        assert live.in_plain_rounds(slowness * CHEAP.round(0)) == pytest.approx(1.0, rel=0.01)
    before = live.surcharge
    live.note(1, 100.0)
    assert live.surcharge < 1.1 * before, "one slow round"
    for _ in range(100):
        live.note(0, CHEAP.round(0))
        live.note(2, 1.4 * CHEAP.round(2))
    assert live.round(0) == CHEAP.round(0)
    assert live.round(3) == pytest.approx(1.4 * CHEAP.round(3), rel=0.05), "drafts cost more"
    for _ in range(1000):
        live.note(2, 3 * CHEAP.round(2))
    assert live.surcharge < 3, "the machine may have slowed down since"


@pytest.mark.parametrize("costs", [CHEAP, MODERATE, SLOW, DEAR])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_hardly_slower_than_plain_decoding_or_any_fixed_length(
    costs: Costs, chance: float, clock: list[float]
) -> None:
    """What replies of 400 tokens take at first and with experience; believed costs are 5 % off."""
    best = min(
        statistics.mean(
            seconds_a_token(costs, fixed(length, chance, seed), 400) for seed in range(12)
        )
        for length in range(N_MAX + 1)
    )
    believed = replace(costs, verify=tuple(0.95 * cost for cost in costs.verify))
    first, second = [], []
    for seed in range(12):
        drafter = auto(Always(), believed)
        for taken in (first, second):
            found = rounds(drafter, costs, chance, clock, seed)
            taken.append(seconds_a_token(costs, found, 400))
    assert statistics.mean(first) < 1.06 * best
    assert statistics.mean(second) < 1.05 * best


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_trials_cost_no_more_than_their_share(chance: float, clock: list[float]) -> None:
    """A bound for every single reply, where drafts do not pay."""
    for costs, n_tokens in itertools.product((SLOW, RARELY), (100, 1000)):
        drafter = auto(Always(), costs)
        seconds = seconds_a_token(costs, rounds(drafter, costs, chance, clock), n_tokens) * n_tokens
        plain = n_tokens * costs.round(0)
        assert seconds <= (1 + SHARE) * plain + FIRST_ALLOWANCE * costs.round(0)


def test_how_a_reply_begins_is_not_tried(clock: list[float]) -> None:
    drafter = auto(Always(), RARELY)
    found = [length for length, _ in itertools.islice(rounds(drafter, RARELY, 0.0, clock), 50)]
    assert found.index(1) == auto_length.SETTLED


RARELY = Costs(tuple(0.7 * k for k in range(9)), tuple(1 + 0.1 * k for k in range(9)), 0.0, 0.0)
"""Only long drafts could pay."""


class Listens(Always):
    """Notes what it is shown, and in how many pieces."""

    taps = (1,)

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        seen = [token for piece in self.shown for token in piece]
        self.shown = [seen[:kept]]
        return min(kept, len(seen))

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        assert hidden is not None
        assert hidden[:, 0, 0].tolist() == tokens.tolist()
        self.shown.append(tokens.tolist())


def show(drafter: AutoLength, *tokens: int) -> None:
    drafter.observe(torch.tensor(tokens), torch.tensor(tokens)[:, None, None])


def test_a_resting_drafter_is_shown_everything_at_once() -> None:
    listener = Listens()
    drafter = auto(listener, RARELY)
    drafter.begin(SamplingOptions())
    show(drafter, 1, 2, 3)
    assert listener.shown == [[], [1, 2, 3]], "the prompt, as it comes"
    token = 3
    while not drafter.draft(token, 100).tokens:
        show(drafter, token := token + 1)
    assert [len(piece) for piece in listener.shown] == [0, 3, token - 3]
    assert [token for piece in listener.shown for token in piece] == list(range(1, token + 1))
    drafter.accept(0)
    show(drafter, token + 1)
    assert listener.shown[-1] == [token + 1], "a trial goes on"


def test_a_resting_drafter_is_ready_for_the_next_request() -> None:
    for kept, expected in ((3, [1, 2, 3]), (2, [1, 2]), (5, [1, 2, 3, 4, 5]), (0, [])):
        listener = Listens()
        drafter = auto(listener, RARELY)
        drafter.begin(SamplingOptions())
        show(drafter, 1, 2, 3)
        for token in (4, 5, 6):
            assert not drafter.draft(token, 100).tokens
            show(drafter, token)
        assert drafter.begin(SamplingOptions(), kept) == kept
        assert listener.shown == [expected]


def test_a_resting_drafter_does_not_keep_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_length, "MOST_UNSEEN", 4)
    listener = Listens()
    drafter = auto(listener, RARELY)
    drafter.experience.allowance = 0.0
    drafter.begin(SamplingOptions())
    for token in range(10):
        assert not drafter.draft(token, 100).tokens
        show(drafter, token)
    assert listener.shown == [[], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_rounds_are_timed(clock: list[float]) -> None:
    drafter = auto(Always(), CHEAP)
    noted: list[tuple[int, float]] = []
    drafter.experience.costs.note = lambda *pair: noted.append(pair)  # type: ignore[method-assign]
    drafter.observe(torch.zeros(3), None)
    for seconds, room in ((1.0, 100), (2.0, 1), (3.0, 100)):
        length = len(drafter.draft(0, room).tokens)
        clock[0] += seconds
        drafter.accept(0)
        drafter.observe(torch.zeros(1), None)
    assert [seconds for _, seconds in noted] == [3.0], "neither the first, nor one cut short"
    assert noted[0][0] == length


def test_the_reason_of_the_end() -> None:
    drafter = auto(Always(), CHEAP)
    drafter.begin(SamplingOptions())
    first = drafter.draft(0, 100)
    assert 0 < len(first.tokens) < N_MAX
    assert first.end == "auto"
    assert drafter.draft(0, 1).end == "room"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = tiny.write_target(tmp_path / "target.gguf")
    draft = tiny_drafts.write_dflash(tmp_path / "draft.gguf")
    layer = {"model.path": target, "spec.draft.path": draft, "spec.draft.n_max": AUTO}
    return Engine.load(Options().merge(layer))


def costs_files(folder: Path) -> list[Path]:
    return list((folder / "cache" / "specdec").glob("costs-*.json"))


def test_costs_are_measured_once_for_a_pair(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (drafter,) = engine.drafter.drafters
    assert isinstance(drafter, AutoLength)
    assert drafter.n_max == 4, "the block of the draft is the limit"
    (path,) = costs_files(tmp_path)
    monkeypatch.setattr(costs_module, "measure", lambda *_: pytest.fail("measured again"))
    (again,) = engine.with_spec(engine.options.spec).drafter.drafters
    assert again.experience.costs.measured == drafter.experience.costs.measured
    monkeypatch.setattr(costs_module, "measure", lambda *_: CHEAP)
    endless = [1e308] * (drafter.n_max + 1)
    rows = {"draft": endless, "verify": endless, "observe": 0, "catch_up": 0}
    for damage in ("{", "[]", '{"draft": [], "verify": [], "observe": 0}', json.dumps(rows)):
        path.write_text(damage)
        (again,) = engine.with_spec(engine.options.spec).drafter.drafters
        assert again.experience.costs.measured == CHEAP


@pytest.mark.parametrize(
    "change",
    [
        {"model.activations": "f32"},
        {"model.kernels": "torch"},
        {"spec.draft.cache_type_k": "f16"},
        {"spec.draft.p_min": 0.0},
    ],
)
def test_costs_belong_to_what_was_chosen(
    engine: Engine, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Whatever changes what a round costs is measured again, and nothing else is."""
    Engine.load(engine.options.merge(change))
    assert len(costs_files(tmp_path)) == (1 if "spec.draft.p_min" in change else 2)
    assert not list((tmp_path / "cache" / "specdec").glob("tmp*"))


def test_costs_make_sense(engine: Engine) -> None:
    inner = engine.drafter.drafters[0].inner  # type: ignore[attr-defined]
    for n_ctx in (engine.n_ctx, 8):
        costs = measure(engine.target, inner, n_ctx, F32)
        assert min(costs.observe, costs.catch_up) > 0
        assert costs.draft[0] == 0.0
        assert len(costs.draft) == len(costs.verify) == inner.n_max + 1
        assert all(0 < a <= b for a, b in zip(costs.verify, costs.verify[1:], strict=False))


def test_a_cache_that_cannot_be_written_is_no_obstacle(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "costs.json"
    inner = engine.drafter.drafters[0].inner  # type: ignore[attr-defined]
    assert load_or_measure(path, engine.target, inner, 64, F32).observe > 0
    Experience(LiveCosts(CHEAP), N_MAX, path).save()
    assert not path.exists()


def test_experience_is_kept_from_run_to_run(engine: Engine, tmp_path: Path) -> None:
    with engine:
        engine.generate("ab", generate__n_predict=40)
        (drafter,) = engine.drafter.drafters
        assert isinstance(drafter, AutoLength)
        drafter.experience.costs.surcharge = 1.25
        drafter.experience.acceptance.add(drafted=4, accepted=2)
    assert len(list((tmp_path / "cache" / "specdec").glob("learned-*.json"))) == 1
    (again,) = engine.with_spec(engine.options.spec).drafter.drafters
    assert isinstance(again, AutoLength)
    for one in (drafter, again):
        found = one.experience
        assert found.costs.surcharge == 1.25
        assert found.acceptance.chances() == drafter.experience.acceptance.chances()
        assert found.allowance == drafter.experience.allowance


STATE: dict[str, Any] = {
    "tried": [2.0, 1.0], "accepted": [1.0, 0.5], "allowance": 0.25, "surcharge": 1.5
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"tried": [2.0]},
        {"tried": [2.0, 0.25]},
        {"tried": [1e9, 1.0]},
        {"accepted": [-1.0, 0.5]},
        {"accepted": [1.0, float("nan")]},
        {"allowance": float("inf")},
        {"allowance": 1e9},
        {"allowance": []},
        {"surcharge": 0.0},
        {"surcharge": 1e9},
        {"surcharge": "x"},
        {"surcharge": 10**400},
        {"other": 1.0},
    ],
)
def test_experience_that_makes_no_sense_is_ignored(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    fresh = Experience(LiveCosts(CHEAP), 2)
    path.write_text(json.dumps(STATE))
    known = Experience(LiveCosts(CHEAP), 2, path)
    assert known.allowance == 0.25
    assert known.costs.surcharge == 1.5
    for text in (json.dumps({**STATE, **change}), "{", "[]", "[" * 100_000, "\0", ""):
        path.write_text(text)
        found = Experience(LiveCosts(CHEAP), 2, path)
        assert found.allowance == fresh.allowance <= LARGEST_ALLOWANCE
        assert found.costs.surcharge == 1.0
        assert found.acceptance.chances() == fresh.acceptance.chances()
    path.write_bytes(b"\xff")
    assert Experience(LiveCosts(CHEAP), 2, path).allowance == fresh.allowance


def test_what_was_kept_counts_at_once(clock: list[float], tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    for costs, chance, pays in ((SLOW, 0.2, False), (SLOW, 0.95, True)):
        path.unlink(missing_ok=True)
        drafter = AutoLength(Always(), Experience(LiveCosts(costs), N_MAX, path))
        list(itertools.islice(rounds(drafter, costs, chance, clock), 200))
        drafter.save()
        again = AutoLength(Always(), Experience(LiveCosts(costs), N_MAX, path))
        first, _ = next(rounds(again, costs, chance, clock))
        assert first > 2 if pays else first == 0


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_text_is_the_same_as_without_drafts(engine: Engine, costs: Costs) -> None:
    fitting = replace(costs, draft=costs.draft[:5], verify=costs.verify[:5])
    drafter = engine.drafter.drafters[0]
    drafter.experience.costs = LiveCosts(fitting)  # type: ignore[attr-defined]
    options = {"generate__n_predict": 60, "sampling__seed": 5}
    for temp in (0.0, 1.0):
        plain = engine.session(speculate=False).generate("ab", sampling__temp=temp, **options)
        found = engine.session().generate("ab", sampling__temp=temp, **options)
        assert found.token_ids == plain.token_ids
        assert found.statistics.chose_lengths
        assert sum(found.statistics.lengths.values()) == found.statistics.rounds


def test_lengths_below_zero_are_refused() -> None:
    assert DraftOptions(n_max=AUTO).n_max == AUTO
    with pytest.raises(UsageError, match="must be auto, or 0 or more"):
        DraftOptions(n_max=-2)


def test_interpolation_never_falls() -> None:
    measured = {0: 1.0, 1: 3.0, 2: 2.0, 4: 6.0}
    assert costs_module._interpolate(measured, 4) == (1.0, 3.0, 3.0, 4.0, 6.0)


def test_drafters_without_a_model_keep_their_lengths(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "target.gguf")
    layer = {"model.path": target, "spec.types": ("ngram-mod",), "spec.draft.n_max": AUTO}
    (drafter,) = Engine.load(Options().merge(layer)).drafter.drafters
    assert not isinstance(drafter, AutoLength)
    assert torch.is_inference_mode_enabled() is False

"""Draft lengths from costs and acceptance, and how costs are measured and kept."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
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
from specdec.drafters.auto_length import Acceptance, AutoLength, best_length
from specdec.drafters.base import Draft
from specdec.drafters.costs import Costs, LiveCosts, load_or_measure, measure
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.options import AUTO, DraftOptions, Options, SamplingOptions

N_MAX = 8
CHEAP = Costs(tuple(0.02 * k for k in range(9)), tuple(1 + 0.03 * k for k in range(9)), 0.0)
"""Further rows cost next to nothing."""
SLOW = Costs(tuple(0.4 * k for k in range(9)), tuple(1 + 0.2 * k for k in range(9)), 0.1)
"""Only drafts that are nearly always accepted pay."""
MODERATE = Costs(
    tuple(0.1 + 0.02 * k for k in range(9)), tuple(1 + 0.15 * k for k in range(9)), 0.03
)
"""About what a small draft on a processor costs."""
DEAR = Costs(tuple(2.0 * k for k in range(9)), tuple(1.0 + k for k in range(9)), 0.0)
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


def lengths(costs: Costs, chance: float, n_rounds: int = 400) -> list[int]:
    """Lengths over some rounds in which every token is accepted with the same chance."""
    drafter, generator, found = AutoLength(Always(), LiveCosts(costs)), random.Random(1), []
    drafter.begin(SamplingOptions())
    for _ in range(n_rounds):
        length = len(drafter.draft(0, 100).tokens)
        found.append(length)
        if length:
            drafter.accept(accepted(length, chance, generator))
    return found


def accepted(length: int, chance: float, generator: random.Random) -> int:
    hits = (generator.random() < chance for _ in range(length))
    return next((i for i, hit in enumerate(hits) if not hit), length)


def test_the_best_length_maximises_tokens_per_second() -> None:
    assert best_length(CHEAP, [1.0] * N_MAX) == N_MAX
    assert best_length(CHEAP, [0.0] * N_MAX) == 0
    assert best_length(DEAR, [0.9] * N_MAX) == 0
    assert best_length(DEAR, [0.9] * N_MAX, shortest=1) == 1
    steps = Costs((0.0, 0.1, 0.1, 0.1), (1.0, 1.1, 1.5, 2.6), 0.0)
    speeds = [1.0, 1.7 / 1.2, 2.19 / 1.6, 2.533 / 2.7]
    assert speeds.index(max(speeds)) == best_length(steps, [0.7] * 3) == 1


def test_lengths_follow_the_acceptance() -> None:
    always = lengths(CHEAP, 1.0)[50:]
    assert set(always) == {0, N_MAX}
    assert always.count(0) < 0.02 * len(always), "only to see what it takes"
    assert set(lengths(DEAR, 0.5)) == {0}, "no draft could pay"
    slow = lengths(SLOW, 0.2)[100:]
    assert 0.95 * len(slow) < slow.count(0) < len(slow)
    never = lengths(CHEAP, 0.0)
    assert never[0] > 0
    assert never[50:].count(0) > 0.95 * len(never[50:])
    assert any(never[50:]), "an attempt now and then"


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


def test_costs_follow_the_rounds() -> None:
    live = LiveCosts(CHEAP)
    for _ in range(100):
        live.note(0, 3 * CHEAP.round(0))
    for length in (0, 1, 5):
        slower = 3 * CHEAP.round(length)
        assert live.round(length) == pytest.approx(slower, rel=0.01), "all rounds at once"
    live.note(1, 100.0)
    assert live.round(1) < 3.5 * CHEAP.round(1), "one slow round"
    for _ in range(1000):
        live.note(0, CHEAP.round(0))
        live.note(2, 1.4 * CHEAP.round(2))
    assert live.round(0) == pytest.approx(CHEAP.round(0), rel=0.05)
    assert live.round(3) == pytest.approx(1.4 * CHEAP.round(3), rel=0.05), "drafts cost more"


@pytest.mark.parametrize("costs", [CHEAP, MODERATE, SLOW, DEAR])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_hardly_slower_than_plain_decoding_or_any_fixed_length(costs: Costs, chance: float) -> None:
    """What a reply of 400 tokens takes, several times; the costs that are believed are 5 % off."""

    def seconds(run: Callable[[random.Random], Iterator[tuple[int, int]]]) -> float:
        found = []
        for seed in range(20):
            total, n_tokens = 0.0, 0
            for length, n_accepted in run(random.Random(seed)):
                total += costs.round(length)
                n_tokens += n_accepted + 1
                if n_tokens >= 400:
                    break
            found.append(total / n_tokens)
        return statistics.mean(found)

    def fixed(length: int) -> Callable[[random.Random], Iterator[tuple[int, int]]]:
        return lambda generator: iter(lambda: (length, accepted(length, chance, generator)), None)

    def automatic(generator: random.Random) -> Iterator[tuple[int, int]]:
        believed = replace(costs, verify=tuple(0.95 * cost for cost in costs.verify))
        drafter = AutoLength(Always(), LiveCosts(believed))
        drafter.begin(SamplingOptions())
        while True:
            length = len(drafter.draft(0, 100).tokens)
            n_accepted = accepted(length, chance, generator)
            if length:
                drafter.accept(n_accepted)
            drafter.costs.note(length, costs.round(length) * generator.uniform(0.9, 1.3))
            yield length, n_accepted

    best = min(seconds(fixed(length)) for length in range(N_MAX + 1))
    assert seconds(automatic) < 1.06 * best


RARELY = Costs(tuple(0.7 * k for k in range(9)), tuple(1 + 0.1 * k for k in range(9)), 0.0)
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
    drafter = AutoLength(listener, LiveCosts(RARELY))
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
        drafter = AutoLength(listener, LiveCosts(RARELY))
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
    drafter = AutoLength(listener, LiveCosts(RARELY))
    drafter.begin(SamplingOptions())
    for token in range(10):
        assert not drafter.draft(token, 100).tokens
        show(drafter, token)
    assert listener.shown == [[], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_rounds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = AutoLength(Always(), LiveCosts(CHEAP))
    drafter.begin(SamplingOptions())
    noted: list[tuple[int, float]] = []
    drafter.costs.note = lambda *pair: noted.append(pair)  # type: ignore[method-assign]
    clock = iter(range(10))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    drafter.observe(torch.zeros(3), None)
    length = len(drafter.draft(0, 100).tokens)
    drafter.accept(0)
    drafter.observe(torch.zeros(1), None)
    assert noted == [(length, 1)]
    drafter.draft(0, 1)
    drafter.observe(torch.zeros(1), None)
    assert len(noted) == 1, "cut short by the room"


def test_the_reason_of_the_end() -> None:
    drafter = AutoLength(Always(), LiveCosts(CHEAP))
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
    assert again.costs.measured == drafter.costs.measured
    monkeypatch.setattr(costs_module, "measure", lambda *_: CHEAP)
    for damage in ("{", "[]", '{"draft": [], "verify": [], "observe": 0}'):
        path.write_text(damage)
        (again,) = engine.with_spec(engine.options.spec).drafter.drafters
        assert again.costs.measured == CHEAP


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
        costs = measure(engine.target, inner, n_ctx)
        assert costs.draft[0] == 0.0
        assert len(costs.draft) == len(costs.verify) == inner.n_max + 1
        assert all(0 < a <= b for a, b in zip(costs.verify, costs.verify[1:], strict=False))


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    inner = engine.drafter.drafters[0].inner  # type: ignore[attr-defined]
    assert load_or_measure(engine.target, inner, 64, (), ()).observe > 0


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_text_is_the_same_as_without_drafts(engine: Engine, costs: Costs) -> None:
    fitting = replace(costs, draft=costs.draft[:5], verify=costs.verify[:5])
    drafter = engine.drafter.drafters[0]
    drafter.costs = LiveCosts(fitting)  # type: ignore[attr-defined]
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

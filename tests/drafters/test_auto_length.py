"""Draft lengths from costs and acceptance, and how costs are measured and kept."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor

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
    drafter, generator, found = AutoLength(Always(), costs), random.Random(1), []
    drafter.begin(SamplingOptions())
    for _ in range(n_rounds):
        length = len(drafter.draft(0, 100).tokens)
        found.append(length)
        if length:
            hits = (generator.random() < chance for _ in range(length))
            drafter.accept(next((i for i, hit in enumerate(hits) if not hit), length))
    return found


def test_the_best_length_maximises_tokens_per_second() -> None:
    assert best_length(CHEAP, [1.0] * N_MAX) == N_MAX
    assert best_length(CHEAP, [0.0] * N_MAX) == 0
    assert best_length(DEAR, [0.9] * N_MAX) == 0
    assert best_length(DEAR, [0.9] * N_MAX, shortest=1) == 1
    steps = Costs((0.0, 0.1, 0.1, 0.1), (1.0, 1.1, 1.5, 2.6), 0.0)
    speeds = [1.0, 1.7 / 1.2, 2.19 / 1.6, 2.533 / 2.7]
    assert speeds.index(max(speeds)) == best_length(steps, [0.7] * 3) == 1


def test_lengths_follow_the_acceptance() -> None:
    assert set(lengths(CHEAP, 1.0)[50:]) == {N_MAX}
    assert set(lengths(DEAR, 0.5)) == {0, 1}
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
        live.note(1, 3 * CHEAP.round(1))
    assert live.round(1) == pytest.approx(3 * CHEAP.round(1), rel=0.01)
    assert live.round(2) == pytest.approx(3 * CHEAP.round(2), rel=0.01), "as much slower"
    live.note(1, 100.0)
    assert live.round(1) < 3.5 * CHEAP.round(1), "one slow round"


def test_rounds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = AutoLength(Always(), CHEAP)
    drafter.begin(SamplingOptions())
    noted: list[tuple[int, float]] = []
    drafter._live.note = lambda *pair: noted.append(pair)  # type: ignore[method-assign]
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
    drafter = AutoLength(Always(), CHEAP)
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
    assert asdict(again.costs) == asdict(drafter.costs)
    monkeypatch.setattr(costs_module, "measure", lambda *_: CHEAP)
    for damage in ("{", "[]", '{"draft": [], "verify": [], "observe": 0}'):
        path.write_text(damage)
        (again,) = engine.with_spec(engine.options.spec).drafter.drafters
        assert again.costs == CHEAP


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
    drafter.costs = fitting  # type: ignore[attr-defined]
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

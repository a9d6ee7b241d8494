"""Benchmark runs: what is compared, that outputs agree, how numbers are summed up, hints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafts

from specdec.bench import (
    Configuration,
    Report,
    Result,
    bootstrap_interval,
    configurations,
    load_prompts,
    median,
    pooled,
    run_bench,
)
from specdec.drafters.base import Draft
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.generate import Round, RoundTimes
from specdec.hints import Circumstances, explain, likely_cause
from specdec.options import AUTO, Options
from specdec.stats import Statistics

PROMPTS = ["Hello, hello, hello", "one two one two one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, the same file as a perfect draft, one that is always wrong, and a DFlash draft."""
    folder = tmp_path_factory.mktemp("bench")
    tiny.write_target(folder / "target.gguf")
    tiny.write_target(folder / "liar.gguf", negated=True)
    tiny_drafts.write_dflash(folder / "dflash.gguf")
    return folder


def options(folder: Path, **values: Any) -> Options:
    layer = {"model.path": folder / "target.gguf", "model.n_ctx": 200, "sampling.temp": 0.0}
    layer |= {"bench.n_predict": 16, "bench.n_repetitions": 2}
    return Options().merge(layer | {name.replace("__", "."): v for name, v in values.items()})


def round_of(n_drafted: int, n_accepted: int, drafter: str = "draft-simple") -> Round:
    draft = Draft([7] * n_drafted, None, "n_max", drafter)
    return Round(0, draft, n_accepted, [7] * (n_accepted + 1), None, RoundTimes(1, 2, 3, 4))


def sum_of(*rounds: Round) -> Statistics:
    statistics = Statistics()
    for done in rounds:
        statistics.add(done)
    return statistics


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    drafts = (folder / "target.gguf", folder / "dflash.gguf")
    types = (("draft-simple",), ("ngram-simple", "draft-simple"), ("ngram-mod",))
    return run_bench(
        options(folder, bench__drafts=drafts, bench__types=types, bench__n_max=(1, 4)), PROMPTS
    )


def test_every_type_and_length_is_measured(report: Report, folder: Path) -> None:
    target = folder / "target.gguf"
    assert [result.configuration for result in report.results] == [
        Configuration(),
        Configuration(("draft-simple",), target, 1),
        Configuration(("draft-simple",), target, 4),
        Configuration(("ngram-simple", "draft-simple"), target, 1),
        Configuration(("ngram-simple", "draft-simple"), target, 4),
        Configuration(("ngram-mod",)),
    ]
    assert (report.n_prompts, report.n_repetitions, report.n_predict) == (2, 2, 16)


def test_lengths_are_obeyed(report: Report) -> None:
    """A perfect draft of n tokens: n + 1 tokens a round, but for the last round's limit."""
    plain, one, four, *_ = report.results
    assert plain.acceptance_length == 1
    assert plain.per_position == ()
    assert one.acceptance_length == 2
    assert one.per_position == (1.0,)
    assert 3.5 < four.acceptance_length <= 5
    assert len(four.per_position) == 4
    assert four.acceptance_rate == 1


def test_lengths_from_measured_costs(folder: Path, tmp_path: Path) -> None:
    """`auto` is one more length beside the others, with the same text."""
    layer: dict[str, Any] = {"bench__drafts": (folder / "target.gguf",), "bench__n_max": (2, AUTO)}
    plain, two, auto = run_bench(options(folder, **layer), PROMPTS[:1]).results
    assert (two.configuration.length, auto.configuration.length) == ("2", "auto")
    assert plain.by_prompt[0][0] == two.by_prompt[0][0] == auto.by_prompt[0][0]


def test_times_and_ratios(report: Report) -> None:
    plain = report.results[0]
    assert plain.ratio == 1
    for result in report.results:
        assert result.tokens_per_second > 0
        assert result.ratio > 0
        assert result.target_ms > 0
        assert min(result.draft_ms, result.verify_ms, result.observe_ms) >= 0
        assert result.interval is not None
        low, high = result.interval
        assert low <= result.acceptance_length <= high
    assert report.best.ratio == max(result.ratio for result in report.results)


def test_synthetic_acceptance_leaves_plain_decoding_alone(folder: Path) -> None:
    """A useless draft is accepted as often as asked; there is nothing to accept without one."""
    layer: dict[str, Any] = {"bench__drafts": (folder / "dflash.gguf",), "bench__n_max": (1,)}
    plain, one = run_bench(options(folder, spec__synth_len=2.0, **layer), PROMPTS[:1]).results
    assert plain.acceptance_length == 1
    assert one.per_position == (1.0,)
    assert one.acceptance_length == 2


def test_a_shortened_draft_is_the_draft_of_that_length(folder: Path) -> None:
    """Lengths share the weights of one draft; that must not change what is drafted."""
    both = run_bench(
        options(folder, bench__drafts=(folder / "dflash.gguf",), bench__n_max=(2, 4)), PROMPTS[:1]
    )
    for result in both.results[1:]:
        layer = {"spec.draft.path": folder / "dflash.gguf"}
        layer["spec.draft.n_max"] = result.configuration.n_max
        done = Engine.load(options(folder).merge(layer)).generate(
            PROMPTS[0], generate__n_predict=16
        )
        assert done.statistics.acceptance_length == result.acceptance_length
        assert done.statistics.acceptance_rate == result.acceptance_rate


def test_runs_are_interleaved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = Engine.generate

    def generate(self: Engine, prompt: Any, **overrides: Any) -> Any:
        seen.append(self.drafter.name)
        return original(self, prompt, **overrides)

    monkeypatch.setattr(Engine, "generate", generate)
    told: list[tuple[int, int]] = []
    asked = options(folder, bench__types=(("ngram-simple",),))
    run_bench(asked, PROMPTS, lambda done, total: told.append((done, total)))
    assert seen == ["none", "ngram-simple"] * 5  # a warm-up, then 2 prompts x 2 repetitions
    assert told == [(done, 8) for done in range(1, 9)]


def test_tables_do_not_remember_the_run_before(folder: Path) -> None:
    """The second repetition of a prompt must not be drafted from the first one's reply."""
    values = {"spec__ngram_mod__n_match": 4, "spec__ngram_mod__n_min": 0}
    types = (("ngram-mod",),)
    once = run_bench(
        options(folder, bench__types=types, bench__n_repetitions=1, **values), PROMPTS[:1]
    )
    thrice = run_bench(
        options(folder, bench__types=types, bench__n_repetitions=3, **values), PROMPTS[:1]
    )
    assert thrice.results[1].acceptance_length == once.results[1].acceptance_length


def test_each_draft_is_run_by_its_own_type(folder: Path) -> None:
    drafts = (folder / "dflash.gguf", folder / "target.gguf")
    found = configurations(options(folder, bench__drafts=drafts, bench__n_max=(2,)))
    assert found == [
        Configuration(("draft-dflash",), drafts[0], 2),
        Configuration(("draft-simple",), drafts[1], 2),
    ]
    assert Configuration(("ngram-mod", "draft-simple")).name == "ngram-mod,draft-simple"


def test_nothing_to_compare(folder: Path) -> None:
    with pytest.raises(UsageError, match="give --spec-type or -md"):
        configurations(options(folder))
    with pytest.raises(UsageError, match="give --spec-type or -md"):
        configurations(options(folder, bench__types=(("none",),)))


def test_a_draft_that_is_missing(folder: Path) -> None:
    with pytest.raises(UsageError, match="requires a draft model"):
        run_bench(options(folder, bench__types=(("draft-simple",),)), PROMPTS)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"n_max": ()}, "--spec-draft-n-max"),
        ({"n_max": (0,)}, "--spec-draft-n-max"),
        ({"n_predict": 0}, "--predict"),
        ({"n_repetitions": 0}, "--repetitions"),
        ({"plot": Path("x.jpg")}, "--plot"),
    ],
)
def test_values_that_cannot_work(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        Options().merge({f"bench.{name}": value for name, value in values.items()})


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "category": "x"}\n\n{"prompt": "b"}\n')
    assert load_prompts(tmp_path / "p.jsonl") == ["a", "b"]
    (tmp_path / "p.txt").write_text("first\n\nsecond\n")
    assert load_prompts(tmp_path / "p.txt") == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}\n[]\n', "line 2: expected an object"),
        (json.dumps({"prompt": 3}), "line 1: expected an object"),
        ("\n", "holds no prompts"),
    ],
)
def test_prompt_files_with_mistakes(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_prompts(tmp_path / "p.jsonl")
    with pytest.raises(UsageError, match="cannot read"):
        load_prompts(tmp_path / "none.txt")


def test_sums_over_requests() -> None:
    runs = [sum_of(round_of(3, 3), round_of(3, 1)), sum_of(round_of(3, 0)), sum_of()]
    total = pooled(runs)
    assert (total.rounds, total.emitted, total.drafted, total.accepted) == (3, 7, 9, 4)
    assert total.per_position == [2 / 3, 1 / 3, 1 / 3]
    assert total.drafters["draft-simple"].drafts_accepted == 2
    assert (total.draft_seconds, total.observe_seconds) == (3, 12)
    assert runs[0].drafters["draft-simple"].accepted_at == [2, 1, 1]  # not changed


def test_medians() -> None:
    assert median(iter([3.0, 1.0, 2.0])) == 2
    assert median([]) == 0


def test_the_interval_is_over_prompts() -> None:
    assert bootstrap_interval([(20, 10)]) is None
    assert bootstrap_interval([(20, 10), (0, 0)]) is None
    assert bootstrap_interval([(20, 10)] * 5) == (2.0, 2.0)
    low, high = bootstrap_interval([(10, 10), (20, 10), (30, 10), (40, 10)]) or (0, 0)
    assert 1 <= low < 2.5 < high <= 4
    # Long replies weigh more: the estimate is a ratio of sums.
    low, high = bootstrap_interval([(1000, 1000)] * 9 + [(4, 1)]) or (0, 0)
    assert high < 1.02


def test_best_of_several() -> None:
    def result(name: str, ratio: float) -> Result:
        configuration = Configuration((name,) if name else ())
        return Result(configuration, 1, None, 0, (), 0, 0, 0, 0, 1, ratio, None)

    slow = Report(None, 1, 1, 1, (result("", 1.0), result("ngram-mod", 0.9)))
    assert slow.best.configuration.types == ()
    fast = Report(None, 1, 1, 1, (result("", 1.0), result("ngram-mod", 1.1)))
    assert fast.best.configuration.types == ("ngram-mod",)


FLAT = (0.6, 0.4, 0.25)
LOW = (0.1, 0.05)


@pytest.mark.parametrize(
    ("rates", "n_drafts", "facts", "cause"),
    [
        (FLAT, 100, {}, None),
        (LOW, 15, {}, None),
        (LOW, 16, {}, "another version of this target"),
        ((), 100, {}, "target mismatch"),
        ((0.04,), 100, {}, "target mismatch"),
        (LOW, 100, {"has_template": True}, "without the model's chat template"),
        (LOW, 100, {"has_template": True, "used_template": True}, "another version"),
        (LOW, 100, {"n_text": 600, "n_trained": 512}, "window of 512"),
        (LOW, 100, {"n_text": 500, "n_trained": 512}, "another version"),
        (LOW, 100, {"cache_types": ("bf16", None)}, "the draft's cache is bf16"),
        (LOW, 100, {"cache_types": ("f32", None)}, "another version"),
        (LOW, 100, {"can_think": True}, "--reasoning off"),
        (FLAT, 100, {"can_think": True, "has_template": True}, None),
        ((0.7, 0.5, 0.02), 100, {}, "try --spec-draft-n-max 2"),
        ((0.7, 0.5, 0.02), 100, {"chose_lengths": True}, None),
        (LOW, 100, {"chose_lengths": True}, "another version"),
    ],
)
def test_causes(rates: tuple[float, ...], n_drafts: int, facts: Any, cause: str | None) -> None:
    found = likely_cause(rates, n_drafts, Circumstances(**facts))
    assert (found is None) == (cause is None)
    assert cause is None or (found is not None and cause in found and "\n" not in found)


def test_the_cause_of_a_real_run(folder: Path) -> None:
    layer = {"spec.draft.path": folder / "liar.gguf", "generate.n_predict": 40}
    engine = Engine.load(options(folder).merge(layer))
    done = engine.generate(PROMPTS[0])
    cause = explain(engine, done.statistics, used_template=False)
    assert cause is not None
    assert cause.startswith("draft-simple: only 0% of the first drafted tokens are accepted")
    assert "target mismatch" in cause


def test_a_run_without_drafts_says_so(folder: Path) -> None:
    layer = {"spec.draft.path": folder / "liar.gguf", "generate.n_predict": 8}
    engine = Engine.load(options(folder).merge({**layer, "spec.draft.n_max": 0}))
    done = engine.generate(PROMPTS[0])
    cause = explain(engine, done.statistics, used_template=False)
    assert cause == "draft-simple: no drafts were made (the draft length is 0)"
    engine = Engine.load(options(folder).merge({**layer, "spec.draft.p_min": 1.1}))
    done = engine.generate(PROMPTS[0])
    cause = explain(engine, done.statistics, used_template=False)
    assert cause == "draft-simple: no drafts were made"


def test_a_run_that_chose_to_make_no_drafts_is_not_blamed(folder: Path) -> None:
    engine = Engine.load(options(folder))
    silent = Statistics(rounds=40, emitted=40, chose_lengths=True)
    assert explain(engine, silent, used_template=False) is None
    assert explain(engine, pooled([silent, Statistics()]), used_template=False) is None


def test_a_run_that_chose_its_lengths_is_not_told_another(folder: Path) -> None:
    """Positions that it seldom drafted are seldom accepted."""
    engine = Engine.load(options(folder))
    rounds = [round_of(2, 2, "draft-simple")] * 40 + [round_of(3, 2, "draft-simple")] * 2
    statistics = sum_of(*rounds, round_of(3, 3, "draft-simple"))
    cause = explain(engine, statistics, used_template=False)
    assert cause is not None
    assert "--spec-draft-n-max 2" in cause
    statistics.chose_lengths = True
    assert explain(engine, statistics, used_template=False) is None


def test_ngrams_are_not_blamed(folder: Path) -> None:
    engine = Engine.load(options(folder))
    statistics = sum_of(*[round_of(3, 0, "ngram-simple")] * 40)
    assert explain(engine, statistics, used_template=False) is None

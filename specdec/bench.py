"""What speculation is worth: spec types and draft lengths side by side on the same prompts.

Runs are interleaved (A B A B) so that a slow minute hits all alike, and summed up by medians.
Results are plain data. Knows the engine only.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from specdec.chat import Message
from specdec.drafters.base import Draft, Drafter, FirstOf
from specdec.drafters.selection import draft_type
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.gguf_file import GGUFFile
from specdec.hints import explain
from specdec.options import AUTO, DFLASH_TYPES, RANDOM_SEED, Options, SamplingOptions
from specdec.stats import DrafterStatistics, Statistics

DEFAULT_PROMPTS = (
    "Why is the sky blue? Answer in three sentences.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Name the planets of the solar system in order from the Sun, one per line.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show your steps.",
    "Rewrite more politely: Send me the report today.",
    "List ten words that rhyme with 'light', separated by commas.",
    "Explain what a hash table is to a beginner.",
    "Write a short story about a lighthouse keeper who finds a letter.",
)
"""Prompts of several kinds, for those who bring none."""
N_RESAMPLES = 2000
INTERVAL = f"95 %, bootstrap over prompts, {N_RESAMPLES} resamples"
"""What the interval of the acceptance length is."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode."""

    types: tuple[str, ...] = ()
    """Spec types; () = no speculation."""
    draft: Path | None = None
    n_max: int | None = None
    """Longest draft, may be `AUTO`; None where the type's own options decide."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return ",".join(self.types) or "none"

    @property
    def length(self) -> str:
        """The longest draft as it is given on the command line; empty without one."""
        return "" if self.n_max is None else "auto" if self.n_max == AUTO else str(self.n_max)

    @property
    def learns(self) -> bool:
        """Whether a drafter may keep what it saw for later requests."""
        return any(not name.startswith("draft-") for name in self.types)


@dataclass(frozen=True, slots=True)
class Result:
    """What one configuration reached. Times are milliseconds per round, medians over runs."""

    configuration: Configuration
    acceptance_length: float
    """Emitted tokens per target pass, rounds without a draft included."""
    interval: tuple[float, float] | None
    """Of the acceptance length, see `INTERVAL`; None for a single prompt."""
    acceptance_rate: float
    per_position: tuple[float, ...]
    """Share of drafts in which position i was accepted."""
    draft_ms: float
    target_ms: float
    verify_ms: float
    observe_ms: float
    tokens_per_second: float
    ratio: float
    """Speed relative to no speculation on the same prompt in the same pass; median."""
    cause: str | None
    """Why acceptance is low, if it is."""
    by_prompt: tuple[tuple[int, int], ...] = ()
    """(tokens emitted, target passes) for each prompt, summed over its runs."""


@dataclass(frozen=True, slots=True)
class Report:
    """All results; the first is the one without speculation."""

    model: Path | None
    n_prompts: int
    n_repetitions: int
    n_predict: int
    results: tuple[Result, ...]
    interval: str = INTERVAL

    @property
    def best(self) -> Result:
        """The fastest; no speculation if nothing beats it."""
        return max(self.results, key=lambda result: result.ratio)


def load_prompts(path: Path, flag: str = "--prompts") -> list[str]:
    """The prompts in a file: `.jsonl` with a `prompt` in each line, else one prompt a line.

    Raises `UsageError`, which names ``flag``, for a file that cannot be read or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{flag}: cannot read {path}: {reason}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt_of(line, f"{flag}: {path}, line {number}") for number, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise UsageError(f"{flag}: {path} holds no prompts")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error.msg}") from None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str):
        raise UsageError(f"{where}: expected an object with a text 'prompt'")
    return prompt


def configurations(options: Options) -> list[Configuration]:
    """What `BenchOptions` ask for, without the run without speculation.

    Without types every draft is run by the type that it is made for. Raises `UsageError` when
    nothing is asked for.
    """
    bench = options.bench
    kinds = {path: _kind_of(path) for path in bench.drafts}
    wanted = bench.types or tuple((kind,) for kind in dict.fromkeys(kinds.values()))
    found: list[Configuration] = []
    for types in wanted:
        names = tuple(name for name in types if name != "none")
        if not names:
            continue
        if not any(name.startswith("draft-") for name in names):
            found.append(Configuration(names))
            continue
        for draft, n_max in itertools.product(_drafts_for(names, kinds), bench.n_max):
            found.append(Configuration(names, draft, n_max))
    if not found:
        raise UsageError("bench needs something to compare: give --spec-type or -md")
    return list(dict.fromkeys(found))


def _kind_of(path: Path) -> str:
    with GGUFFile.open(path) as file:
        return draft_type(file)


def _drafts_for(types: tuple[str, ...], kinds: dict[Path, str]) -> Sequence[Path | None]:
    """The drafts that the types run; all of them if none is of the kind, so that loading says so.

    `draft-dflash` stands for its whole family where there is no plain one.
    """
    fitting = [path for path, kind in kinds.items() if kind in types]
    if not fitting and "draft-dflash" in types:
        fitting = [path for path, kind in kinds.items() if kind in DFLASH_TYPES]
    return fitting or list(kinds) or [None]


def run_bench(options: Options, prompts: Sequence[str], progress: Progress | None = None) -> Report:
    """Decodes every prompt with every configuration, `BenchOptions.n_repetitions` times.

    All runs use one seed, so that with verification by matching they emit the same tokens.
    ``progress`` is told (runs done, runs in all). Raises what loading raises.
    """
    bench = options.bench
    contestants = _load(options, configurations(options))
    done, n_runs = 0, len(contestants) * len(prompts) * bench.n_repetitions
    for contestant in contestants:
        contestant.run(prompts[0], n_predict=2)  # first-time work is not measured
        contestant.runs.clear()
    for _ in range(bench.n_repetitions):
        for contestant in contestants:
            contestant.forget()
        for prompt, contestant in itertools.product(prompts, contestants):
            contestant.run(prompt, bench.n_predict)
            done += 1
            if progress is not None:
                progress(done, n_runs)
    return Report(
        model=options.model.path,
        n_prompts=len(prompts),
        n_repetitions=bench.n_repetitions,
        n_predict=bench.n_predict,
        results=tuple(_result(one, contestants[0], len(prompts)) for one in contestants),
    )


class _Capped:
    """A drafter whose drafts have at most ``n_longest`` tokens; the weights are shared."""

    def __init__(self, inner: Drafter, n_longest: int) -> None:
        self.inner = inner
        self.name, self.taps = inner.name, inner.taps
        self.n_max = min(inner.n_max, n_longest)

    def __copy__(self) -> Self:
        return type(self)(copy.copy(self.inner), self.n_max)

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        return self.inner.begin(sampling, kept)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self.inner.observe(tokens, hidden)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`."""
        return self.inner.draft(last_token, min(room, self.n_max))

    def accept(self, accepted: int) -> None:
        """See `Drafter.accept`."""
        self.inner.accept(accepted)


class _Contestant:
    """A configuration with its engine, and the statistics of its runs in their order."""

    def __init__(self, configuration: Configuration, engine: Engine) -> None:
        self.configuration = configuration
        self.engine = engine
        self.runs: list[Statistics] = []

    def forget(self) -> None:
        """Gives tables that learn from request to request up, so that no text is met twice."""
        if self.configuration.learns:
            self.engine = self.engine.with_spec(self.engine.options.spec)

    @property
    def used_template(self) -> bool:
        """Whether prompts are messages."""
        wants = self.engine.options.generate.conversation
        return self.engine.chat_template is not None if wants is None else wants

    def run(self, prompt: str, n_predict: int) -> None:
        """Decodes one prompt in a session of its own."""
        turn = [Message(role="user", content=prompt)] if self.used_template else prompt
        reply = self.engine.generate(turn, generate__n_predict=n_predict)
        self.runs.append(reply.statistics)


def _load(options: Options, wanted: Sequence[Configuration]) -> list[_Contestant]:
    """One target for all, the weights of a draft once for all its lengths; plain decoding first."""
    seed = 0 if options.sampling.seed == RANDOM_SEED else options.sampling.seed
    none = {
        "spec.types": ("none",),
        "spec.draft.path": None,
        "spec.synth_len": None,
        "spec.synth_rates": None,
        "sampling.seed": seed,
    }
    base = Engine.load(options.merge(none))
    contestants = [_Contestant(Configuration(), base)]
    shared: dict[tuple[tuple[str, ...], Path | None], Engine] = {}
    for one in wanted:
        if one.learns or one.n_max == AUTO:
            contestants.append(_Contestant(one, _with_drafters(base, one, one.n_max, options)))
            continue
        if (one.types, one.draft) not in shared:
            same = [c for c in wanted if (c.types, c.draft) == (one.types, one.draft)]
            longest = max(c.n_max or 0 for c in same)
            shared[one.types, one.draft] = _with_drafters(base, one, longest, options)
        contestants.append(_Contestant(one, _shortened(shared[one.types, one.draft], one.n_max)))
    return contestants


def _with_drafters(base: Engine, one: Configuration, n_max: int | None, options: Options) -> Engine:
    layer: dict[str, Any] = {"spec.types": one.types, "spec.draft.path": one.draft}
    if n_max is not None:
        layer["spec.draft.n_max"] = n_max
    return base.with_spec(options.merge(layer).spec)


def _shortened(engine: Engine, n_max: int | None) -> Engine:
    if n_max is None:
        return engine
    short = copy.copy(engine)
    short.drafter = FirstOf([_Capped(drafter, n_max) for drafter in engine.drafter.drafters])
    return short


def _result(one: _Contestant, plain: _Contestant, n_prompts: int) -> Result:
    total = pooled(one.runs)
    sums = [pooled(one.runs[index::n_prompts]) for index in range(n_prompts)]
    by_prompt = tuple((each.emitted, each.rounds) for each in sums)
    return Result(
        configuration=one.configuration,
        acceptance_length=total.acceptance_length,
        interval=bootstrap_interval(by_prompt),
        acceptance_rate=total.acceptance_rate,
        per_position=tuple(total.per_position),
        draft_ms=_per_round(one.runs, "draft_seconds"),
        target_ms=_per_round(one.runs, "target_seconds"),
        verify_ms=_per_round(one.runs, "verify_seconds"),
        observe_ms=_per_round(one.runs, "observe_seconds"),
        tokens_per_second=median(run.generate_speed for run in one.runs),
        ratio=median(
            mine.generate_speed / its.generate_speed
            for mine, its in zip(one.runs, plain.runs, strict=True)
            if its.generate_speed
        ),
        cause=explain(one.engine, total, used_template=one.used_template),
        by_prompt=by_prompt,
    )


def _per_round(runs: Sequence[Statistics], name: str) -> float:
    return median(1000 * getattr(run, name) / run.rounds for run in runs if run.rounds)


def median(values: Iterable[float]) -> float:
    """The middle value; 0 of none."""
    held = list(values)
    return statistics.median(held) if held else 0.0


def pooled(runs: Sequence[Statistics]) -> Statistics:
    """The sums over several requests; prompt lengths are the longest one's."""
    total = Statistics(n_prompt=max((run.n_prompt for run in runs), default=0))
    for run in runs:
        total.prompt_seconds += run.prompt_seconds
        total.rounds += run.rounds
        total.emitted += run.emitted
        total.draft_seconds += run.draft_seconds
        total.target_seconds += run.target_seconds
        total.verify_seconds += run.verify_seconds
        total.observe_seconds += run.observe_seconds
        total.chose_lengths |= run.chose_lengths
        for name, one in run.drafters.items():
            _add(total.drafters.setdefault(name, DrafterStatistics()), one)
    return total


def _add(total: DrafterStatistics, one: DrafterStatistics) -> None:
    total.drafts += one.drafts
    total.drafts_accepted += one.drafts_accepted
    total.drafted += one.drafted
    total.accepted += one.accepted
    total.draft_seconds += one.draft_seconds
    pairs = itertools.zip_longest(total.accepted_at, one.accepted_at, fillvalue=0)
    total.accepted_at = [left + right for left, right in pairs]


def bootstrap_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """The 95 % interval of sum(emitted) / sum(rounds) for (emitted, rounds) of each prompt.

    Prompts are drawn with replacement, since tokens of one prompt are not independent. None for
    fewer than two prompts. Always the same for the same counts.
    """
    table = np.array([pair for pair in counts if pair[1]], dtype=np.float64)
    if len(table) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(table), size=(N_RESAMPLES, len(table)))
    sums = table[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], [2.5, 97.5])
    return float(low), float(high)

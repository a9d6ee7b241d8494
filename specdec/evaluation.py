"""`specdec eval`: how many tokens a target pass yields with a draft, by kind of prompt.

Runs what `specdec bench` runs, greedily and at other temperatures, beside drafters that need no
training, and sums up by category.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.bench import (
    Configuration,
    Progress,
    Result,
    bootstrap_interval,
    configurations,
    load_prompts,
    run_bench,
)
from specdec.drafters.selection import draft_type
from specdec.errors import UsageError
from specdec.gguf_file import GGUFFile
from specdec.options import DFLASH_TYPES, Options
from specdec.resources import open_target

BASELINES = (("ngram-simple",), ("ngram-mod",))
"""What every draft is compared with, besides no draft and an untrained one."""
RANDOM = "untrained"
OTHER = "all"
"""Category of prompts that have none."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one configuration reached at one temperature."""

    name: str
    temperature: float
    acceptance_length: float
    """Tokens per target pass, pooled over all rounds of all prompts."""
    interval: tuple[float, float] | None
    """95 %, bootstrap over prompts."""
    mean_over_prompts: float
    per_position: tuple[float, ...]
    """Share of drafts in which position i was accepted."""
    by_category: dict[str, float]
    ratio: float
    """Speed relative to no speculation, median over prompts of runs in turns."""


def load_categories(path: Path | None, n_prompts: int) -> list[str]:
    """The `category` of each prompt in a `.jsonl` file of prompts; `OTHER` where there is none."""
    if path is None or path.suffix != ".jsonl":
        return [OTHER] * n_prompts
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [str(json.loads(line).get("category", OTHER)) for line in lines]


def run_evaluation(
    options: Options,
    temperatures: Sequence[float],
    progress: Progress | None = None,
) -> list[Evaluation]:
    """Every configuration on every prompt of `BenchOptions.prompts`, at each temperature.

    Raises `UsageError` without prompts or drafts and what loading raises.
    """
    if options.bench.prompts is None:
        raise UsageError("--prompts is required; give a file of prompts to measure with")
    prompts = load_prompts(options.bench.prompts)
    categories = load_categories(options.bench.prompts, len(prompts))
    found: list[Evaluation] = []
    with tempfile.TemporaryDirectory() as folder:
        untrained = _write_untrained(options, Path(folder))
        drafts = (*options.bench.drafts, *untrained)
        options = options.merge({"bench.drafts": drafts})
        options = options.merge({"bench.types": _with_baselines(options)})
        for index, temperature in enumerate(temperatures):
            done = _Shifted(progress, index, len(temperatures))
            run = options.merge({"sampling.temp": temperature})
            for result in run_bench(run, prompts, done).results:
                found.append(_summed_up(result, categories, temperature, untrained))
    return found


class _Shifted:
    """Tells the progress of one of several runs as part of all."""

    def __init__(self, progress: Progress | None, index: int, n_runs: int) -> None:
        self._progress, self._index, self._n_runs = progress, index, n_runs

    def __call__(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(self._index * total + done, self._n_runs * total)


def _with_baselines(options: Options) -> tuple[tuple[str, ...], ...]:
    """The types that are asked for, or those of the drafts, and the baselines."""
    wanted = options.bench.types or tuple(
        dict.fromkeys(one.types for one in configurations(options))
    )
    return wanted + tuple(types for types in BASELINES if types not in wanted)


def _write_untrained(options: Options, folder: Path) -> tuple[Path, ...]:
    """An untrained plain draft beside a trained one of the DFlash family."""
    from specdec.train.draft_file import write_fresh_draft
    from specdec.train.shape import default_shape

    for path in options.bench.drafts:
        with GGUFFile.open(path) as draft:
            if draft_type(draft) not in DFLASH_TYPES:
                continue
            mask = draft.get_int("tokenizer.ggml.mask_token_id", default=None)
            d2t = tuple(draft.load("d2t").tolist()) if "d2t" in draft.tensors else ()
        with open_target(options) as target:
            shape = default_shape(target, "draft-dflash", mask_token=mask, d2t=d2t)
            random = folder / f"{RANDOM}.gguf"
            write_fresh_draft(random, target, shape)
        return (random,)
    return ()


def _summed_up(
    result: Result, categories: Sequence[str], temperature: float, untrained: Sequence[Path]
) -> Evaluation:
    counts: dict[str, tuple[int, int]] = {}
    for category, (emitted, rounds) in zip(categories, result.by_prompt, strict=True):
        before = counts.get(category, (0, 0))
        counts[category] = (before[0] + emitted, before[1] + rounds)
    means = [emitted / rounds for emitted, rounds in result.by_prompt if rounds]
    return Evaluation(
        name=configuration_name(result.configuration, untrained),
        temperature=temperature,
        acceptance_length=result.acceptance_length,
        interval=bootstrap_interval(result.by_prompt),
        mean_over_prompts=sum(means) / max(1, len(means)),
        per_position=result.per_position,
        by_category={name: e / r for name, (e, r) in counts.items() if r},
        ratio=result.ratio,
    )


def configuration_name(one: Configuration, untrained: Sequence[Path] = ()) -> str:
    """What a configuration is called: its types, draft length and, if untrained, that."""
    if one.draft in untrained:
        return f"{one.name} {one.length} {RANDOM}"
    return f"{one.name} {one.length}".rstrip()

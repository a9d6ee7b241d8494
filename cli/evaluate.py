"""`specdec eval`: acceptance by position and kind of prompt, as a table or JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from specdec.errors import UsageError
from specdec_cli.bench import FILE_WIDTH, runs_progress
from specdec_cli.flags.model import MODEL, ROPE
from specdec_cli.flags.sampling import SAMPLING
from specdec_cli.flags.spec import NGRAM
from specdec_cli.flags.text import CHAT
from specdec_cli.flags.tools import BENCH_DRAFT, EVAL
from specdec_cli.given import Given

if TYPE_CHECKING:
    from specdec.evaluation import Evaluation

PANELS = (EVAL, MODEL, BENCH_DRAFT, NGRAM, SAMPLING, CHAT, ROPE)


def evaluate(given: Given) -> None:
    """Measures how many tokens a target pass yields with a draft.

    [bold]specdec eval -m target.gguf -md draft.gguf --prompts prompts.jsonl[/bold]

    Beside no draft, n-grams and an untrained draft, greedily and at temperature 1, by position of
    the draft and by the 'category' of the prompts.
    """
    options = given.options()
    if options.model.path is None and options.model.hf_repo is None:
        raise UsageError("--model is required; give the target's GGUF file with -m")
    if options.bench.prompts is None:
        raise UsageError("--prompts is required; give a file of prompts to measure with")
    options = options.merge({"bench.n_repetitions": 1})
    from specdec.bench import configurations
    from specdec.evaluation import run_evaluation

    configurations(options)  # a mistake is found before anything is loaded
    with runs_progress() as progress:
        found = run_evaluation(options, options.evaluate.temperatures, progress)
    if options.bench.json:
        print(json.dumps([dataclasses.asdict(one) for one in found], indent=2, ensure_ascii=False))
    else:
        _print(found, options.bench.n_predict)


def _print(found: list[Evaluation], n_predict: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    categories = list(dict.fromkeys(name for one in found for name in one.by_category))
    for temperature in dict.fromkeys(one.temperature for one in found):
        table = Table(
            title=f"tokens per target pass, temperature {temperature:g}, up to {n_predict} tokens "
            "a prompt; interval: 95 %, bootstrap over prompts",
            title_justify="left",
        )
        columns = ("", "length", "95 %", "mean", "speed", "by position", *categories)
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index in (0, 5) else "right")
        for one in found:
            if one.temperature == temperature:
                table.add_row(*_cells(one, categories))
        console.print(table)


def _cells(one: Evaluation, categories: list[str]) -> list[str]:
    low, high = one.interval or (one.acceptance_length, one.acceptance_length)
    return [
        one.name,
        f"{one.acceptance_length:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{one.mean_over_prompts:.3f}",
        f"{one.ratio:.2f}x",
        " ".join(f"{rate:.2f}" for rate in one.per_position[:8]),
        *(f"{one.by_category.get(name, 0):.2f}" for name in categories),
    ]

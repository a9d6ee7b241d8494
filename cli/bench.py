"""`specdec bench`: spec types and draft lengths side by side, as a table, JSON or a plot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import UsageError
from specdec_cli.flags import Flag
from specdec_cli.flags.model import MODEL, ROPE
from specdec_cli.flags.sampling import SAMPLING
from specdec_cli.flags.spec import NGRAM
from specdec_cli.flags.text import CHAT
from specdec_cli.flags.tools import BENCH, BENCH_DRAFT
from specdec_cli.given import Given

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.bench import Report, Result
    from specdec.options import Options

PANELS = (BENCH, MODEL, BENCH_DRAFT, NGRAM, SAMPLING, CHAT, ROPE)

FILE_WIDTH = 200
"""Columns of the table where it is not shown on a terminal."""


def bench(given: Given) -> None:
    """Measures what speculation is worth on your prompts.

    [bold]specdec bench -m target.gguf -md draft.gguf --spec-draft-n-max 1,3,7[/bold]

    Compares spec types and draft lengths with no speculation, run by run in turns, and ends with
    the command line of the fastest.
    """
    options = given.options()
    if options.bench.plot is not None:
        from specdec_cli.plot import require_matplotlib

        require_matplotlib()
    from specdec.bench import DEFAULT_PROMPTS, configurations, load_prompts, run_bench

    if options.model.path is None and options.model.hf_repo is None:
        raise UsageError("--model is required; give the target's GGUF file with -m")
    configurations(options)  # a mistake is found before anything is loaded
    prompts = list(DEFAULT_PROMPTS)
    if options.generate.prompt is not None:
        prompts = [options.generate.prompt]
    elif options.bench.prompts is not None:
        prompts = load_prompts(options.bench.prompts)
    with runs_progress() as progress:
        report = run_bench(_with_recommended(given, options), prompts, progress)
    command = winning_command(given, report.best)
    if options.bench.plot is not None:
        from specdec_cli.plot import draw

        draw(report, options.bench.plot)
    if options.bench.json:
        print(as_json(report, command))
    else:
        _print_report(report, command)


def _with_recommended(given: Given, options: Options) -> Options:
    from specdec.resources import open_target, recommended_sampling

    with open_target(options) as file:
        return given.options(recommended_sampling(file))


@contextlib.contextmanager
def runs_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while runs are made, on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def winning_command(given: Given, best: Result) -> str:
    """The command line that runs what was fastest, with the flags that shaped the measurement."""
    words = ["specdec", "generate"]
    flags = [flag for panel in PANELS for flag in panel.flags]
    for path, value in given.command_line.items():
        if not path.startswith("bench.") and path != "generate.prompt":
            words += _words(path, value, flags)
    one = best.configuration
    if one.draft is not None:
        words += ["-md", str(one.draft)]
    if one.types:
        words += ["--spec-type", one.name]
    if one.n_max is not None:
        words += ["--spec-draft-n-max", one.length]
    return shlex.join(words)


def _words(path: str, value: Any, flags: list[Flag]) -> Iterator[str]:
    """The flag that sets a leaf to ``value``, in the words of the command line."""
    flag = next(flag for flag in flags if flag.path == path)
    if isinstance(value, bool):
        yield flag.names[-1] if value else flag.off[-1]
        return
    parts = value if flag.appends else [value]
    for part in parts:
        yield flag.name
        yield _spelled(path, part)


def _spelled(path: str, value: Any) -> str:
    """A value as its flag reads it."""
    if path == "sampling.logit_bias":
        return f"{value[0]}{value[1]:+g}"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return ";".join(value) if isinstance(value, tuple) else str(value)


def as_json(report: Report, command: str) -> str:
    """Everything that was measured, and the winning command line."""
    mapping = dataclasses.asdict(report)
    mapping["best"] = {"name": report.best.configuration.name, "command": command}
    return json.dumps(mapping, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: object) -> str:
    assert isinstance(value, Path)
    return str(value)


def _print_report(report: Report, command: str) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(
        f"{report.n_prompts} prompts x {report.n_repetitions} runs, up to {report.n_predict} "
        f"tokens; acceptance length: tokens per target pass, {report.interval}; times: ms per "
        "round, medians",
        markup=False,
    )
    _print_table(console, report)
    for result in report.results:
        if result.per_position:
            rates = ", ".join(f"{rate:.2f}" for rate in result.per_position)
            console.print(f"{_label(result)}: accepted per position {rates}", markup=False)
    for cause in dict.fromkeys(result.cause for result in report.results if result.cause):
        console.print(f"hint: {cause}", style="yellow", markup=False)
    console.print(f"fastest: {command}", style="bold", markup=False)


def _print_table(console: Console, report: Report) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for number, heading in enumerate(
        "types|n-max|length|interval|rate|draft|target|verify|observe|tokens/s|ratio".split("|")
    ):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    drafts = {result.configuration.draft for result in report.results} - {None}
    for result in report.results:
        table.add_row(*_cells(result, show_draft=len(drafts) > 1))
    console.print(table)


def _cells(result: Result, *, show_draft: bool) -> list[str]:
    one, interval = result.configuration, result.interval
    name = f"{one.name} ({one.draft.name})" if show_draft and one.draft is not None else one.name
    return [
        name,
        one.length,
        f"{result.acceptance_length:.2f}",
        "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        f"{result.acceptance_rate:.2f}",
        f"{result.draft_ms:.2f}",
        f"{result.target_ms:.2f}",
        f"{result.verify_ms:.2f}",
        f"{result.observe_ms:.2f}",
        f"{result.tokens_per_second:.1f}",
        f"{result.ratio:.2f}",
    ]


def _label(result: Result) -> str:
    one = result.configuration
    length = "" if one.n_max is None else f" n-max {one.length}"
    return f"{one.name}{length}"

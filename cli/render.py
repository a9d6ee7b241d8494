"""Everything a person sees: the reply on stdout, progress and statistics on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specdec.errors import UsageError
from specdec.folders import write_whole
from specdec.options import OutputOptions
from specdec.trace import TraceFile
from specdec_cli.interrupts import Interrupts

if TYPE_CHECKING:
    from specdec.chat import Message
    from specdec.check import Check
    from specdec.engine import Engine
    from specdec.generate import Round
    from specdec.session import Chunk, Completion
    from specdec.stats import Statistics
    from specdec.tokenizer import Tokenizer

DRAFTED, RESET = "\033[32m", "\033[0m"
"""Terminal codes around text that was drafted and accepted."""
LONG_PROMPT = 512
"""Prompt tokens from which a progress bar is shown."""


class Display:
    """One run's output. Colours and progress appear on a terminal only."""

    def __init__(self, options: OutputOptions, interrupts: Interrupts) -> None:
        """Opens the trace and checks that the output file can be written. Raises `UsageError`."""
        self.options = options
        self._interrupts = interrupts
        self.load_seconds = 0.0
        self._stderr = Console(
            stderr=True, soft_wrap=True, highlight=False, no_color=options.color == "off"
        )
        self._shows_progress = self._stderr.is_terminal and not options.simple_io
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if options.file is not None:
            check_writable(options.file)
        self._trace = None if options.spec_trace is None else TraceFile(options.spec_trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_progress()
        if self._trace is not None:
            self._trace.close()

    @contextlib.contextmanager
    def loading(self) -> Iterator[Callable[[int, int], None]]:
        """Shows how much of the model has been loaded; gives what is to be told."""

        def progress(done: int, total: int) -> None:
            self._interrupts.check()
            if self._shows_progress:
                self._show("loading the model", done, total)

        try:
            yield progress
        finally:
            self._stop_progress()

    def prompt_progress(self, done: int, total: int) -> None:
        """Shows how much of a long prompt has been read."""
        self._interrupts.check()
        if total >= LONG_PROMPT and self._shows_progress:
            self._show("reading the prompt", done, total)

    def prompt(self, engine: Engine, prompt: str | Sequence[Message]) -> None:
        """Shows the prompt if asked to: its text on stdout, its tokens on stderr."""
        if not (self.options.verbose_prompt or self.options.display_prompt):
            return
        from specdec.session import template_variables

        tokenizer = engine.tokenizer
        tokens = engine.encode(prompt, template_variables(engine.options))
        if self.options.verbose_prompt:
            print(f"number of tokens in prompt = {len(tokens)}", file=sys.stderr)
            for token in tokens:
                print(f"{token:6d} -> {tokenizer.decode([token], special=True)!r}", file=sys.stderr)
        if self.options.display_prompt and not self.options.json:
            sys.stdout.write(tokenizer.decode(tokens, special=True))

    def write(self, chunk: Chunk) -> None:
        """Streams a piece of the reply."""
        self._stop_progress()
        if self.options.json:
            return
        marked = chunk.drafted and self.options.color == "on" and sys.stdout.isatty()
        marked = marked and not self.options.simple_io
        sys.stdout.write(f"{DRAFTED}{chunk.text}{RESET}" if marked else chunk.text)
        sys.stdout.flush()
        self._interrupts.check()

    def round(self, done: Round) -> None:
        """Writes a round to the trace."""
        if self._trace is not None:
            self._trace.write(done)
        self._interrupts.check()

    def end(self, completion: Completion, check: Check | None = None) -> None:
        """Ends the reply's line, or prints it as JSON, and shows the statistics."""
        self._stop_progress()
        if self.options.json:
            found = {} if check is None else {"check": check.as_mapping()}
            print(json.dumps(completion.as_mapping() | found, ensure_ascii=False))
        elif completion.text and not completion.text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        if self.options.show_timings and self.options.verbosity > 0:
            for line in statistics_lines(completion.statistics, self.options.verbosity):
                self._stderr.print(line, markup=False)
            if self.options.perf and self.options.verbosity >= 4:
                self._stderr.print(perf_line(completion.statistics, self.load_seconds))

    def hint(self, text: str) -> None:
        """One line of advice below the statistics."""
        if self.options.show_timings and self.options.verbosity > 0:
            self._stderr.print(f"hint: {text}", style="yellow", markup=False)

    def save(self, text: str) -> None:
        """Writes the output file of a run that came to its end."""
        if self.options.file is not None:
            write_output(self.options.file, text)

    def verdict(self, check: Check, tokenizer: Tokenizer) -> None:
        """Says what `--spec-check` found."""
        for line in verdict_lines(check, tokenizer):
            self._stderr.print(line, markup=False)

    def _show(self, what: str, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                console=self._stderr,
                transient=True,
            )
            self._task = self._progress.add_task(what, total=total)
            self._progress.start()
        self._progress.update(self._task, completed=done)
        if done >= total:
            self._stop_progress()

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def verdict_lines(check: Check, tokenizer: Tokenizer) -> list[str]:
    """What `--spec-check` found, for people."""
    if check.equal is None:
        return [
            "spec-check: not compared; sampled drafts keep the distribution, "
            "not the tokens of one seed (use --spec-draft-sampling greedy)"
        ]
    found = check.difference
    if found is None:
        return [f"spec-check: equal, {len(check.speculative.token_ids)} tokens"]

    def name(token: int | None) -> str:
        return "the end" if token is None else f"{token} {tokenizer.token_text(token)!r}"

    return [
        f"spec-check: DIFFERENT at token {found.index}: {name(found.speculative)} with "
        f"speculation, {name(found.plain)} without",
        f"spec-check: the target's best tokens there are {name(found.best[0])} and "
        f"{name(found.best[1])}, logit gap {found.gap:.6g}",
    ]


def perf_line(statistics: Statistics, load_seconds: float) -> str:
    """Where the time went."""
    parts = {
        "load": load_seconds,
        f"prompt of {statistics.n_prompt} tokens": statistics.prompt_seconds,
        "draft": statistics.draft_seconds,
        "target": statistics.target_seconds,
        "verify": statistics.verify_seconds,
        "observe": statistics.observe_seconds,
    }
    return "time = " + ", ".join(f"{name} {s * 1000:.1f} ms" for name, s in parts.items())


def statistics_lines(statistics: Statistics, verbosity: int) -> list[str]:
    """The block after a reply: speed, from info on acceptance, from trace on each drafter."""
    lines = [
        f"[ Prompt: {statistics.prompt_speed:.1f} t/s | "
        f"Generation: {statistics.generate_speed:.1f} t/s ]"
    ]
    if statistics.drafted and verbosity >= 3:
        lines.append(
            f"draft acceptance = {statistics.acceptance_rate:.5f} "
            f"({statistics.accepted} accepted / {statistics.drafted} generated), "
            f"mean len = {statistics.mean_draft_length:.2f}"
        )
        lines.append(
            f"acceptance length = {statistics.acceptance_length:.2f} tokens per target pass "
            f"({statistics.emitted} tokens in {statistics.rounds} passes)"
        )
        lines.append("acceptance per position = " + _rates(statistics.per_position))
    if statistics.chose_lengths and verbosity >= 3:
        counts = [f"{k} in {n}" for k, n in sorted(statistics.lengths.items())]
        lines.append(f"draft lengths chosen = {', '.join(counts)} rounds")
    if verbosity < 4:
        return lines
    for name, one in statistics.drafters.items():
        lines.append(
            f"{name}: {one.drafts} drafts, {one.drafts_accepted} with accepted tokens, "
            f"{one.drafted} tokens drafted, {one.accepted} accepted, "
            f"{one.draft_seconds * 1000:.1f} ms drafting, per position {_rates(one.per_position)}"
        )
    return lines


def _rates(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"


def check_writable(path: Path) -> None:
    """Raises `UsageError` if no file can be made there."""
    if path.is_dir():
        raise UsageError(f"--output: cannot write {path}: it is a directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--output: cannot write {path}: its folder is not there or not writable")


def write_output(path: Path, text: str) -> None:
    """The whole output file at once. Raises `UsageError` if it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"--output: cannot write {path}: {error.strerror}") from None

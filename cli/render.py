"""Everything a person sees: the reply on stdout, progress and statistics on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specdec.errors import UsageError
from specdec.options import OutputOptions

if TYPE_CHECKING:
    from specdec.engine import Chunk, Completion
    from specdec.stats import Statistics

DRAFTED, RESET = "\033[32m", "\033[0m"
"""Terminal codes around text that was drafted and accepted."""
LONG_PROMPT = 512
"""Prompt tokens from which a progress bar is shown."""


class Display:
    """One run's output. Colours and progress appear on a terminal only."""

    def __init__(self, options: OutputOptions) -> None:
        self.options = options
        self._stderr = Console(
            stderr=True, soft_wrap=True, highlight=False, no_color=options.color == "off"
        )
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Shows that the model is being loaded."""
        if not self._stderr.is_terminal:
            yield
            return
        with self._stderr.status("loading the model"):
            yield

    def prompt_progress(self, done: int, total: int) -> None:
        """Shows how much of a long prompt has been read."""
        if total < LONG_PROMPT or not self._stderr.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("reading the prompt"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(),
                console=self._stderr,
                transient=True,
            )
            self._task = self._progress.add_task("prompt", total=total)
            self._progress.start()
        assert self._task is not None
        self._progress.update(self._task, completed=done)
        if done >= total:
            self._stop_progress()

    def write(self, chunk: Chunk) -> None:
        """Streams a piece of the reply."""
        self._stop_progress()
        marked = chunk.drafted and self.options.color == "on" and sys.stdout.isatty()
        sys.stdout.write(f"{DRAFTED}{chunk.text}{RESET}" if marked else chunk.text)
        sys.stdout.flush()

    def end(self, completion: Completion) -> None:
        """Ends the reply's line, writes the output file and shows the statistics."""
        self._stop_progress()
        if completion.text and not completion.text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        if self.options.file is not None:
            write_atomically(self.options.file, completion.text)
        if self.options.show_timings and self.options.verbosity > 0:
            for line in statistics_lines(completion.statistics, self.options.verbosity):
                self._stderr.print(line, markup=False)

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def statistics_lines(statistics: Statistics, verbosity: int) -> list[str]:
    """The block after a reply: speed, acceptance, and with trace verbosity each drafter."""
    lines = [
        f"[ Prompt: {statistics.prompt_speed:.1f} t/s | "
        f"Generation: {statistics.generate_speed:.1f} t/s ]"
    ]
    if statistics.drafted:
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


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it. Raises `UsageError` if it cannot."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"--output: cannot write {path}: {error.strerror}") from None

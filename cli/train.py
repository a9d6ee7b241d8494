"""`specdec train`: makes a draft for a target on one machine."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specdec.errors import UsageError
from specdec_cli.flags.model import MODEL, ROPE
from specdec_cli.flags.text import CHAT
from specdec_cli.flags.train import TRAIN, TRAIN_SHAPE
from specdec_cli.given import Given
from specdec_cli.interrupts import Interrupts

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PANELS = (TRAIN, TRAIN_SHAPE, MODEL, CHAT, ROPE)

SILENCE = 70.0
"""Seconds after which a stage that says nothing gets a line where there are no bars."""


def train(given: Given) -> None:
    """Makes a draft that fits a target, from texts that the target writes itself.

    [bold]specdec train -m target.gguf -o draft.gguf --minutes 150[/bold]

    Works without a network. The work folder beside the output keeps data and progress: Ctrl-C ends
    a run, --resume continues it or makes another head from the same data.
    """
    options = given.options()
    if options.model.path is None and options.model.hf_repo is None:
        raise UsageError("--model is required; give the target's GGUF file with -m")
    if options.train.output is None:
        raise UsageError("--output is required; name the draft's file with -o")
    from specdec.train.folder import work_folder

    folder = work_folder(options)
    from specdec.train.run import run_training

    interrupts = Interrupts()
    try:
        with interrupts.handled(), interrupts.deferred(), _listener(interrupts) as listener:
            trained = run_training(options, listener)
    except KeyboardInterrupt:
        if folder.exists():
            again = shlex.join(["--resume", str(folder)])
            print(f"interrupted; continue with the same command and {again}", file=sys.stderr)
        raise
    print(trained.path)


class Watch:
    """Shows stages as progress bars and lines on stderr, and lets Ctrl-C in between two steps."""

    def __init__(self, bars: Progress, interrupts: Interrupts) -> None:
        self._bars, self._interrupts = bars, interrupts
        self._tasks: dict[str, TaskID] = {}
        self._started = self._said = time.monotonic()
        self._shown = 0.0

    def progress(self, stage: str, fraction: float, text: str) -> None:
        """See `Listener.progress`."""
        self._interrupts.check()
        now = time.monotonic()
        if now - self._shown < 0.2 and fraction < 1:
            return
        self._shown = now
        if not self._bars.console.is_terminal:
            if now - self._said > SILENCE:
                self.say(f"{stage}: {100 * fraction:.0f} %{text and ', '}{text}")
            return
        if stage not in self._tasks:
            for task in self._tasks.values():  # earlier stages are over
                self._bars.update(task, completed=1.0)
            self._tasks[stage] = self._bars.add_task(stage, total=1.0, text="")
        self._bars.update(self._tasks[stage], completed=fraction, text=text)

    def say(self, text: str) -> None:
        """See `Listener.say`; each line begins with the minutes since the start."""
        self._said = time.monotonic()
        minutes = (self._said - self._started) / 60
        self._bars.console.print(f"{minutes:6.1f}  {text}", markup=False, highlight=False)


@contextlib.contextmanager
def _listener(interrupts: Interrupts) -> Iterator[Watch]:
    """Bars on a terminal, lines anywhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield Watch(bars, interrupts)

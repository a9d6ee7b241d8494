"""The command: its sub-commands, the one error boundary, exit codes.

Exit codes: 0 done, 1 failure, 2 usage, 130 interrupted. A closed pipe ends quietly with 0.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import typer
from typer import TyperException

from specdec.errors import SpecdecError, UsageError, unknown_name
from specdec_cli import log
from specdec_cli.actions import ACTIONS, completion_bash
from specdec_cli.argv import HELP, Words, normalise
from specdec_cli.flags import Flag, Panel
from specdec_cli.given import Given
from specdec_cli.signature import with_flags

ABOUT = "Lossless speculative decoding for GGUF models, with llama.cpp's flags."


class Command(NamedTuple):
    """One sub-command: ``module`` has the function ``name`` and the tuple `PANELS`."""

    module: str
    name: str
    help: str

    @property
    def function(self) -> Callable[[Given], None]:
        """What it runs."""
        function: Callable[[Given], None] = getattr(importlib.import_module(self.module), self.name)
        return function

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Its flags."""
        panels: tuple[Panel, ...] = importlib.import_module(self.module).PANELS
        return panels

    @property
    def flags(self) -> list[Flag]:
        """Its flags, without the titles."""
        return [flag for panel in self.panels for flag in panel.flags]


COMMANDS: Mapping[str, Command] = {
    "generate": Command("specdec_cli.run", "generate", "Answers a prompt, or talks with you."),
    "inspect": Command(
        "specdec_cli.inspect_file", "inspect", "Shows what files are, and whether a draft fits."
    ),
    "tokenize": Command(
        "specdec_cli.tokenize_text", "tokenize", "Turns a text into tokens, or tokens into text."
    ),
    "bench": Command(
        "specdec_cli.bench", "bench", "Measures what speculation is worth on your prompts."
    ),
    "train": Command("specdec_cli.train", "train", "Makes a draft that fits a target."),
    "eval": Command(
        "specdec_cli.evaluate", "evaluate", "Measures how much of its drafts a target accepts."
    ),
}
"""Sub-command -> where it lives. Only the one that is called is imported."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line ``argv`` (the process's own if None) and exits."""
    _secure_output()
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def _secure_output() -> None:
    """Lets output go nowhere where it is closed, and as `?` where its encoding lacks a letter."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; the boundary of all errors."""
    log.start()
    # Read when torch is loaded: its threads yield a core they wait on instead of holding it, which
    # on a busy machine is several times faster and on an idle one makes no difference.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):
        # Whoever reads has enough. Typer and Rich notice it too and leave by SystemExit.
        _discard_output()
        return 0
    except (SpecdecError, TyperException) as error:
        return _report(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        _discard_output()
        return _report(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except MemoryError:
        return _report("out of memory; try a smaller model or --ctx-size", 1)
    except Exception as error:
        return _report(f"internal error: {type(error).__name__}: {error}", 1)
    finally:
        log.stop()


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in HELP:
        return _run_app(None, Words(["--help"]))
    name, *rest = argv
    if name.startswith("-"):
        return _act(_top_level_action(name))
    if name not in COMMANDS:
        raise UsageError(unknown_name("command", name, COMMANDS))
    words = normalise(rest, COMMANDS[name].flags)
    if words.action is not None:
        return _act(words.action)
    return _run_app(name, words)


def _top_level_action(name: str) -> str:
    """The action flag that stands in the place of a command, by its canonical name."""
    if name in ("--completion-bash", *ACTIONS):
        return name
    actions = [flag for flag in COMMANDS["generate"].flags if flag.kind == "action"]
    return normalise([name], actions).action or name


def _act(name: str) -> int:
    if name == "--completion-bash":
        completion_bash({command: COMMANDS[command].flags for command in COMMANDS})
    else:
        ACTIONS[name]()
    return 0


def _app(called: str | None, words: Words) -> typer.Typer:
    """The Typer app; only the called command gets its flags, the others are there for the help."""
    app = typer.Typer(
        name="specdec",
        help=ABOUT,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
        callback=lambda: None,
    )
    for name, command in COMMANDS.items():
        if name == called:
            function = with_flags(*command.panels, words=words)(command.function)
        else:
            function = lambda: None  # noqa: E731
        app.command(name, help=None if name == called else command.help)(function)
    return app


def _run_app(called: str | None, words: Words) -> int:
    args = words.words if called is None else [called, *words.words]
    code = _app(called, words)(args=args, standalone_mode=False, prog_name="specdec")
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Keeps the interpreter from writing what is left to an output that takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(message: str, code: int) -> int:
    if logging.getLogger("specdec").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    log.report_error(message)
    return code

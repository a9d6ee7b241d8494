"""The command: its sub-commands, the one error boundary, exit codes.

Exit codes: 0 done, 1 failure, 2 usage, 130 interrupted. A closed pipe ends quietly with 0.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

import typer
from typer import TyperException

from specdec.errors import SpecdecError, UsageError, unknown_name
from specdec.version import __version__
from specdec_cli import inspect_file, log, tokenize_text
from specdec_cli.argv import HELP, normalise
from specdec_cli.flags import Given, Panel, with_flags
from specdec_cli.run import PANELS, generate

app = typer.Typer(
    name="specdec",
    help="Lossless speculative decoding for GGUF models, with llama.cpp's flags.",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)

COMMANDS: dict[str, tuple[Panel, ...]] = {
    "generate": PANELS,
    "inspect": inspect_file.PANELS,
    "tokenize": tokenize_text.PANELS,
}
"""Sub-command -> its flags."""


def _until_closed(command: Callable[[Given], None]) -> Callable[[Given], None]:
    """The command, ending quietly when whoever reads its output has enough."""

    @functools.wraps(command)
    def run_command(given: Given) -> None:
        try:
            command(given)
        except BrokenPipeError:
            # Keep the interpreter from flushing what is left into the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return run_command


app.command("generate")(with_flags(*PANELS)(_until_closed(generate)))
app.command("inspect")(with_flags(*inspect_file.PANELS)(_until_closed(inspect_file.inspect)))
app.command("tokenize")(with_flags(*tokenize_text.PANELS)(_until_closed(tokenize_text.tokenize)))


@app.callback()
def _root() -> None:
    """Lossless speculative decoding for GGUF models, with llama.cpp's flags."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line ``argv`` (the process's own if None) and exits."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code; the boundary of all errors."""
    log.start()
    # Read when torch is loaded: its threads yield a core they wait on instead of holding it, which
    # on a busy machine is several times faster and on an idle one makes no difference.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        return _dispatch(argv)
    except (SpecdecError, TyperException) as error:
        return _report(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except MemoryError:
        return _report("out of memory; try a smaller model or --ctx-size", 1)
    except Exception as error:
        return _report(f"internal error: {type(error).__name__}: {error}", 1)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in HELP:
        argv = ["--help"]
    elif argv[0] == "--version":
        print(f"specdec {__version__}")
        return 0
    elif argv[0] not in COMMANDS:
        raise UsageError(unknown_name("command", argv[0], COMMANDS))
    order = None
    words = list(argv)
    if argv[0] in COMMANDS:
        flags = [flag for panel in COMMANDS[argv[0]] for flag in panel.flags]
        rest, order = normalise(argv[1:], flags)
        words = [argv[0], *rest]
    code = app(args=words, standalone_mode=False, prog_name="specdec", obj=order)
    return code if isinstance(code, int) else 0


def _report(message: str, code: int) -> int:
    if logging.getLogger("specdec").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code

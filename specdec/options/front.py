"""What belongs to a request and to the front ends: texts, chat, output, the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specdec.options.checks import require
from specdec.options.spec import AUTO

ReasoningEffort = Literal["default", "minimal", "low", "medium", "high", "xhigh", "max"]
Switch = Literal["on", "off", "auto"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become a prompt."""

    system_prompt: str = ""
    """System turn."""
    template: str | None = None
    """Jinja source or a built-in name; None = the model's own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the template."""
    reasoning: Switch = "auto"
    """Ask the template to think or not."""
    reasoning_effort: ReasoningEffort = "default"
    """How much; handed to the template."""
    jinja: bool = True
    """Run Jinja templates; off = the built-in ones only."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request: its text, and when it ends."""

    prompt: str | None = None
    """The prompt; `-` = standard input."""
    prompt_file: Path | None = None
    """A text file with the prompt; one trailing newline is dropped."""
    binary_file: Path | None = None
    """A file whose bytes are the prompt, unchanged."""
    conversation: bool | None = None
    """Wrap the prompt by the chat template; None = if the model has one."""
    single_turn: bool = False
    """End after one reply."""
    multiline: bool = False
    """Typed messages end with a backslash instead of at the end of a line."""
    n_predict: int = -1
    """Tokens to generate; -1 = until the end, -2 = until the context is full."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    special: bool = False
    """Print special tokens."""
    escape: bool = True
    """Read backslash escapes in the prompt, stop strings and DRY breakers."""

    def __post_init__(self) -> None:
        require(self.n_predict >= -2, f"--predict must be -2 or more, got {self.n_predict}")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the command shows, and where."""

    json: bool = False
    """Print one JSON object instead of the text."""
    display_prompt: bool = False
    """Print the prompt before the reply."""
    verbose_prompt: bool = False
    """Show the prompt's tokens on stderr."""
    show_timings: bool = True
    """Print speed and speculation statistics on stderr."""
    perf: bool = True
    """With trace verbosity, print where the time of a reply went."""
    file: Path | None = None
    """Write the reply to this file as well."""
    spec_trace: Path | None = None
    """Write one JSON line a round to this file."""
    spec_check: bool = False
    """Run the request without speculation too and compare."""
    color: Switch = "auto"
    """Colours on stderr and in the reply."""
    simple_io: bool = False
    """Plain lines: no line editing, progress or colours."""
    verbosity: int = 3
    """0 output only, 1 errors, 2 warnings, 3 info, 4 trace, 5 debug."""
    log_file: Path | None = None
    """Write messages to this file as well."""
    log_jsonl: bool = False
    """Messages as one JSON object a line."""
    log_colors: Switch = "auto"
    """Colours in messages; auto = on a terminal."""
    log_prefix: bool = True
    """Put the level before warnings and errors."""
    log_timestamps: bool | None = None
    """Put the time before messages; None = in the log file only."""


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """`specdec inspect`: which files, how much of them."""

    files: tuple[Path, ...] = ()
    """GGUF files to describe."""
    tensors: bool = False
    """List every tensor."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """`specdec tokenize`: what is read and what is printed. The text is in `GenerateOptions`."""

    stdin: bool = False
    """The text comes from standard input."""
    ids: bool = False
    """Print ids alone."""
    no_bos: bool = False
    """Never add the BOS token."""
    no_parse_special: bool = False
    """Control tokens in the text are text."""
    show_count: bool = False
    """Print the number of tokens."""
    decode: tuple[int, ...] | None = None
    """Token ids to turn into text instead."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`specdec bench`: what is compared, on what, and what is shown."""

    types: tuple[tuple[str, ...], ...] = ()
    """Combinations of spec types; () = each draft by its own type."""
    drafts: tuple[Path, ...] = ()
    """Draft files; each is run by the types that it is made for."""
    n_max: tuple[int, ...] = (3,)
    """Draft lengths of the `draft-*` types; `AUTO` = from measured costs."""
    prompts: Path | None = None
    """A file of prompts; None = a few built-in ones."""
    n_predict: int = 64
    """Tokens to generate for each prompt."""
    n_repetitions: int = 3
    """Runs of each prompt."""
    json: bool = False
    """Print JSON."""
    plot: Path | None = None
    """Draw the results into this file, .png or .svg."""

    def __post_init__(self) -> None:
        require(
            bool(self.n_max) and all(n == AUTO or n >= 1 for n in self.n_max),
            f"--spec-draft-n-max: expected auto or lengths of at least 1, got {list(self.n_max)}",
        )
        require(self.n_predict >= 1, f"--predict must be at least 1, got {self.n_predict}")
        require(
            self.n_repetitions >= 1, f"--repetitions must be at least 1, got {self.n_repetitions}"
        )
        require(
            self.plot is None or self.plot.suffix in (".png", ".svg"),
            f"--plot: {self.plot} must end in .png or .svg",
        )

"""Rows for output and logging (flag notes, sections 8 and 9)."""

from __future__ import annotations

from specdec_cli.flags import Flag, Panel
from specdec_cli.flags.values import boolean_or_auto


def switch_word(text: str) -> str:
    """`on`, `off` or `auto`, also by llama.cpp's other words for them."""
    return {True: "on", False: "off", None: "auto"}[boolean_or_auto(text)]


OUTPUT = Panel(
    "Output",
    (
        Flag("output.json", ("--json",), "Print one JSON object instead of the text."),
        Flag(
            "output.spec_trace",
            ("--spec-trace",),
            "Write one JSON line a round: what was drafted, what was accepted, and why it ended.",
        ),
        Flag(
            "output.spec_check",
            ("--spec-check",),
            "Run the request without speculation too; exit 1 at the first difference.",
        ),
        Flag(
            "output.display_prompt",
            ("--display-prompt",),
            "Print the prompt on stdout before the reply.",
            off=("--no-display-prompt",),
        ),
        Flag(
            "output.show_timings",
            ("--show-timings",),
            "Print speed and speculation statistics on stderr.",
            "LLAMA_ARG_SHOW_TIMINGS",
            off=("--no-show-timings",),
        ),
        Flag("output.file", ("--output", "-o", "--output-file"), "Write the reply to a file too."),
        Flag("output.color", ("--color", "-co"), "Colours; on marks drafted and accepted text."),
        Flag("output.simple_io", ("--simple-io",), "No line editing, progress or colours."),
        Flag("output.verbose_prompt", ("--verbose-prompt",), "Show the prompt's tokens on stderr."),
        Flag(
            "output.perf",
            ("--perf",),
            "With -lv 4, print where the time of a reply went.",
            "LLAMA_ARG_PERF",
            off=("--no-perf",),
        ),
        Flag("", ("--completion-bash",), "Print a completion script and exit.", kind="action"),
        Flag("", ("--version",), "Print the version and exit.", kind="action"),
    ),
)

LOGGING = Panel(
    "Logging",
    (
        Flag(
            "output.verbosity",
            ("--verbosity", "-lv", "--log-verbosity"),
            "0 output, 1 error, 2 warning, 3 info, 4 trace, 5 debug.",
            "LLAMA_ARG_LOG_VERBOSITY",
        ),
        Flag(
            "",
            ("--verbose", "-v", "--log-verbose"),
            "Everything, with tracebacks.",
            kind="preset",
            values={"output.verbosity": 5},
        ),
        Flag(
            "",
            ("--log-disable",),
            "No messages.",
            kind="preset",
            values={"output.verbosity": 0},
        ),
        Flag(
            "output.log_file",
            ("--log-file",),
            "Write messages to a file as well.",
            "LLAMA_ARG_LOG_FILE",
        ),
        Flag(
            "output.log_jsonl",
            ("--log-jsonl",),
            "Messages as one JSON object a line.",
            "LLAMA_ARG_LOG_JSONL",
            off=("--no-log-jsonl",),
        ),
        Flag(
            "output.log_colors",
            ("--log-colors",),
            "Colours in messages.",
            "LLAMA_ARG_LOG_COLORS",
            parse=switch_word,
        ),
        Flag(
            "output.log_prefix",
            ("--log-prefix",),
            "Put the level before warnings and errors.",
            "LLAMA_ARG_LOG_PREFIX",
            off=("--no-log-prefix",),
        ),
        Flag(
            "output.log_timestamps",
            ("--log-timestamps",),
            "Put the time before messages; in the log file if not given.",
            "LLAMA_ARG_LOG_TIMESTAMPS",
            off=("--no-log-timestamps",),
        ),
    ),
)

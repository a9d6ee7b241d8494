"""Rows for prompt, chat, output and logging (flag notes, sections 8 and 9)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_cli.flags import Flag, Panel


def parse_json_object(text: str) -> Mapping[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"'{text}' is not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise ValueError(f"'{text}' is not a JSON object")
    return value


def read_text(text: str) -> str:
    """The text in a file, without one trailing newline."""
    try:
        return Path(text).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read {text}: {reason}") from None


PROMPT = Panel(
    "Prompt",
    (
        Flag("generate.prompt", ("--prompt", "-p"), "The prompt; - = standard input."),
        Flag(
            "generate.prompt_file",
            ("--file", "-f"),
            "Prompt from a text file; one trailing newline is dropped.",
        ),
        Flag("generate.binary_file", ("--binary-file", "-bf"), "Prompt bytes unchanged."),
        Flag(
            "generate.conversation",
            ("--conversation", "-cnv"),
            "Wrap the prompt by the chat template; on if the model has one.",
            off=("--no-conversation", "-no-cnv"),
        ),
        Flag(
            "generate.n_predict",
            ("--predict", "-n", "--n-predict"),
            "Tokens to generate; -1 = until the end, -2 = until the context is full.",
            "LLAMA_ARG_N_PREDICT",
        ),
        Flag(
            "generate.stop",
            ("--reverse-prompt", "-r"),
            "Stop string; may be given several times.",
            appends=True,
        ),
        Flag(
            "generate.escape",
            ("--escape", "-e"),
            r"Read \n, \t, \xHH and the like in prompt, stop strings and DRY breakers.",
            off=("--no-escape",),
        ),
        Flag("generate.special", ("--special", "-sp"), "Print special tokens."),
    ),
)

CHAT = Panel(
    "Chat",
    (
        Flag("chat.system_prompt", ("--system-prompt", "-sys"), "System turn."),
        Flag(
            "chat.system_prompt",
            ("--system-prompt-file", "-sysf"),
            "System turn from a file.",
            parse=read_text,
            metavar="FILE",
        ),
        Flag(
            "chat.template",
            ("--chat-template",),
            "Jinja source or a built-in name; the model's own if not given.",
            "LLAMA_ARG_CHAT_TEMPLATE",
        ),
        Flag(
            "chat.template",
            ("--chat-template-file",),
            "The same from a file.",
            "LLAMA_ARG_CHAT_TEMPLATE_FILE",
            parse=read_text,
            metavar="FILE",
        ),
        Flag(
            "chat.template_kwargs",
            ("--chat-template-kwargs",),
            "Extra template variables, a JSON object.",
            "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
            parse=parse_json_object,
            metavar="JSON",
        ),
        Flag(
            "chat.reasoning",
            ("--reasoning", "-rea"),
            "Ask the template to think or not.",
            "LLAMA_ARG_REASONING",
        ),
        Flag(
            "chat.reasoning_effort",
            ("--reasoning-effort",),
            "How much; handed to the template.",
            "LLAMA_ARG_REASONING_EFFORT",
        ),
    ),
)

OUTPUT = Panel(
    "Output",
    (
        Flag(
            "output.display_prompt",
            ("--display-prompt",),
            "Print the prompt before the reply.",
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
        Flag("output.color", ("--color", "-co"), "Colours."),
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
    ),
)

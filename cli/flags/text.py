"""Rows for prompt and chat (flag notes, section 8)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from specdec_cli.flags import Flag, Panel
from specdec_cli.flags.values import json_object, text_file

log = logging.getLogger("specdec_cli")

DEPRECATED_VARIABLES = {
    "enable_thinking": "--reasoning on or --reasoning off",
    "preserve_reasoning": "--reasoning-preserve",
}
"""Template variables that llama.cpp has flags for."""


def template_variables(text: str) -> Mapping[str, Any]:
    """A JSON object; variables that have a flag of their own get a warning."""
    value = json_object(text)
    for name, flag in DEPRECATED_VARIABLES.items():
        if name in value:
            log.warning("--chat-template-kwargs: %s is deprecated; use %s", name, flag)
    return value


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
            "Apply the chat template and go on asking; the template alone if not given.",
            off=("--no-conversation", "-no-cnv"),
        ),
        Flag("generate.single_turn", ("--single-turn", "-st"), "One reply, then exit."),
        Flag(
            "generate.multiline",
            ("--multiline-input", "-mli"),
            "Typed messages go on until a line that ends with a backslash.",
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
            parse=text_file,
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
            parse=text_file,
            metavar="FILE",
        ),
        Flag(
            "chat.template_kwargs",
            ("--chat-template-kwargs",),
            "Extra template variables, a JSON object.",
            "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
            parse=template_variables,
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
        Flag(
            "chat.jinja",
            ("--jinja",),
            "Run Jinja templates; off = built-in ones only.",
            "LLAMA_ARG_JINJA",
            off=("--no-jinja",),
        ),
    ),
)

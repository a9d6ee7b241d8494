"""Messages to prompt text, by the Jinja template of a model or one that the user gives.

The text is to be encoded with `Tokenizer.encode_chat`, which reads the control tokens in it and
does not double a BOS token that the template writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, Required, TypedDict

from specdec.data.chat_templates import BUILTIN_TEMPLATES
from specdec.errors import ModelFileError, UsageError, unknown_name

TEMPLATE_KEY = "tokenizer.chat_template"
FALLBACK_TEMPLATE = "chatml"  # for a model that brings none


class Message(TypedDict, total=False):
    """One turn, with the keys that chat templates know."""

    role: Required[str]
    content: Required[Any]  # text; some templates also take a list of parts
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


def find_template(metadata: Mapping[str, Any], name: str | None = None) -> str | None:
    """The source of the model's template, or of the one it calls `name`; None if it has none."""
    source = metadata.get(f"{TEMPLATE_KEY}.{name}" if name else TEMPLATE_KEY)
    if source is not None and not isinstance(source, str):
        raise ModelFileError(f"{TEMPLATE_KEY}: expected text")
    return source


def choose_template(choice: str | None, metadata: Mapping[str, Any], *, jinja: bool = True) -> str:
    """The source that `--chat-template` means: Jinja text, a built-in name, or the model's own.

    Without ``jinja`` only built-in templates are taken; a Jinja text stands for the one it
    resembles. Raises `UsageError` with the list of names for an unknown one.
    """
    if not choice:
        own = find_template(metadata) or BUILTIN_TEMPLATES[FALLBACK_TEMPLATE]
        return own if jinja else _resembled(own)
    if "{{" in choice or "{%" in choice:
        return choice if jinja else _resembled(choice)
    source = BUILTIN_TEMPLATES.get(choice)
    if source is None:
        message = unknown_name("--chat-template", choice, BUILTIN_TEMPLATES)
        raise UsageError(f"{message}; or give Jinja text")
    return source


MARKERS = {
    "<|im_sep|>": "phi4",
    "<|im_start|>": "chatml",
    "<|start_header_id|>": "llama3",
    "<start_of_turn>": "gemma",
    "[SYSTEM_PROMPT]": "mistral-v7",
    "<<SYS>>": "llama2-sys",
    "[INST]": "mistral-v3",
    "<|START_OF_TURN_TOKEN|>": "command-r",
    "<|end|>": "phi3",
    "<|endoftext|>": "zephyr",
}
"""What a template writes -> the built-in one it is taken for without Jinja; the first hit counts
(llama.cpp: ``llm_chat_detect_template``)."""


def _resembled(source: str) -> str:
    for marker, name in MARKERS.items():
        if marker in source:
            return BUILTIN_TEMPLATES[name]
    raise UsageError(
        "--no-jinja: the template is none of the built-in ones; leave --no-jinja out or give a "
        f"name with --chat-template: {', '.join(BUILTIN_TEMPLATES)}"
    )


class ChatTemplate:
    """A compiled template; one object serves any number of conversations."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compiles `source`; raises `ModelFileError` with line and reason if it is no template."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        from specdec.template_sandbox import TemplateSandbox

        self.source = source
        self._sandbox = TemplateSandbox()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise _file_error(f"line {error.lineno}: {error.message}") from error
        except (TemplateError, RecursionError) as error:
            raise _file_error(str(error)) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; `variables` are handed to the template.

        What the template itself objects to (`raise_exception`) is a `UsageError`; a template that
        fails, leaves its sandbox or runs without end is a `ModelFileError`.
        """
        from specdec.template_sandbox import RaisedError

        self._sandbox.start()
        given = self._tokens | variables
        copies = [dict(message) for message in messages]
        try:
            return self._template.render(
                given, messages=copies, add_generation_prompt=add_generation_prompt
            )
        except RaisedError as error:
            raise UsageError(f"chat template: {_one_line(str(error))}") from error
        except Exception as error:  # a template is a program and can fail in any way
            raise _file_error(str(error) or type(error).__name__) from error


def _file_error(reason: str) -> ModelFileError:
    return ModelFileError(
        f"chat template: {_one_line(reason)}; give another one with --chat-template"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())

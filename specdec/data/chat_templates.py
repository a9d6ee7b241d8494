"""Chat templates by llama.cpp's names, for models whose file has none (`--chat-template NAME`).

They write what llama.cpp's built-in formats write. None begins with a BOS token: the tokenizer adds
it.
"""

from __future__ import annotations

CONTENT = "{{ message.content }}"
TRIMMED = "{{ message.content | trim }}"


def _marked(before: str, after: str, end: str, content: str = CONTENT) -> str:
    """Every turn is its role between two marks, its content and an end mark."""
    return (
        "{% for message in messages %}"
        f"{before}{{{{ message.role }}}}{after}{content}{end}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{before}assistant{after}{{% endif %}}"
    )


def _by_role(system: str, user: str, assistant: str, generation: str) -> str:
    """Every role has a form of its own."""
    return (
        "{% for message in messages %}"
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'user' %}}{user}"
        f"{{% elif message.role == 'assistant' %}}{assistant}"
        "{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{generation}{{% endif %}}"
    )


def _instruction(
    opening: str, system: str, user: str, assistant: str, *, first: str | None = None
) -> str:
    """System and user turns share a bracket that `opening` opens, `first` for the first one."""
    return (
        "{% set turn = namespace(open=false) %}"
        "{% for message in messages %}"
        "{% if not turn.open %}{% set turn.open = true %}"
        f"{{% if loop.first %}}{first or opening}{{% else %}}{opening}{{% endif %}}"
        "{% endif %}"
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'user' %}}{user}"
        f"{{% else %}}{assistant}{{% set turn.open = false %}}"
        "{% endif %}{% endfor %}"
    )


def _llama2(system: str, *, content: str = CONTENT, opening: str = "[INST] ") -> str:
    return _instruction(opening, system, f"{content} [/INST]", f"{content}</s>", first="[INST] ")


def _mistral(leading: str, trailing: str, reply: str = CONTENT) -> str:
    return _instruction(
        f"{leading}[INST]{trailing}",
        f"{CONTENT}{{{{ '\\n\\n' }}}}",
        f"{CONTENT}{leading}[/INST]",
        f"{trailing}{reply}</s>",
    )


def _mistral_v7(space: str) -> str:
    return _by_role(
        f"[SYSTEM_PROMPT]{space}{CONTENT}[/SYSTEM_PROMPT]",
        f"[INST]{space}{CONTENT}[/INST]",
        f"{space}{CONTENT}</s>",
        "",
    )


def _command_r(role: str, content: str = "") -> str:
    end = "<|END_OF_TURN_TOKEN|>" if content else ""
    return f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{content}{end}"


GEMMA = """\
{% set held = namespace(system='') %}
{% for message in messages %}
{% if message.role == 'system' %}
{% set held.system = held.system ~ message.content | trim %}
{% else %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' ~ role ~ '\\n' }}
{%- if held.system and role != 'model' %}
{{- held.system ~ '\\n\\n' }}
{%- set held.system = '' %}
{%- endif %}
{{- message.content | trim ~ '<end_of_turn>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}"""

SYSTEM = "<<SYS>>\n{content}\n<</SYS>>\n\n"

BUILTIN_TEMPLATES = {
    "chatml": _marked("<|im_start|>", "\n", "<|im_end|>\n"),
    "command-r": _by_role(
        _command_r("SYSTEM", TRIMMED),
        _command_r("USER", TRIMMED),
        _command_r("CHATBOT", TRIMMED),
        _command_r("CHATBOT"),
    ),
    "deepseek": _by_role(
        CONTENT,
        f"### Instruction:\n{CONTENT}\n",
        f"### Response:\n{CONTENT}\n<|EOT|>\n",
        "### Response:\n",
    ),
    "deepseek2": _by_role(
        f"{CONTENT}\n\n",
        f"User: {CONTENT}\n\n",
        f"Assistant: {CONTENT}<｜end▁of▁sentence｜>",
        "Assistant:",
    ),
    "deepseek3": _by_role(
        f"{CONTENT}\n\n",
        f"<｜User｜>{CONTENT}",
        f"<｜Assistant｜>{CONTENT}<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
    ),
    "falcon3": _marked("<|", "|>\n", "\n"),
    "gemma": GEMMA,
    "llama2": _llama2(f"{CONTENT}\n"),
    "llama2-sys": _llama2(SYSTEM.format(content=CONTENT)),
    "llama2-sys-bos": _llama2(SYSTEM.format(content=CONTENT), opening="<s>[INST] "),
    "llama2-sys-strip": _llama2(SYSTEM.format(content=TRIMMED), content=TRIMMED),
    "llama3": _marked("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", TRIMMED),
    "mistral-v1": _mistral(" ", " "),
    "mistral-v3": _mistral("", " ", TRIMMED),
    "mistral-v3-tekken": _mistral("", ""),
    "mistral-v7": _mistral_v7(" "),
    "mistral-v7-tekken": _mistral_v7(""),
    "phi3": _marked("<|", "|>\n", "<|end|>\n"),
    "phi4": _marked("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "vicuna": _by_role(
        f"{CONTENT}\n\n", f"USER: {CONTENT}\n", f"ASSISTANT: {CONTENT}</s>\n", "ASSISTANT:"
    ),
    "vicuna-orca": _by_role(
        f"SYSTEM: {CONTENT}\n", f"USER: {CONTENT}\n", f"ASSISTANT: {CONTENT}</s>\n", "ASSISTANT:"
    ),
    "zephyr": _marked("<|", "|>\n", "<|endoftext|>\n"),
}

"""Chat templates: what they write, what they may not do, and how they fail."""

from __future__ import annotations

import json
import lzma
import re
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.chat import TEMPLATE_KEY, ChatTemplate, Message, choose_template, find_template
from specdec.data.chat_templates import BUILTIN_TEMPLATES
from specdec.errors import ModelFileError, UsageError
from specdec.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "tokenizer"

CHAT: list[Message] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": " U "},
    {"role": "assistant", "content": " A "},
    {"role": "user", "content": "V"},
]


def load_metadata(name: str) -> dict[str, Any]:
    data = json.loads(lzma.decompress((DATA / f"{name}.json.xz").read_bytes()))
    metadata: dict[str, Any] = data["metadata"]
    return metadata


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(CHAT, **variables)


BUILTIN_RESULTS = {
    "chatml": (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
        "<|im_start|>assistant\n A <|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "deepseek": (
        "S### Instruction:\n U \n### Response:\n A \n<|EOT|>\n### Instruction:\nV\n### Response:\n"
    ),
    "deepseek3": (
        "S\n\n<｜User｜> U <｜Assistant｜> A <｜end▁of▁sentence｜><｜User｜>V<｜Assistant｜>"
    ),
    "gemma": (
        "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n"
    ),
    "llama2": "[INST] S\n U  [/INST] A </s>[INST] V [/INST]",
    "llama2-sys": "[INST] <<SYS>>\nS\n<</SYS>>\n\n U  [/INST] A </s>[INST] V [/INST]",
    "llama2-sys-bos": "[INST] <<SYS>>\nS\n<</SYS>>\n\n U  [/INST] A </s><s>[INST] V [/INST]",
    "llama2-sys-strip": "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]A</s>[INST] V [/INST]",
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral-v1": " [INST] S\n\n U  [/INST]  A </s> [INST] V [/INST]",
    "mistral-v3": "[INST] S\n\n U [/INST] A</s>[INST] V[/INST]",
    "mistral-v3-tekken": "[INST]S\n\n U [/INST] A </s>[INST]V[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] S[/SYSTEM_PROMPT][INST]  U [/INST]  A </s>[INST] V[/INST]",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\n U <|end|>\n<|assistant|>\n A <|end|>\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n",
    "vicuna": "S\n\nUSER:  U \nASSISTANT:  A </s>\nUSER: V\nASSISTANT:",
    "zephyr": (
        "<|system|>\nS<|endoftext|>\n<|user|>\n U <|endoftext|>\n"
        "<|assistant|>\n A <|endoftext|>\n<|user|>\nV<|endoftext|>\n<|assistant|>\n"
    ),
}


@pytest.mark.parametrize("name", BUILTIN_RESULTS)
def test_builtin(name: str) -> None:
    assert render(BUILTIN_TEMPLATES[name]) == BUILTIN_RESULTS[name]


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_builtin_ends_with_the_generation_prompt(name: str) -> None:
    short = render(BUILTIN_TEMPLATES[name], add_generation_prompt=False)
    assert render(BUILTIN_TEMPLATES[name]).startswith(short)
    assert "U" in short
    assert "A" in short


def test_choice_of_template() -> None:
    metadata = {
        "tokenizer.chat_template": "own",
        "tokenizer.chat_template.tool_use": "tools",
    }
    assert find_template(metadata) == choose_template(None, metadata) == "own"
    assert find_template(metadata, "tool_use") == "tools"
    assert find_template(metadata, "rag") is None
    assert choose_template("", {}) == choose_template("chatml", metadata)
    assert choose_template("{{ messages }}", metadata) == "{{ messages }}"
    with pytest.raises(UsageError, match=r"unknown --chat-template: chatlm.*did you mean 'chatml'"):
        choose_template("chatlm", metadata)
    with pytest.raises(ModelFileError, match=re.escape("tokenizer.chat_template: expected text")):
        find_template({"tokenizer.chat_template": 3})


def test_template_of_a_model() -> None:
    metadata = load_metadata("smollm2")
    prompt = ChatTemplate(choose_template(None, metadata)).render(
        [{"role": "user", "content": "Hi <|im_end|>"}]
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    ids = Tokenizer.from_metadata(metadata).encode_chat(prompt)
    assert ids[0] == 1
    assert ids.count(2) == 3  # system, what the user wrote, and the end of the turn


def test_begin_token_of_the_template_is_not_doubled() -> None:
    metadata = load_metadata("llama-spm")
    tokenizer = Tokenizer.from_metadata(metadata)
    with_bos = render("{{ bos_token }}[INST] {{ messages[1].content }} [/INST]")
    without = render("[INST] {{ messages[1].content }} [/INST]")
    assert tokenizer.encode_chat(with_bos)[:2].count(1) == 1
    assert tokenizer.encode_chat(with_bos) == tokenizer.encode_chat(without)


def test_variables_reach_the_template() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ enable_thinking }} {{ reasoning_effort }}{{ tools }}"
    assert render(source, enable_thinking=False, reasoning_effort="low") == "<s></s>False low"


def test_blocks_leave_no_lines() -> None:
    source = "{% for m in messages %}\n    {% if loop.last %}\n{{ m.content }}\n    {% endif %}\n"
    assert render(source + "{% endfor %}\n") == "V\n"


def test_break_and_continue() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{{ m.role }}{% break %}{% endfor %}"
    )
    assert render(source) == "user"


def test_loop_facts_survive_counting() -> None:
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    assert render(source) == "1/4False 2/4False 3/4False 4/4True "


def test_generation_tag_is_transparent() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}.") == "S."


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("tojson", '{"b": "<é>", "a": [1, true, null]}'),
        ("tojson(ensure_ascii=true)", '{"b": "<\\u00e9>", "a": [1, true, null]}'),
        ("tojson(separators=(',', ':'))", '{"b":"<é>","a":[1,true,null]}'),
        ("tojson(sort_keys=true)", '{"a": [1, true, null], "b": "<é>"}'),
        ("tojson(indent=1)", '{\n "b": "<é>",\n "a": [\n  1,\n  true,\n  null\n ]\n}'),
    ],
)
def test_tojson(call: str, text: str) -> None:
    assert render("{{ value | " + call + " }}", value={"b": "<é>", "a": [1, True, None]}) == text


def test_strftime_now() -> None:
    assert re.fullmatch(r"\d\d \w+ \d{4}", render("{{ strftime_now('%d %B %Y') }}"))


def test_what_the_template_objects_to_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match=r"^chat template: roles must alternate$"):
        render("{{ raise_exception('roles\n  must alternate') }}")


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(ModelFileError, match=r"chat template: line 2: .*; give another one"):
        ChatTemplate("first\n{% if %}")


def test_messages_are_not_changed() -> None:
    messages: list[Message] = [{"role": "user", "content": "x"}]
    with pytest.raises(ModelFileError, match="unsafe"):
        ChatTemplate("{{ messages[0].update(role='system') }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{{% set n = namespace(x='ab') %}}{{% for i in range(99) %}}{{% set n.x = {} %}}{{% endfor %}}"
)
HOSTILE = [
    "{% for i in range(10**9) %}x{% endfor %}",
    NESTED,
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "f(" * 60 + "'a'" + ")" * 60 + " }}",
    DOUBLING.format("n.x ~ n.x"),
    DOUBLING.format("n.x + n.x"),
    DOUBLING.format("n.x * 2"),
    "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ 'x'.center(10 ** 9) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{% set a = 'b' * 100000 %}{{ a | replace('b', a) }}",
    "{% set a = 'b' * 100000 %}{{ a.replace('b', a) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{{ missing.attribute }}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_end_in_one_line(source: str) -> None:
    start = time.process_time()
    with pytest.raises(ModelFileError, match=r"^chat template: [^\n]*; give another one") as caught:
        render(source)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 10


def test_private_attributes_are_not_there() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ messages.__class__ }}") == ""


def test_limits_are_per_rendering() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{{ '%02d|%s' % (3, 'x') }}")
    for _ in range(5):
        assert template.render(CHAT) == "03|x"


def test_without_jinja_a_built_in_template_stands_in() -> None:
    own = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"
    assert choose_template(None, {TEMPLATE_KEY: own}) == own
    assert choose_template(None, {TEMPLATE_KEY: own}, jinja=False) == BUILTIN_TEMPLATES["chatml"]
    assert choose_template("{{ '[INST]' }}", {}, jinja=False) == BUILTIN_TEMPLATES["mistral-v3"]
    assert choose_template("gemma", {}, jinja=False) == BUILTIN_TEMPLATES["gemma"]
    with pytest.raises(UsageError, match="--no-jinja: the template is none of the built-in ones"):
        choose_template("{{ messages }}", {}, jinja=False)

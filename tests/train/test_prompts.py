"""Where prompts come from and which are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from specdec.engine import Engine
from specdec.options import Options
from specdec.train.prompts import (
    Material,
    Openings,
    PromptFilter,
    PromptSource,
    is_finished,
    user_turn,
)

SMALL = """# a comment
[chat 3]
How do I
Tell me a joke.

[code 1]
Explain:\\n\\n{code}
What is a {animal}?

[=animal]
owl
"""


def test_openings_are_many_and_of_many_kinds() -> None:
    openings = Openings.load()
    assert sum(len(lines) for lines in openings.lines.values()) > 300
    assert set(openings.weights) == set(openings.lines)
    assert len(openings.lines) >= 10
    places = {"text", "sentence", "code", "number", "small", "price", *openings.fillers}
    source = PromptSource(openings, 0)
    source.material.add("```python\n" + "x = 1\n" * 20 + "```")
    starts = [source.start(serial) for serial in range(2000)]
    assert not any("{" + place + "}" in start.text for start in starts for place in places)
    assert len({start.text for start in starts}) > 600


def test_a_line_is_whole_if_it_ends_like_a_sentence_or_with_a_piece() -> None:
    source = PromptSource(Openings.parse(SMALL), 0)
    found = {start.text: start.is_whole for start in map(source.start, range(300))}
    assert found == {"": False, "How do I": False, "Tell me a joke.": True, "What is an owl?": True}
    source.material.add("Look:\n```python\nfor x in range(10):\n    print(x * x + 1)\n```")
    found = {start.text: start.is_whole for start in map(source.start, range(300))}
    assert found["Explain:\n\nfor x in range(10):\n    print(x * x + 1)"]


def test_a_serial_number_says_what_is_drawn() -> None:
    first, second = PromptSource(Openings.load(), 1), PromptSource(Openings.load(), 1)
    assert [first.start(i) for i in (5, 6)] == [second.start(i) for i in (5, 6)]
    assert PromptSource(Openings.load(), 2).start(5) != first.start(5)


def test_material_takes_paragraphs_sentences_and_code() -> None:
    material = Material()
    paragraph = "Bread needs flour, water, salt and time. " * 4
    material.add(f"Short.\n\n{paragraph.strip()}")
    assert list(material.texts) == [paragraph.strip()]
    assert material.sentences[0] == "Bread needs flour, water, salt and time."
    assert not material.codes


@pytest.mark.parametrize(
    ("text", "kind", "is_taken"),
    [
        ("How do I bake bread?", "chat", True),
        ("Hi there", "chat", False),
        ("1 + 2 + 3 = 6 ;;; 77 88", "chat", False),
        ("1 + 2 + 3 = 6 ;;; 77 88", "math", True),
    ],
)
def test_filter_of_short_and_wordless_prompts(text: str, kind: str, is_taken: bool) -> None:
    assert PromptFilter().accept(text, kind) is is_taken


def test_filter_of_copies() -> None:
    prompts = PromptFilter(["Name all the rivers of Europe and their length in kilometres."])
    assert not prompts.accept("name all the rivers of Europe and their length, please", "list")
    assert prompts.accept("Name all the mountains in Asia", "list")
    assert not prompts.accept("Name all the mountains in Asia!", "list")
    assert prompts.accept("Name all the mountains in Africa that have snow in summer", "list")


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("How do I bake", False),
        ("How do I bake bread?\n", True),
        ("\nHow do I", False),
        ("Summarise this:\n", False),
        ("Summarise this:\n\nBees fly.", False),
        ("Summarise this:\n\nBees fly.\n\n", True),
        ("Fix this:\n\n```\nx = 1\n\n", False),
    ],
)
def test_a_user_turn_is_a_line_or_a_text_that_it_announces(text: str, is_whole: bool) -> None:
    assert is_finished(text) is is_whole


def test_user_turn_is_the_template_up_to_the_users_text(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "target.gguf")
    engine = Engine.load(Options().merge({"model.path": path, "model.kernels": "torch"}))
    assert user_turn(engine) == ""
    engine = Engine.load(
        Options().merge({"model.path": path, "model.kernels": "torch", "chat.template": "chatml"})
    )
    assert user_turn(engine) == "<|im_start|>user\n"
    history = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
    ]
    assert user_turn(engine, history).endswith("Yes?<|im_end|>\n<|im_start|>user\n")  # type: ignore[arg-type]

"""Command lines over tiny models that chat."""

from __future__ import annotations

from pathlib import Path

import tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write(folder: Path) -> Path:
    """A tiny target whose next token depends on the text only a little; returns its path."""
    return tiny.write_target(folder / "target.gguf", n_ctx=4000)


def generate(path: Path, *words: str) -> list[str]:
    """A greedy command line over the target at ``path``."""
    return ["generate", "-m", str(path), "--temp", "0", "-c", "400", "--no-warmup", *words]


def chat(path: Path, *words: str) -> list[str]:
    """The same with a chat template."""
    return generate(path, "--chat-template", TEMPLATE, *words)

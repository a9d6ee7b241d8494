"""The examples of docs/python-api.md, run one after the other on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny

PAGE = Path(__file__).parent.parent / "docs" / "python-api.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    examples = list(EXAMPLE.finditer(text))
    assert len(examples) == text.count("```python")
    path = tiny.write_target(tmp_path / "target.gguf")
    names: dict[str, object] = {"MODEL": path, "DRAFT": path}
    for example in examples:
        line = text[: example.start(1)].count("\n")
        # Blank lines in front, so that a failure names the line of the page.
        code = compile("\n" * line + example[1], str(PAGE), "exec")
        exec(code, names)
    out = capsys.readouterr().out
    assert "fastest:" in out
    assert "draft-simple 3 4.0" in out

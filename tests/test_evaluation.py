"""What `specdec eval` sums up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.bench import Configuration, Result, load_prompts
from specdec.evaluation import OTHER, _summed_up, configuration_name, load_categories


def result(*by_prompt: tuple[int, int], draft: Path | None = None) -> Result:
    emitted, rounds = map(sum, zip(*by_prompt, strict=True))
    return Result(
        configuration=Configuration(("draft-dflash",), draft, 7),
        acceptance_length=emitted / max(1, rounds),
        interval=None,
        acceptance_rate=0.5,
        per_position=(0.5, 0.25),
        draft_ms=1.0,
        target_ms=1.0,
        verify_ms=1.0,
        observe_ms=1.0,
        tokens_per_second=10.0,
        ratio=1.5,
        cause=None,
        by_prompt=by_prompt,
    )


def test_rounds_are_pooled_by_category() -> None:
    """Neither means of prompts nor of rounds weigh more than they should."""
    found = _summed_up(
        result((30, 10), (10, 10), (8, 2), (0, 0)), ["maths", "chat", "maths", "silent"], 1.0, ()
    )
    assert found.name == "draft-dflash 7"
    assert found.temperature == 1.0
    assert found.acceptance_length == pytest.approx(48 / 22)
    assert found.mean_over_prompts == pytest.approx((3 + 1 + 4) / 3)
    assert found.by_category == {"maths": pytest.approx(38 / 12), "chat": 1.0}
    assert found.per_position == (0.5, 0.25)
    assert found.interval is not None
    low, high = found.interval
    assert 1.0 <= low < 48 / 22 < high <= 4.0


def test_an_untrained_draft_is_called_so() -> None:
    path = Path("random.gguf")
    one = Configuration(("draft-dflash",), path, 3)
    assert configuration_name(one, (path,)) == "draft-dflash 3 untrained"
    assert configuration_name(one) == "draft-dflash 3"
    assert configuration_name(Configuration()) == "none"


def test_categories_stand_beside_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "a", "category": "x"}, {"prompt": "b"}, {"prompt": "c", "category": 3}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert load_prompts(path) == ["a", "b", "c"]
    assert load_categories(path, 3) == ["x", OTHER, "3"]
    assert load_categories(None, 2) == [OTHER] * 2
    assert load_categories(tmp_path / "p.txt", 2) == [OTHER] * 2

"""A lookup cache from the engine's options to the file and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from specdec.drafters.ngram_cache import load_counts, save_counts
from specdec.engine import Engine
from specdec.errors import ModelFileError
from specdec.options import Options


def options(folder: Path, **paths: Path) -> Options:
    spec = {f"spec.ngram_cache.{name}_path": path for name, path in paths.items()}
    return Options().merge(
        {
            "model.path": tiny.write_target(folder / "target.gguf"),
            "model.device": "cpu",
            "sampling.temp": 0.0,
            "spec.types": ("ngram-cache",),
            "generate.n_predict": 12,
            **spec,
        }
    )


def test_a_missing_dynamic_file_is_made_and_the_next_run_drafts_from_it(tmp_path: Path) -> None:
    dynamic = tmp_path / "dynamic.bin"
    drafted = []
    for _ in range(6):
        with Engine.load(options(tmp_path, dynamic=dynamic)) as engine:
            for prompt in ("a", "a"):  # equal requests are counted twice
                completion = engine.generate(prompt)
            drafted.append(completion.statistics.accepted)
    assert drafted[0] < drafted[-1]
    first = 3 + ord("a")
    assert load_counts(dynamic, tiny.N_VOCAB)[first,] == {completion.token_ids[0]: 12}


def test_the_static_file_is_only_read(tmp_path: Path) -> None:
    static = tmp_path / "static.bin"
    save_counts(static, {(3 + ord("a"), 3 + ord("b")): {5: 9}})
    before = static.read_bytes()
    with Engine.load(options(tmp_path, static=static)) as engine:
        statistics = engine.generate("ab").statistics
    assert statistics.drafted > 0
    assert static.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"static.bin", "target.gguf"}


def test_a_missing_static_file_and_a_damaged_dynamic_one_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read lookup cache"):
        Engine.load(options(tmp_path, static=tmp_path / "missing"))
    (tmp_path / "damaged").write_bytes(b"1234")
    with pytest.raises(ModelFileError, match="not a lookup cache of this model"):
        Engine.load(options(tmp_path, dynamic=tmp_path / "damaged"))


def test_sessions_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two conversations in turns get the replies they would get alone."""
    with Engine.load(options(tmp_path)) as engine:
        alone = [engine.generate(prompt).token_ids for prompt in ("ab", "abc", "x", "xy")]
        first, second = engine.session(), engine.session()
        replies = [
            session.generate(prompt).token_ids
            for session, prompt in ((first, "ab"), (second, "x"), (first, "abc"), (second, "xy"))
        ]
    assert [replies[0], replies[2], replies[1], replies[3]] == alone

"""Drafts that cannot be used are refused from metadata and tensor names alone, and say why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts

from specdec.drafters.selection import choose_types
from specdec.errors import MismatchError, ModelFileError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.options import SpecOptions

Choose = Callable[..., tuple[str, ...]]
LAYERS = "eagle3.target_layers"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("target") / "t.gguf"))


@pytest.fixture
def choose(tmp_path: Path, target: GGUFFile) -> Choose:
    """Writes a draft and asks what runs it; weights must not be read."""

    def run(types: tuple[str, ...] | None = None, **draft: Any) -> tuple[str, ...]:
        path = tiny_drafts.write_eagle3(tmp_path / "d.gguf", **draft)
        return choose_types(SpecOptions(types=types), target, GGUFFile.open(path))

    return run


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_a_draft_alone_is_detected_and_that_is_said(
    choose: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose() == ("draft-eagle3",)
    assert "auto-detected speculative type 'draft-eagle3' from the draft model" in caplog.text


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"target_layers": (2, 0, 1)},
        {"target_layers": (1, 1, 0)},
        {"norm_before_fc": True},
        {"n_embd": 24},
        {"d2t": (200, 7, 103)},
        {"has_vocabulary": False},
    ],
)
def test_sound_drafts(choose: Choose, draft: dict[str, Any]) -> None:
    assert choose(("draft-eagle3", "ngram-mod"), **draft) == ("ngram-mod", "draft-eagle3")


def test_types_must_match(choose: Choose, tmp_path: Path, target: GGUFFile) -> None:
    with pytest.raises(UsageError, match="does not match the draft model: use draft-eagle3"):
        choose(("draft-simple",))
    with pytest.raises(UsageError, match="a eagle3 model: use draft-eagle3"):
        choose(("draft-dflash",))
    with pytest.raises(UsageError, match="add draft-eagle3 or leave the draft out"):
        choose(("ngram-mod",))
    spec = SpecOptions(types=("draft-eagle3",))
    other = GGUFFile.open(tiny_drafts.write_dflash(tmp_path / "other.gguf"))
    with pytest.raises(UsageError, match="does not match the draft model: use draft-dflash"):
        choose_types(spec, target, other)
    with pytest.raises(UsageError, match="draft-eagle3 requires a draft model; give one with -md"):
        choose_types(spec, target, None)


FAULTS = [
    (
        {"metadata": {LAYERS: None}},
        ModelFileError,
        r"EAGLE3 model requires 'extract_layers' in GGUF metadata \(eagle3.target_layers\)",
    ),
    (
        {"target_layers": (0, 1)},
        ModelFileError,
        r"draft model is not eagle3 \(expected 3 extract layers, got 2\)",
    ),
    (
        {"target_layers": (0, 1, 2, 2)},
        ModelFileError,
        r"draft model is not eagle3 \(expected 3 extract layers, got 4\)",
    ),
    ({"metadata": {LAYERS: 3}}, ModelFileError, "target_layers.*expected an array of integers"),
    (
        {"target_layers": (0, 1, 3)},
        MismatchError,
        r"target_layers is \[0, 1, 3\], expected layers from 0 to 2, as the target has 2 layers",
    ),
    ({"target_layers": (0, -1, 1)}, MismatchError, r"is \[0, -1, 1\], expected layers from 0 to 2"),
    ({"metadata": {"eagle3.block_count": 2}}, ModelFileError, "block_count is 2, expected 1"),
    (
        {"metadata": {"eagle3.target_hidden_size": 64}},
        MismatchError,
        "target_hidden_size is 64, but the target's hidden states are 32 wide",
    ),
    (
        {"metadata": {"eagle3.target_hidden_size": None}},
        ModelFileError,
        "'eagle3.target_hidden_size' is missing",
    ),
    (
        {"tensors": {"fc.weight": zeros(32, 64)}},
        MismatchError,
        r"fc.weight: shape \[32, 64\], expected \[32, 96\] from 3 layers of width 32",
    ),
    ({"tensors": {"fc.weight": None}}, ModelFileError, "'fc.weight' is missing"),
    (
        {"metadata": {"eagle3.norm_before_fc": True}},
        ModelFileError,
        "'enc.output_norm.weight' is missing",
    ),
    (
        {"norm_before_fc": True, "metadata": {"eagle3.norm_before_fc": None}},
        ModelFileError,
        "enc.output_norm.weight is there, but eagle3.norm_before_fc is not set",
    ),
    (
        {"n_embd": 24, "tensors": {"token_embd.weight": None}},
        MismatchError,
        "hidden width 24 .* does not match the target's 32, whose token_embd.weight it needs",
    ),
    (
        {"n_embd": 24, "tensors": {"output.weight": None}},
        MismatchError,
        "hidden width 24 .* does not match the target's 32, whose output.weight it needs",
    ),
    (
        {"d2t": (1, 2), "tensors": {"output.weight": None}},
        ModelFileError,
        "'output.weight' is missing",
    ),
    (
        {"d2t": (1, 2, 3), "tensors": {"d2t": np.array([1, 2])}},
        MismatchError,
        r"output.weight: shape \[3, 32\], expected \[2, 32\] from d2t with 2 rows",
    ),
    ({"d2t": (1, 2, 259)}, MismatchError, "d2t: row 2 is token 259, expected 0 to 258"),
    ({"d2t": (1, 7, 7)}, ModelFileError, "d2t: token 7 is in several rows"),
    ({"tensors": {"token_embd.weight": zeros(258, 32)}}, MismatchError, r"expected \[259, 32\]"),
]


@pytest.mark.parametrize(("draft", "error", "message"), FAULTS, ids=lambda v: str(v)[:60])
def test_faults(
    choose: Choose, draft: dict[str, Any], error: type[ModelFileError], message: str
) -> None:
    """Each fault names the file, the key or tensor, what was found and what was expected."""
    with pytest.raises(error, match=message) as caught:
        choose(**draft)
    assert "d.gguf" in str(caught.value)
    assert caught.value.exit_code == 1


def test_another_vocabulary(choose: Choose, target: GGUFFile) -> None:
    tokens = target.get_strs("tokenizer.ggml.tokens")
    tokens[70], tokens[71] = tokens[71], tokens[70]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    with pytest.raises(MismatchError, match="token 70 is '<0x44>', in the target '<0x43>'"):
        choose(has_vocabulary=False, metadata=metadata)

"""Fresh drafts: every head loads, fits its target and starts as plain DFlash."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny
import torch

from specdec.drafters.base import DraftSampler
from specdec.drafters.dflash import head_of
from specdec.drafters.dflash.head import DraftBlock
from specdec.drafters.dflash.model import load
from specdec.drafters.dflash.validate import check_draft
from specdec.errors import SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.options import DraftOptions, SamplingOptions
from specdec.train.draft_file import fresh_weights, write_draft, write_fresh_draft
from specdec.train.losses import LOSSES
from specdec.train.shape import DraftShape, default_shape, pick_taps


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("target") / "t.gguf"))


def small(target: GGUFFile, head: str) -> DraftShape:
    shape = default_shape(target, head, mask_token=0, block_size=4, d2t=tuple(range(0, 24, 2)))
    return dataclasses.replace(shape, n_candidates=min(shape.n_candidates, 4))


@pytest.mark.parametrize("head", list(LOSSES))
def test_a_fresh_draft_fits_its_target(tmp_path: Path, target: GGUFFile, head: str) -> None:
    path = tmp_path / "draft.gguf"
    write_fresh_draft(path, target, small(target, head))
    with GGUFFile.open(path) as file:
        assert head_of(file) == head
        check_draft(target, file, DraftOptions())
        model = load(file, load_target(target), trainable=True)
    assert model.config.block_size == 4
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("ggml_type", ["F16", "Q8_0", "Q5_0", "Q4_0"])
def test_a_quantised_draft_is_close(tmp_path: Path, target: GGUFFile, ggml_type: str) -> None:
    shape = small(target, "draft-dspark")
    weights = fresh_weights(shape) | {"d2t": torch.tensor(shape.d2t)}
    weights["output.weight"] = torch.randn(len(shape.d2t), shape.n_embd)
    path = tmp_path / "draft.gguf"
    write_draft(path, target, shape, weights, ggml_type=ggml_type)
    with GGUFFile.open(path) as file:
        assert file.tensors["fc.weight"].ggml_type == ggml_type
        for name, wanted in weights.items():
            found = file.load(name)
            assert (found - wanted).abs().max() <= 0.2 * wanted.abs().max(), name


def test_an_impossible_path_is_one_line(tmp_path: Path, target: GGUFFile) -> None:
    with pytest.raises(SpecdecError, match="cannot be written: No such file"):
        write_fresh_draft(tmp_path / "no" / "draft.gguf", target, small(target, "draft-dflash"))


@pytest.mark.parametrize(
    ("n_layer", "taps"),
    [(36, (2, 10, 18, 26, 34)), (30, (2, 9, 15, 21, 28)), (16, (2, 5, 8, 11, 14)), (3, (2,))],
)
def test_taps_are_spread_as_published(n_layer: int, taps: tuple[int, ...]) -> None:
    assert pick_taps(n_layer, 5) == taps


def test_heads_start_without_effect(tmp_path: Path, target: GGUFFile) -> None:
    """DSpark's chain and DFlash2's lattice give the trunk's own best tokens at first."""
    loaded = load_target(target)
    hidden = torch.randn(4, 32)
    for head in ("draft-dflash", "draft-dflash2"):
        path = tmp_path / f"{head}.gguf"
        write_fresh_draft(path, target, small(target, head))
        model = load(GGUFFile.open(path), loaded)
        block = DraftBlock(hidden, hidden, last_token=1, anchor=None)
        picks = model.head.propose(block, 3, DraftSampler(DraftOptions(), SamplingOptions()))
        best = model.vocabulary.to_target(model.vocabulary.logits(hidden[1:]).argmax(-1))
        assert [pick.token for pick in picks] == best.tolist()

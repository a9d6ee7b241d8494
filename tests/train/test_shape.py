"""Sizes of a draft, its mask and its vocabulary, from what the target's file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from specdec.drafters.dflash.validate import check_draft
from specdec.errors import UnsupportedError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.options import DraftOptions
from specdec.train.draft_file import write_fresh_draft
from specdec.train.shape import default_shape, pick_mask_token
from specdec.train.vocabulary import coverage, pick_vocabulary


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("shape") / "t.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token": 259}, "--mask-token: expected 0 to 258, got 259"),
        ({"mask_token": -1}, "--mask-token"),
        ({"mask_token": 0, "target_layers": (0, 3)}, "--target-layers: expected layers from 0 to"),
        ({"mask_token": 0, "target_layers": (-1,)}, "--target-layers"),
    ],
)
def test_what_the_target_does_not_have(
    file: GGUFFile, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        default_shape(file, "draft-dflash", **changes)  # type: ignore[arg-type]


def test_a_mask_is_a_spare_control_token(file: GGUFFile) -> None:
    with pytest.raises(UnsupportedError, match="no spare control token"):
        pick_mask_token(file)  # its two control tokens begin and end texts


@pytest.mark.parametrize("n_layer", [1, 2, 3])
def test_lilicorr_fits_drafts_of_any_depth(tmp_path: Path, file: GGUFFile, n_layer: int) -> None:
    shape = default_shape(file, "draft-lilicorr", mask_token=0, block_size=4, n_layer=n_layer)
    write_fresh_draft(tmp_path / "d.gguf", file, shape)
    with GGUFFile.open(tmp_path / "d.gguf") as draft:
        check_draft(file, draft, DraftOptions())


def test_a_vocabulary_is_what_is_written_or_likely() -> None:
    counts, mass = torch.zeros(200, dtype=torch.int64), torch.zeros(200, dtype=torch.float64)
    counts[100:140] = 5
    counts[140] = 1
    mass[150], mass[:20] = 3.0, 0.5
    d2t = pick_vocabulary(counts, mass, 64, required=(199,))
    assert len(d2t) == 64
    assert list(d2t) == sorted(set(d2t))
    assert {*range(20), *range(100, 141), 150, 199} <= set(d2t)
    assert set(d2t) - {*range(20), *range(100, 141), 150, 199} == {20}  # ties: the lower id
    assert coverage(counts, d2t) == 1.0
    assert coverage(counts, tuple(range(100, 132))) == pytest.approx(32 * 5 / 201)
    assert pick_vocabulary(counts, mass, 100) == ()
    assert pick_vocabulary(counts, mass, 0) == ()
    assert coverage(counts, ()) == 1.0

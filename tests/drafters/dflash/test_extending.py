"""The example head of docs/extending.md works, and heads get the anchor they ask for."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch

from specdec.drafters.dflash import HEADS, model
from specdec.drafters.dflash.dflash import DFlashHead
from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions

DOCUMENT = Path(__file__).parents[3] / "docs" / "extending.md"
TAPS = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path / "t.gguf")))


def observe(drafter: DFlashDrafter, first: int, last: int) -> None:
    drafter.observe(torch.zeros(last - first, dtype=torch.int64), TAPS[first:last])


def test_the_documented_head(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    module = types.ModuleType("biased")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, "biased", module)
    monkeypatch.setitem(HEADS, "draft-biased", "biased:BiasedHead")
    monkeypatch.setattr(model, "head_of", lambda file: "draft-biased")
    bias = np.zeros(tiny.N_VOCAB, np.float32)
    bias[77] = 100.0
    path = tiny_drafts.write_dflash(tmp_path / "d.gguf", tensors={"logit_bias.weight": bias})
    loaded = model.load(GGUFFile.open(path), target)
    drafter = DFlashDrafter(loaded, DraftOptions(n_max=3), 64)
    drafter.begin(SamplingOptions(temp=0))
    observe(drafter, 0, 9)
    assert drafter.name == "draft-biased"
    assert drafter.draft(70, 3).tokens == [77, 77, 77]


class AnchoredHead(DFlashHead):
    needs_anchor = True


def test_the_anchor_is_the_feature_of_the_newest_token(tmp_path: Path, target: Target) -> None:
    loaded = model.load(GGUFFile.open(tiny_drafts.write_dflash(tmp_path / "d.gguf")), target)
    head = AnchoredHead(GGUFFile.open(tmp_path / "d.gguf"), loaded.config, loaded.vocabulary)
    drafter = DFlashDrafter(replace(loaded, head=head), DraftOptions(), 64)
    fused = loaded.trunk.fuse(TAPS)

    def anchor() -> torch.Tensor:
        found = drafter.run(70, 2).anchor
        assert found is not None
        return found

    drafter.begin(SamplingOptions())
    assert torch.equal(anchor(), torch.zeros(32))
    observe(drafter, 0, 9)
    torch.testing.assert_close(anchor(), fused[8])
    drafter.begin(SamplingOptions(), 4)
    torch.testing.assert_close(anchor(), fused[3])
    observe(drafter, 4, 6)
    torch.testing.assert_close(anchor(), fused[5])
    plain = DFlashDrafter(loaded, DraftOptions(), 64)
    assert plain.run(70, 2).anchor is None

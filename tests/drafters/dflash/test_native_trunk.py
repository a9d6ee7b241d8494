"""`NativeTrunk` against `Trunk` with every option of a draft file, and beside each head."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor, nn

from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.model import DFlashModel, load
from specdec.drafters.dflash.native_trunk import NativeTrunk
from specdec.drafters.dflash.trunk import Trunk
from specdec.errors import UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, Kernels, SamplingOptions

N_EMBD, N_TAPS = 32, 2
HIDDEN = torch.randn(20, N_TAPS, N_EMBD, generator=torch.Generator().manual_seed(7))


def ones(*shape: int, value: float = 1.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"n_layer": 1},
    "causal": {"metadata": {"dflash.attention.causal": True}},
    "window": {"window": 3},
    "causal window": {"window": 3, "metadata": {"dflash.attention.causal": True}},
    "scales": {
        "metadata": {"dflash.embedding_scale": 2.0, "dflash.attention.value_scale": 0.5},
        "tensors": {"blk.0.layer_output_scale.weight": ones(1, value=0.7)},
    },
    "gelu": {"metadata": {"dflash.hidden_activation": "gelu"}},
    "rotation": {"metadata": {"dflash.rope.dimension_count": 4}},
    "shared": {"tensors": {"blk.1.attn_v.weight": None}},
    "sinks": {"tensors": {"blk.0.attn_sinks.weight": ones(4)}},
    "one post norm": {"tensors": {"blk.0.post_attention_norm.weight": ones(32, value=2.0)}},
    "other post norm": {"tensors": {"blk.1.post_ffw_norm.weight": ones(32, value=2.0)}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf")))


def draft(target: Target, folder: Path, kernels: Kernels, **more: Any) -> DFlashModel:
    with GGUFFile.open(tiny_drafts.write_dflash(folder / "d.gguf", **more)) as file:
        return load(file, target, kernels=kernels)


def parts(model: DFlashModel) -> list[nn.Module]:
    return [model.trunk, model.head, model.vocabulary]  # type: ignore[list-item]


def answer(model: DFlashModel, sizes: tuple[int, ...], n_slots: int) -> tuple[Tensor, Tensor]:
    """A block's output and the first layer's keys, the context injected in pieces."""
    cache = KVCache(model.trunk.cache_shapes, 64, device=torch.device("cpu"))
    for part in HIDDEN[: sum(sizes)].split(sizes):
        model.trunk.inject(model.trunk.fuse(part), cache)
    block = torch.randn(n_slots, N_EMBD, generator=torch.Generator().manual_seed(n_slots))
    return model.trunk(block, cache).hidden, cache.committed(0, torch.float32)[0]


@torch.inference_mode()
@pytest.mark.parametrize("name", OPTIONS)
def test_agrees_with_the_torch_trunk(name: str, target: Target, tmp_path: Path) -> None:
    plain, native = (draft(target, tmp_path, k, **OPTIONS[name]) for k in ("torch", "native"))
    assert isinstance(plain.trunk, Trunk)
    assert isinstance(native.trunk, NativeTrunk)
    for sizes in ((), (1,), (12,), (1, 12, 7)):
        for n_slots in (1, 5):
            for ours, theirs in zip(
                answer(native, sizes, n_slots), answer(plain, sizes, n_slots), strict=True
            ):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("head", list(tiny_drafts.HEADS))
@pytest.mark.parametrize("d2t", [(), tuple(range(0, 40, 2))])
@pytest.mark.parametrize("half", [False, True])
def test_heads_draft_the_same_tokens(
    head: str, d2t: tuple[int, ...], half: bool, target: Target, tmp_path: Path
) -> None:
    options = DraftOptions(n_max=4)
    drafts = []
    for kernels in ("torch", "native"):
        model = draft(target, tmp_path, kernels, head=head, d2t=d2t, half=half)  # type: ignore[arg-type]
        if half:
            left = {type(part) for whole in parts(model) for part in whole.modules()}
            assert (nn.Linear in left) == (kernels == "torch")
        drafter = DFlashDrafter(model, options, 64)
        drafter.begin(SamplingOptions())
        drafter.observe(torch.arange(12), HIDDEN[:12])
        drafts.append([drafter.draft(token, 8).tokens for token in (1, 2, 3)])
    assert drafts[0] == drafts[1]


@torch.inference_mode()
def test_a_block_fits_behind_a_full_context(target: Target, tmp_path: Path) -> None:
    drafter = DFlashDrafter(draft(target, tmp_path, "native"), DraftOptions(n_max=4), 20)
    drafter.begin(SamplingOptions())
    drafter.observe(torch.arange(20), HIDDEN)
    assert len(drafter.draft(1, 4).tokens) == 4


def test_what_the_kernels_do_not_know_runs_on_torch(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"backbone": "mistral-large4"}
    with caplog.at_level(logging.INFO):
        assert not isinstance(draft(target, tmp_path, "auto", **other).trunk, NativeTrunk)
    assert "do not know the layers of this draft; it runs on torch" in caplog.text
    with pytest.raises(UnsupportedError, match="layers of this draft"):
        draft(target, tmp_path, "native", **other)
    scaled = {"tensors": {"fc.scale": ones(1, value=2.0)}}
    assert isinstance(draft(target, tmp_path, "auto", **scaled).trunk, Trunk)

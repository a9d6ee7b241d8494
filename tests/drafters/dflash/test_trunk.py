"""The trunk's optional features, several blocks at once, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor

from specdec.drafters.dflash.model import DFlashModel, load
from specdec.drafters.dflash.trunk import Trunk, local_convolution, visible_keys
from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models import load_target
from specdec.models.base import Target

N_EMBD, N_TAPS = 32, 2
Make = Callable[..., DFlashModel]
random = torch.Generator().manual_seed(7)
HIDDEN = torch.randn(12, N_TAPS, N_EMBD, generator=random)
BLOCK = torch.randn(5, N_EMBD, generator=random)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf")))


@pytest.fixture
def make(tmp_path: Path, target: Target) -> Make:
    def run(*, trainable: bool = False, **draft: Any) -> DFlashModel:
        file = GGUFFile.open(tiny_drafts.write_dflash(tmp_path / "d.gguf", **draft))
        return load(file, target, trainable=trainable)

    return run


def answer(model: DFlashModel, hidden: Tensor = HIDDEN, block: Tensor = BLOCK) -> Tensor:
    cache = KVCache(model.trunk.cache_shapes, 64, device=torch.device("cpu"))
    model.trunk.inject(model.trunk.fuse(hidden), cache)
    return model.trunk(block, cache).hidden


def ones(*shape: int, value: float = 1.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


def test_neutral_options_change_nothing(make: Make) -> None:
    plain = answer(make())
    neutral = make(
        metadata={
            "dflash.embedding_scale": 1.0,
            "dflash.attention.scale": 1 / math.sqrt(8),
            "dflash.attention.value_scale": 1.0,
            "dflash.rope.dimension_sections": [4, 0, 0, 0],
            "dflash.hidden_activation": "silu",
            "dflash.attention.sliding_window": 100,
            "dflash.attention.sliding_window_pattern": [True, True],
        },
        tensors={
            "rope_freqs.weight": ones(4),
            "blk.0.layer_output_scale.weight": ones(1),
            "blk.1.attn_sinks.weight": ones(4, value=-1e4),
            "fc.scale": ones(1),
        },
    )
    torch.testing.assert_close(answer(neutral), plain)


@pytest.mark.parametrize(
    ("metadata", "tensors"),
    [
        ({"dflash.embedding_scale": 2.0}, {}),
        ({"dflash.attention.scale": 1.0}, {}),
        ({"dflash.attention.value_scale": 0.5}, {}),
        ({"dflash.rope.dimension_count": 4}, {}),
        ({"dflash.rope.freq_base": 100.0}, {}),
        ({"dflash.rope.dimension_sections": [1, 1, 1, 1]}, {}),
        ({"dflash.hidden_activation": "gelu"}, {}),
        ({"dflash.attention.causal": True}, {}),
        (
            {
                "dflash.attention.sliding_window": 3,
                "dflash.attention.sliding_window_pattern": [False, True],
            },
            {},
        ),
        ({}, {"rope_freqs.weight": ones(4, value=2.0)}),
        ({}, {"blk.1.attn_v.weight": None}),
        ({}, {"blk.0.attn_sinks.weight": ones(4)}),
        ({}, {"blk.0.post_attention_norm.weight": ones(32)}),
        ({}, {"blk.1.post_ffw_norm.weight": ones(32)}),
        ({}, {"blk.0.layer_output_scale.weight": ones(1, value=0.5)}),
        ({}, {"blk.0.attn_output.scale": ones(1, value=3.0)}),
        ({}, {"blk.0.ffn_down.scale": ones(1, value=3.0)}),
    ],
    ids=str,
)
def test_every_option_changes_the_answer(
    make: Make, metadata: dict[str, Any], tensors: dict[str, Any]
) -> None:
    plain = answer(make())
    assert (answer(make(metadata=metadata, tensors=tensors)) - plain).abs().max() > 1e-3


def test_a_scale_multiplies_its_product(make: Make) -> None:
    scaled = make(tensors={"fc.scale": ones(1, value=-1.0)})
    torch.testing.assert_close(answer(scaled, -HIDDEN), answer(make()))


def test_pairs_of_the_fourth_section_do_not_turn(make: Make) -> None:
    """Sections repeat over the pairs; text positions are p, p, p, 0."""
    mrope = make(metadata={"dflash.rope.dimension_sections": [1, 0, 0, 1]})
    assert isinstance(mrope.trunk, Trunk)
    cos, _ = mrope.trunk._rotary[0](torch.arange(4))
    assert torch.equal(cos[:, 1::2], torch.ones(4, 2))
    assert (cos[1:, 0::2] < 1).all()


def test_sections_win_over_rope_freqs(make: Make) -> None:
    both = make(
        metadata={"dflash.rope.dimension_sections": [4, 0, 0, 0]},
        tensors={"rope_freqs.weight": ones(4, value=5.0)},
    )
    torch.testing.assert_close(answer(both), answer(make()))


@pytest.mark.parametrize("draft", [{}, {"window": 4}, {"head": "draft-dflash2", "window": 4}])
def test_several_blocks_at_once(make: Make, draft: dict[str, Any]) -> None:
    """Each block sees the context before it and itself alone, as in a pass of its own."""
    trunk = make(**draft).trunk
    assert isinstance(trunk, Trunk)
    blocks = torch.randn(3, 5, N_EMBD, generator=random)
    starts = [3, 12, 7]
    context = [
        (k.transpose(0, 1), v.transpose(0, 1)) for k, v in trunk.context(trunk.fuse(HIDDEN), 0)
    ]
    together = trunk.run(blocks.flatten(0, 1), starts, context).hidden.unflatten(0, (3, 5))
    for block, start, found in zip(blocks, starts, together, strict=True):
        alone = trunk.run(block, [start], context).hidden
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("head", tiny_drafts.HEADS)
def test_gradients_reach_every_weight_of_the_trunk(make: Make, head: str) -> None:
    model = make(trainable=True, head=head)
    answer(model).square().sum().backward()
    assert isinstance(model.trunk, Trunk)
    for name, parameter in model.trunk.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_visible_keys() -> None:
    """A context of 6 keys, one block of 3 at position 6, window 3: nothing behind is hidden."""
    first, positions = torch.full((3,), 6), torch.tensor([6, 7, 8])
    table = visible_keys(first, positions, (0, 6), 3, window=3, is_causal=False)
    assert table is not None
    assert table.int().tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]
    causal = visible_keys(first, positions, (4, 6), 3, window=0, is_causal=True)
    assert causal is not None
    assert causal.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible_keys(first, positions, (0, 6), 3, window=0, is_causal=False) is None


@pytest.mark.parametrize("n_slots", [1, 2, 3, 6])
def test_convolution_stays_in_its_block(n_slots: int) -> None:
    x = torch.randn(6, 4, generator=random)
    kernels = torch.randn(6, 3, 4, generator=random)
    found = local_convolution(x, kernels, n_slots)
    for t in range(6):
        taps = [i for i in range(3) if i <= t % n_slots]
        expected = sum((kernels[t, i] * x[t - i] for i in taps), torch.zeros(4))
        torch.testing.assert_close(found[t], expected)


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        (
            {"metadata": {"dflash.hidden_activation": "relu"}},
            UnsupportedError,
            "dflash.hidden_activation 'relu' is not supported; known: silu, gelu",
        ),
        (
            {"metadata": {"dflash.attention.sliding_window": 4}},
            ModelFileError,
            "dflash.attention.sliding_window_pattern",
        ),
        (
            {"metadata": {"dflash.attention.value_length": 4}},
            ModelFileError,
            "dflash.attention.value_length is 4, expected 8",
        ),
        (
            {"metadata": {"dflash.rope.dimension_sections": [4, 0, 0]}},
            ModelFileError,
            r"dimension_sections is \[4, 0, 0\], expected four sizes",
        ),
        ({"metadata": {"dflash.context_length": None}}, ModelFileError, "dflash.context_length"),
        ({"metadata": {"dflash.block_count": 1}}, ModelFileError, "not part of a dflash model"),
        ({"metadata": {"dflash.block_count": 3}}, ModelFileError, "blk.2.attn_norm.weight"),
        ({"metadata": {"dflash.block_count": 10**6}}, ModelFileError, "the file has 25 tensors"),
        ({"tensors": {"blk.0.attn_q_norm.weight": None}}, ModelFileError, "blk.0.attn_q_norm"),
        ({"tensors": {"blk.0.attn_q.bias": ones(32)}}, ModelFileError, "first blk.0.attn_q.bias"),
        ({"tensors": {"blk.0.attn_conv_base": ones(2, 2, 32)}}, ModelFileError, "attn_conv_base"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_faulty_files(
    make: Make, draft: dict[str, Any], error: type[ModelFileError], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**draft)

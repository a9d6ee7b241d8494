"""The DeepSeek-V4 backbone: llama.cpp's own tensors, and options of a file.

A plain computation is in `test_backbone_references`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafts
import torch
from drafters.dflash.trace import Trace
from torch import Tensor

from specdec.drafters.dflash.dsv4 import DSV4Trunk, rotate_pairs, sinkhorn
from specdec.drafters.dflash.model import load
from specdec.drafters.selection import choose_types
from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import SpecOptions

NAME = "dspark_dsv4"
TEXT = list(range(70, 90))
FILE = {"head": "draft-dspark", "backbone": "deepseek4"}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def trace() -> Trace:
    return Trace(NAME)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("piece", [512, 7, 1])
def test_recorded_keys(piece: int) -> None:
    drafter = trace().drafter()
    features = trace().tensor("prefill_features")
    trace().observe(drafter, features, piece)
    taps = features.view(features.shape[0], len(drafter.taps), -1)
    close(trace().model.trunk.fuse(taps), trace().tensor("dbg_inject_inp_g_embeddings"))
    for layer in range(trace().model.config.n_layer):
        keys, _ = drafter._cache.committed(layer, torch.float32)
        close(keys.transpose(0, 1), trace().tensor(f"dbg_inject_kv_injected-{layer}"))


def test_recorded_streams() -> None:
    """Every layer's streams, their collapsed state and its norm, in the first block."""
    drafter = trace().drafter()
    trace().observe(drafter, trace().tensor("prefill_features"))
    trunk = trace().model.trunk
    assert isinstance(trunk, DSV4Trunk)
    found: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda *a: found.append(a[2])) for layer in trunk.blk]
    first = trace().rounds[0]
    block = drafter.run(first.last_token, len(first.draft))
    for hook in hooks:
        hook.remove()
    for layer, streams in enumerate(found):
        close(streams, trace().tensor(f"dbg_block_l_out-{layer}"))
    close(block.state, trace().tensor("dbg_block_hc_head"))
    close(block.hidden, trace().tensor("dbg_block_result_norm"))


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf"))


@pytest.fixture(scope="module")
def target(target_file: GGUFFile) -> Target:
    return load_target(target_file)


def open_draft(folder: Path, **draft: Any) -> GGUFFile:
    return GGUFFile.open(tiny_drafts.write_dflash(folder / "d.gguf", **(FILE | draft)))


def test_sinkhorn_balances_rows_and_columns() -> None:
    matrix = sinkhorn(torch.randn(5, 4, 4), 50, 1e-6)
    close(matrix.sum(-1), torch.ones(5, 4))
    close(matrix.sum(-2), torch.ones(5, 4))
    assert (matrix > 0).all()


def test_rotation_is_undone_by_its_inverse() -> None:
    x, angle = torch.randn(6, 3, 10), torch.randn(6, 4)
    turned = rotate_pairs(x, angle.cos(), angle.sin())
    assert torch.equal(turned[..., :2], x[..., :2])
    close(rotate_pairs(turned, angle.cos(), -angle.sin()), x, 1e-6)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("hyper_connection.count", 3, UnsupportedError, "is 3, expected 4"),
        ("attention.head_count_kv", 2, UnsupportedError, "is 2, expected 1"),
        ("expert_gating_func", 2, UnsupportedError, "expects sqrtsoftplus MoE scoring; found .* 2"),
        (
            "attention.compress_ratios",
            [0, 4],
            UnsupportedError,
            r"expects uncompressed attention on all stages; found .* \[0, 4\]",
        ),
        ("attention.sliding_window", 0, ModelFileError, "is 0, expected 1 or more"),
        ("attention.output_group_count", 3, ModelFileError, "4 heads in 3 groups"),
        (
            "attention.output_group_count",
            2**31,
            ModelFileError,
            "is 2147483648, expected at most 4",
        ),
        ("rope.dimension_count", 14, ModelFileError, "is 14, expected at most 12"),
        ("rope.dimension_count", 7, ModelFileError, "7 rotary dimensions"),
        ("attention.value_length", 10, ModelFileError, "widths 12 and 10"),
        ("expert_used_count", 5, ModelFileError, "is 5, expected at most 4"),
        ("attention.q_lora_rank", None, ModelFileError, "q_lora_rank"),
    ],
)
def test_impossible_sizes_are_refused_before_weights_are_read(
    tmp_path: Path,
    target_file: GGUFFile,
    key: str,
    value: object,
    error: type[ModelFileError],
    message: str,
) -> None:
    file = open_draft(tmp_path, metadata={f"dflash.{key}": value})
    with pytest.raises(error, match=message) as caught:
        choose_types(SpecOptions(), target_file, file)
    assert "d.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"dflash.expert_feed_forward_length": 0}, "feed_forward_length is 0, expected 1 to"),
        ({"dflash.attention.q_lora_rank": 9}, r"attn_q_a.weight: shape \[10, 32\].* \[9, 32\]"),
        ({"dflash.block_count": 10**6}, "block_count is 1000000"),
    ],
)
def test_tensors_must_have_the_sizes_of_the_metadata(
    tmp_path: Path, target: Target, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load(open_draft(tmp_path, metadata=metadata), target)

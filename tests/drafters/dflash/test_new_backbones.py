"""DeepSeek-V4.1 and Mistral Large 4: every spelling, and faulty files.

Their numbers are in `test_backbone_references`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor

from specdec.describe_draft import describe_draft
from specdec.drafters.dflash import backbone_of
from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.dspark import DSparkHead
from specdec.drafters.dflash.model import load
from specdec.drafters.dflash.names import SPELLINGS
from specdec.drafters.selection import choose_types
from specdec.errors import MismatchError, ModelFileError, SpecdecError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions, SpecOptions

TEXT = list(range(70, 90))
LAST = 105
BLOCK = 5
MASK_KEY = "tokenizer.ggml.mask_token_id"
YARN = {
    "dflash.rope.scaling.type": "yarn",
    "dflash.rope.scaling.factor": 4.0,
    "dflash.rope.scaling.original_context_length": 64,
    "dflash.rope.scaling.yarn_beta_fast": 4.0,
}
GATED = {"tensors": tiny_drafts.joint_projection("joint_proj")}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf"))


@pytest.fixture(scope="module")
def target(target_file: GGUFFile) -> Target:
    return load_target(target_file)


def open_draft(folder: Path, backbone: str, **draft: Any) -> GGUFFile:
    options = {"head": "draft-dspark", "backbone": backbone, "block_size": BLOCK} | draft
    return GGUFFile.open(tiny_drafts.write_dflash(folder / "d.gguf", **options))


def keys(**values: Any) -> dict[str, Any]:
    return {"metadata": {f"dflash.{name.replace('__', '.')}": v for name, v in values.items()}}


def observed(file: GGUFFile, target: Target) -> tuple[DFlashDrafter, np.ndarray]:
    """A drafter that has seen `TEXT`, and the taps it was shown, [T, taps * D]."""
    drafter = DFlashDrafter(load(file, target), DraftOptions(n_max=BLOCK), 256)
    drafter.begin(SamplingOptions(temp=0))
    output = target(torch.tensor(TEXT), target.new_cache(64), taps=drafter.taps)
    assert output.hidden is not None
    drafter.observe(torch.tensor(TEXT), output.hidden)
    return drafter, output.hidden.flatten(1).double().numpy()


def test_options_change_the_numbers(tmp_path: Path, target: Target) -> None:
    """Otherwise the comparisons above would not show that they are read."""

    def logits(**draft: Any) -> Tensor:
        drafter, _ = observed(open_draft(tmp_path, "mistral-large4", **draft), target)
        head = drafter.model.head
        assert isinstance(head, DSparkHead)
        return head.chain(drafter.run(LAST, BLOCK), BLOCK)[0]

    plain = logits()
    for draft in (
        GATED,
        keys(final_logit_softcapping=0.7),
        keys(attention__sliding_window=4),
        {"metadata": YARN},
        {"metadata": YARN | {"dflash.rope.scaling.yarn_log_multiplier": 1.0}},
    ):
        assert (logits(**draft) - plain).abs().max() > 1e-3
    assert torch.equal(logits(metadata={"dflash.embedding_scale": 3.0}), plain)


@pytest.mark.parametrize("backbone", ["deepseek4.1", "mistral-large4"])
def test_logits_after_drafts_and_a_rollback_are_those_of_a_fresh_drafter(
    tmp_path: Path, target: Target, backbone: str
) -> None:
    file = open_draft(tmp_path, backbone, **keys(attention__sliding_window=6))
    fresh, features = observed(file, target)
    taps = torch.from_numpy(features).float().view(len(TEXT), len(fresh.taps), -1)
    head = fresh.model.head
    assert isinstance(head, DSparkHead)
    expected = head.chain(fresh.run(LAST, BLOCK), BLOCK)[0]
    drafter = DFlashDrafter(fresh.model, DraftOptions(n_max=BLOCK), 256)
    drafter.begin(SamplingOptions(temp=0))
    drafter.observe(torch.tensor(TEXT), taps.flip(0))
    drafter.draft(LAST, BLOCK)
    assert drafter.begin(SamplingOptions(temp=0), 0) == 0
    for start, end in ((0, 7), (7, 8), (8, 13), (13, len(TEXT))):
        drafter.observe(torch.tensor(TEXT[start:end]), taps[start:end])
        drafter.draft(LAST, BLOCK)
    torch.testing.assert_close(head.chain(drafter.run(LAST, BLOCK), BLOCK)[0], expected)
    assert drafter.begin(SamplingOptions(temp=0), 9) == 9
    drafter.observe(torch.tensor(TEXT[9:]), taps[9:])
    torch.testing.assert_close(head.chain(drafter.run(LAST, BLOCK), BLOCK)[0], expected)


@pytest.mark.parametrize("spelling", SPELLINGS["mask table"])
def test_every_spelling_of_the_mask_table_is_read(
    tmp_path: Path, target: Target, spelling: str
) -> None:
    """And no mask token is needed then."""
    expected = observed(open_draft(tmp_path, "mistral-large4"), target)[0].run(LAST, BLOCK).hidden
    table = GGUFFile.open(tmp_path / "d.gguf").load("mask_embd.weight").numpy()
    tensors = {"mask_embd.weight": None} | {f"{spelling}.weight": table}
    other = open_draft(tmp_path, "mistral-large4", tensors=tensors, metadata={MASK_KEY: None})
    assert torch.equal(observed(other, target)[0].run(LAST, BLOCK).hidden, expected)


@pytest.mark.parametrize("spelling", SPELLINGS["single pass"])
def test_every_spelling_of_the_single_pass_is_read(tmp_path: Path, spelling: str) -> None:
    metadata = {"dflash.hyper_connection.single_pass": None} | {f"dflash.{spelling}": True}
    assert backbone_of(open_draft(tmp_path, "deepseek4.1", metadata=metadata)) == "deepseek4.1"
    metadata[f"dflash.{spelling}"] = False
    assert backbone_of(open_draft(tmp_path, "deepseek4.1", metadata=metadata)) == "deepseek4"


@pytest.mark.parametrize("backbone", ["deepseek4.1", "mistral-large4"])
def test_inspect_says_that_it_is_not_verified(tmp_path: Path, backbone: str) -> None:
    draft = describe_draft(open_draft(tmp_path, backbone))
    assert draft is not None
    assert draft.is_supported
    assert draft.note == "not verified against upstream"


@pytest.mark.parametrize(
    ("backbone", "draft", "error", "message"),
    [
        (
            "deepseek4.1",
            keys(hyper_connection__single_pass=None),
            ModelFileError,
            "output_hc_fn.weight is missing, which only .*4.1 .*dflash.hyper_connection.single_pa",
        ),
        ("deepseek4.1", {"head": "draft-lilicorr"}, UnsupportedError, "a draft-lilicorr head on"),
        ("deepseek4.1", keys(attention__sliding_window=0), ModelFileError, "is 0, expected 1 or"),
        (
            "mistral-large4",
            keys(attention__sliding_window=0),
            ModelFileError,
            "expects a sliding window; found dflash.attention.sliding_window = 0",
        ),
        (
            "mistral-large4",
            keys(attention__key_length=24),
            ModelFileError,
            r"key_length == kv_lora_rank \+ rope dim; found .* = 24, expected 16 \+ 6",
        ),
        ("mistral-large4", keys(attention__key_length_mla=None), ModelFileError, "key_length_mla"),
        (
            "mistral-large4",
            keys(attention__key_length_mla=6),
            ModelFileError,
            "rope.dimension_count is 6, expected an even number below .* = 6",
        ),
        (
            "mistral-large4",
            keys(rope__dimension_count=5, attention__key_length=21),
            ModelFileError,
            "rope.dimension_count is 5, expected an even number",
        ),
        ("mistral-large4", keys(attention__head_count=0), ModelFileError, "head_count is 0"),
        ("mistral-large4", keys(attention__head_count_kv=4), UnsupportedError, "is 4, expected 1"),
        (
            "mistral-large4",
            keys(attention__head_count=2**31),
            MismatchError,
            r"attn_q.weight: shape \[56, 32\], expected \[30064771072, 32\] from the dflash",
        ),
        (
            "mistral-large4",
            keys(feed_forward_length=40),
            MismatchError,
            r"ffn_gate.weight: shape \[48, 32\], expected \[40, 32\]",
        ),
        (
            "mistral-large4",
            keys(block_size=6),
            MismatchError,
            r"mask_embd.weight: shape \[4, 32\], expected \[5, 32\] from dflash.block_size",
        ),
        ("mistral-large4", keys(block_size=None), ModelFileError, "block_size"),
        (
            "mistral-large4",
            {"tensors": {"mask_embd.weight": None}},
            ModelFileError,
            "mask embeddings is missing; .* mask_embd, mask_embeddings",
        ),
        (
            "mistral-large4",
            {"tensors": {"blk.1.attn_v_b.weight": None}},
            ModelFileError,
            "'blk.1.attn_v_b.weight' is missing",
        ),
        ("mistral-large4", {"metadata": {MASK_KEY: 259}}, ModelFileError, "mask_token_id is 259"),
    ],
)
def test_impossible_files_are_refused_before_weights_are_read(
    tmp_path: Path,
    target_file: GGUFFile,
    backbone: str,
    draft: dict[str, Any],
    error: type[SpecdecError],
    message: str,
) -> None:
    with pytest.raises(error, match=message) as caught:
        choose_types(SpecOptions(), target_file, open_draft(tmp_path, backbone, **draft))
    assert "d.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("backbone", "draft", "message"),
    [
        (
            "deepseek4.1",
            {"tensors": {"output_hc_base.weight": np.ones(4, np.float32)}},
            "1 tensors are not part of a dflash model, first output_hc_base.weight",
        ),
        ("deepseek4.1", keys(attention__q_lora_rank=9), r"shape \[10, 32\].* \[9, 32\]"),
        (
            "mistral-large4",
            {"metadata": YARN | {"dflash.rope.scaling.yarn_log_multiplier": -1.0}},
            "yarn_log_multiplier is -1, expected 0 or more",
        ),
        (
            "mistral-large4",
            keys(final_logit_softcapping=-2.0),
            "final_logit_softcapping is -2, expected 0 or more",
        ),
    ],
)
def test_contradictions_are_refused_when_the_draft_is_built(
    tmp_path: Path, target: Target, backbone: str, draft: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        load(open_draft(tmp_path, backbone, **draft), target)

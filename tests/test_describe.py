"""What files are said to be, every kind of draft included, and whether a pair fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import tiny_drafts

from specdec.describe import Description, describe, judge
from specdec.describe_draft import DraftDescription
from specdec.drafters.dflash import BACKBONES, HEADS
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile

VECTORS = Path(__file__).parent / "data" / "vectors"


def described(path: Path) -> Description:
    with GGUFFile.open(path) as file:
        return describe(file)


def draft_of(name: str) -> DraftDescription:
    draft = described(VECTORS / f"{name}.gguf").draft
    assert draft is not None
    return draft


def write(path: Path, architecture: str, metadata: dict[str, Any], *tensors: str) -> Path:
    """A file with integer and text metadata and tensors of four zeros."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name in tensors:
        writer.add_tensor(name, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# (spec type, head, backbone, block size, taps, target width, d2t, own embedding, own output)
DRAFTS: dict[str, tuple[Any, ...]] = {
    "dft_plain_qwen3": (
        "draft-dflash", "plain DFlash", "base (Qwen3-like)", 6, (1, 2, 3), 64, None, False, False,
    ),
    "dft_d2t": (
        "draft-dflash", "plain DFlash", "base (Qwen3-like)", 6, (1, 3), 64, 160, False, True,
    ),
    "dft_own_tied": (
        "draft-dflash", "plain DFlash", "base (Qwen3-like)", 6, (1, 3), 64, None, True, False,
    ),
    "dft2": (
        "draft-dflash2", "DFlash2", "base (Qwen3-like)", 6, (1, 2, 3), 64, None, False, False,
    ),
    "dspark_dsv4": (
        "draft-dspark", "DSpark", "DeepSeek-V4", 6, (1, 3), 64, None, False, False,
    ),
    "lilicorr_proj": (
        "draft-lilicorr", "LiliCorr", "base (Qwen3-like)", 5, (1, 3), 64, None, False, False,
    ),
    "eagle3_d2t": (
        "draft-eagle3", "EAGLE-3", "one decoder layer", None, (0, 2, 3), 64, 160, False, True,
    ),
    "mtp_mimo2": (
        "draft-mtp", "MTP, 3 chained heads", "mimo2, 3 layers", None, None, 32, None, False, False,
    ),
    "mtp_hyv3_head": (
        "draft-mtp", "MTP, one head", "hy_v3, 1 layer", None, None, 32, None, True, True,
    ),
    "mtp_gemma4_assistant": (
        "draft-mtp", "MTP assistant that reads the target's cache", "gemma4-assistant, 2 layers",
        None, None, 32, None, False, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAFTS)
def test_every_kind_of_draft(name: str) -> None:
    draft = draft_of(name)
    assert (
        draft.spec_type,
        draft.head,
        draft.backbone,
        draft.block_size,
        draft.target_layers,
        draft.target_width,
        draft.n_draft_vocab,
        draft.has_own_embedding,
        draft.has_own_output,
    ) == DRAFTS[name]


def test_mask_token_has_its_text() -> None:
    draft = draft_of("dft2")
    assert (draft.mask_token, draft.mask_text) == (5, "<file_sep>")


def test_facts_of_one_head_alone() -> None:
    assert draft_of("dspark_dsv4").details == {
        "attention.causal": False,
        "sliding layers": 3,
        "markov rank": 8,
        "confidence head": True,
        "sample_from_anchor": True,
    }
    assert draft_of("lilicorr_proj").details["lilicorr.candidate_topk"] == 6
    assert draft_of("dft2").details["selector_top_k"] > 0
    assert draft_of("dft_swa").details["sliding layers"] == 2
    assert draft_of("dft_causal").details["attention.causal"] is True
    assert draft_of("eagle3_d2t").details == {
        "norm_before_residual": False,
        "norm_before_fc": False,
    }


@pytest.mark.parametrize(
    ("metadata", "backbone"),
    [
        ({"dflash.attention.kv_lora_rank": 4}, "Mistral Large 4"),
        ({"dflash.hyper_connection.count": 4}, "DeepSeek-V4"),
    ],
)
def test_backbones_by_their_keys(tmp_path: Path, metadata: dict[str, Any], backbone: str) -> None:
    path = write(tmp_path / "d.gguf", "dflash", metadata, "fc.weight")
    draft = described(path).draft
    assert draft is not None
    assert draft.backbone == backbone
    assert (draft.note is not None) == (backbone == "Mistral Large 4")


def test_supported_means_that_head_and_backbone_are_registered(tmp_path: Path) -> None:
    for name in DRAFTS:
        draft = draft_of(name)
        if draft.block_size is not None:
            backbone = "base" if draft.backbone.startswith("base") else "deepseek4"
            assert draft.is_supported == (draft.spec_type in HEADS and backbone in BACKBONES)


def test_a_target() -> None:
    facts = described(VECTORS / "tgt_qwen3.gguf")
    assert (facts.kind, facts.architecture, facts.is_supported) == ("target", "qwen3", True)
    assert facts.draft is None
    assert facts.tokenizer is not None
    assert (facts.tokenizer.model, facts.tokenizer.pre) == ("gpt2", "smollm")
    assert (facts.tokenizer.bos_id, facts.tokenizer.bos_text) == (1, "<|im_start|>")
    assert not facts.tokenizer.has_chat_template


def test_sizes_of_a_known_file(tmp_path: Path) -> None:
    """Two layers of width 32, 4 heads and 2 for keys and values of 8: cache 2 * 2 * 16 floats."""
    facts = described(tiny.write_target(tmp_path / "t.gguf"))
    n_parameters = 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 32 + 2 * 259 * 32
    assert facts.n_parameters == n_parameters
    assert (facts.n_layer, facts.n_embd, facts.head_dim, facts.n_head_kv) == (2, 32, 8, 2)
    assert facts.memory.weights == 4 * n_parameters
    assert facts.memory.cache_per_1k == 1000 * 4 * 2 * (16 + 16)
    assert facts.bits_per_weight == 32
    assert [share.ggml_type for share in facts.types] == ["F32"]
    assert facts.n_bytes == (tmp_path / "t.gguf").stat().st_size


def test_quantisation_mix() -> None:
    facts = described(VECTORS / "tgt_llama256.q4_k_m.gguf")
    assert {"Q4_K", "F32"} <= {share.ggml_type for share in facts.types}
    assert sum(share.n_tensors for share in facts.types) == facts.n_tensors
    sizes = [share.n_bytes for share in facts.types]
    assert sizes == sorted(sizes, reverse=True)
    assert 4 < facts.bits_per_weight < 9


def test_a_target_with_heads_of_its_own() -> None:
    facts = described(VECTORS / "mtp_mimo2.gguf")
    assert facts.kind == "target"
    assert facts.draft is not None
    assert not facts.draft.is_standalone
    assert described(VECTORS / "mtp_hyv3_head.gguf").kind == "draft"
    assert described(VECTORS / "mtp_gemma4_assistant.gguf").memory.cache_per_1k == 0


def test_a_vocabulary(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.chat_template": "{{ x }}"}
    facts = described(write(tmp_path / "v.gguf", "llama", metadata))
    assert (facts.kind, facts.n_tensors, facts.memory.cache_per_1k) == ("vocabulary", 0, None)
    assert facts.bits_per_weight == 0


def test_types_that_cannot_be_decoded_are_no_obstacle(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "t.gguf")
    data = bytearray(path.read_bytes())
    start = data.index(b"output_norm.weight") + len("output_norm.weight")
    data[start + 12 : start + 16] = (250).to_bytes(4, "little")  # dimensions, one size, type
    path.write_bytes(data)
    facts = described(path)
    assert ("type 250", 0) in [(share.ggml_type, share.n_bytes) for share in facts.types]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"general.name": 3}, "general.name"),
    ],
)
def test_metadata_of_a_wrong_type(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        described(write(tmp_path / "x.gguf", "llama", metadata, "token_embd.weight"))


def test_a_wild_number_of_heads_takes_no_memory(tmp_path: Path) -> None:
    metadata = {"llama.block_count": 1, "llama.nextn_predict_layers": 2**32 - 1}
    path = write(tmp_path / "x.gguf", "llama", metadata, "blk.0.nextn.eh_proj.weight")
    with pytest.raises(ModelFileError, match="4294967295 of 1 layers"):
        described(path)


def verdict(target: Path, draft: Path) -> Any:
    with GGUFFile.open(target) as target_file, GGUFFile.open(draft) as draft_file:
        return judge(target_file, draft_file)


@pytest.mark.parametrize(
    ("target", "draft", "spec_type"),
    [
        ("tgt_qwen3", "dft_d2t", "draft-dflash"),
        ("tgt_qwen3", "dft2", "draft-dflash2"),
        ("tgt_qwen3", "tgt_llama", "draft-simple"),
    ],
)
def test_pairs_that_fit(target: str, draft: str, spec_type: str) -> None:
    found = verdict(VECTORS / f"{target}.gguf", VECTORS / f"{draft}.gguf")
    assert (found.fits, found.spec_type, found.reason) == (True, spec_type, None)


def test_a_mismatch_names_both_values(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "t.gguf", n_embd=32)
    draft = tiny_drafts.write_dflash(tmp_path / "d.gguf", n_embd=64)
    found = verdict(target, draft)
    assert (found.fits, found.fault) == (False, "mismatch")
    assert "hidden width 64" in found.reason
    assert "the target's 32" in found.reason
    assert "use a draft made for this target" in found.reason


def test_other_reasons_why_a_pair_cannot_run(tmp_path: Path) -> None:
    target = tiny.write_target(tmp_path / "t.gguf")
    draft = tiny_drafts.write_dflash(
        tmp_path / "d.gguf", metadata={"tokenizer.ggml.mask_token_id": None}
    )
    assert verdict(target, draft).fault == "damaged"
    assert verdict(draft, target).fault == "unsupported"
    other = tiny.write_target(tmp_path / "o.gguf", architecture="gptj")
    assert verdict(other, draft).fault == "unsupported"
    empty = write(tmp_path / "v.gguf", "llama", {"tokenizer.ggml.model": "llama"})
    assert "vocabulary only" in verdict(target, empty).reason
    assert "vocabulary only" in verdict(empty, draft).reason

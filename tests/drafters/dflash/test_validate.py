"""Drafts that cannot be used are refused from metadata and tensor names alone, and say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import tiny_drafts
from tiny import N_VOCAB

from specdec.drafters.selection import choose_types
from specdec.errors import MismatchError, ModelFileError, UnsupportedError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.options import DraftOptions, SpecOptions

Choose = Callable[..., tuple[str, ...]]
FLOATS = np.float32
MASK_KEY = "tokenizer.ggml.mask_token_id"
DFLASH2 = {"head": "draft-dflash2"}
DSPARK = {"head": "draft-dspark"}
LILICORR = {"head": "draft-lilicorr"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("target") / "t.gguf"))


@pytest.fixture
def choose(tmp_path: Path, target: GGUFFile) -> Choose:
    """Writes a draft and asks what runs it; weights must not be read."""

    def run(types: str | None = "draft-dflash", p_min: float = 0.0, **draft: Any) -> Any:
        path = tiny_drafts.write_dflash(tmp_path / "d.gguf", **draft)
        spec = SpecOptions(types=(types,) if types else None, draft=DraftOptions(p_min=p_min))
        return choose_types(spec, target, GGUFFile.open(path))

    return run


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, FLOATS)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("types", "head"),
    [
        (None, "draft-dflash"),
        (None, "draft-dflash2"),
        ("draft-dflash", "draft-dflash2"),
        ("draft-dflash2", "draft-dflash2"),
        (None, "draft-dspark"),
        ("draft-dflash", "draft-dspark"),
        ("draft-dspark", "draft-dspark"),
        (None, "draft-lilicorr"),
        ("draft-dflash", "draft-lilicorr"),
        ("draft-lilicorr", "draft-lilicorr"),
    ],
)
def test_sound_drafts_are_accepted(choose: Choose, types: str | None, head: str) -> None:
    assert choose(types, head=head) == (types or "draft-dflash",)


@pytest.mark.parametrize(
    ("types", "head", "message"),
    [
        ("draft-dflash2", "draft-dflash", "does not match the draft model: use draft-dflash"),
        ("draft-dspark", "draft-dflash2", "does not match the draft model: use draft-dflash2"),
        ("draft-lilicorr", "draft-dflash", "does not match the draft model: use draft-dflash"),
        ("draft-simple", "draft-dflash", "does not match the draft model: use draft-dflash"),
        ("draft-dflash2", "draft-dspark", "does not match the draft model: use draft-dspark"),
        ("draft-dspark", "draft-lilicorr", "does not match the draft model: use draft-lilicorr"),
    ],
)
def test_other_types_must_match_the_head(
    choose: Choose, types: str, head: str, message: str
) -> None:
    with pytest.raises(UsageError, match=f"--spec-type {types} {message} for /?.*gguf$") as error:
        choose(types, head=head)
    assert error.value.exit_code == 2


def test_an_ordinary_model_is_no_dflash_draft(tmp_path: Path, target: GGUFFile) -> None:
    other = GGUFFile.open(tiny.write_target(tmp_path / "other.gguf"))
    spec = SpecOptions(types=("draft-dflash",))
    with pytest.raises(UsageError, match=r"requires a DFlash draft model; .* use draft-simple"):
        choose_types(spec, target, other)
    with pytest.raises(UsageError, match="requires a draft model; give one with -md"):
        choose_types(spec, target, None)


def test_one_member_of_the_family_at_most() -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        SpecOptions(types=("draft-dflash", "draft-dflash2"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([-1, 1], r"\[-1, 1\]"),
        ([0, 3], r"\[0, 3\]"),
        ([2, 2], r"\[2, 2\]"),
        ([0.0, 1.0], r"\[0.0, 1.0\]"),
        (2, "2"),
    ],
)
def test_target_layers(choose: Choose, value: object, shown: str) -> None:
    with pytest.raises(
        ModelFileError,
        match=rf"d.gguf: dflash.target_layers is {shown}, expected .* 0 to 2, .* has 2 layers",
    ):
        choose(metadata={"dflash.target_layers": value})


def test_no_target_layers(tmp_path: Path, target: GGUFFile) -> None:
    nothing: Any = np.zeros(0, np.int32)  # the writer leaves out empty arrays
    path = tiny_drafts.write_dflash(tmp_path / "d.gguf")
    file = GGUFFile.open(path, {"dflash.target_layers": nothing})
    with pytest.raises(ModelFileError, match=r"dflash.target_layers is \[\], expected .* 0 to 2"):
        choose_types(SpecOptions(), target, file)


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (2, 0), (1, 2, 0)])
def test_target_layers_that_fit(choose: Choose, layers: tuple[int, ...]) -> None:
    assert choose(target_layers=layers) == ("draft-dflash",)


FAULTS = [
    (
        {"metadata": {"dflash.target_layers": None}},
        ModelFileError,
        "DFlash model requires 'target_layers' in GGUF metadata",
    ),
    (
        {"metadata": {"dflash.target_layers": [0, 1, 2]}},
        MismatchError,
        r"fc.weight: shape \[32, 64\], expected \[32, 96\] from dflash.target_layers = \[0, 1, 2\]",
    ),
    (
        {"n_embd": 64},
        MismatchError,
        r"hidden width 64 \(dflash.embedding_length\) does not match the target's 32",
    ),
    (
        {"metadata": {MASK_KEY: None}},
        ModelFileError,
        f"{MASK_KEY} is missing, expected .* 0 to 258",
    ),
    (
        {"metadata": {MASK_KEY: N_VOCAB}},
        ModelFileError,
        f"{MASK_KEY} is 259, expected a token id from 0 to 258",
    ),
    ({"metadata": {MASK_KEY: 2**32 - 1}}, ModelFileError, f"{MASK_KEY} is 4294967295, expected"),
    ({"block_size": 1}, ModelFileError, "dflash.block_size is 1, expected 2 to 1024"),
    ({"block_size": 2**31}, ModelFileError, "dflash.block_size is 2147483648, expected"),
    (
        {"tensors": {"output.weight": zeros(100, 32)}},
        MismatchError,
        r"output.weight: shape \[100, 32\], expected \[259, 32\] .* without d2t",
    ),
    ({"tensors": {"token_embd.weight": zeros(258, 32)}}, MismatchError, r"expected \[259, 32\]"),
    (
        {"d2t": (1, 2, 3), "tensors": {"d2t": ids(1, 2)}},
        MismatchError,
        r"output.weight: shape \[3, 32\], expected \[2, 32\] from d2t with 2 rows",
    ),
    (
        {"d2t": (1, 2, 259)},
        MismatchError,
        "d2t: row 2 is token 259, expected 0 to 258 in the target's vocabulary",
    ),
    ({"d2t": (1, -2, 3)}, MismatchError, "d2t: row 1 is token -2, expected 0 to 258"),
    ({"d2t": (1, 7, 7)}, ModelFileError, "d2t: token 7 is in several rows"),
    (
        {"d2t": (1, 2), "tensors": {"d2t": np.array([1, 2], dtype=np.int32)}},
        ModelFileError,
        r"d2t is I32 \[2\], expected I64",
    ),
    ({"d2t": (1, 2), "tensors": {"output.weight": None}}, ModelFileError, "output.weight"),
    ({"tensors": {"fc.weight": None}}, ModelFileError, "'fc.weight' is missing"),
    (
        DFLASH2 | {"metadata": {"dflash.attention.kv_lora_rank": 8}},
        UnsupportedError,
        "a draft-dflash2 head on the mistral-large4 backbone, expected draft-dspark or draft-df",
    ),
    (
        DFLASH2 | {"metadata": {"dflash.conv_kernel_size": None}},
        ModelFileError,
        "DFlash2 model is missing conv/selector metadata: .* 4, 4, 5, 0, 8",
    ),
    (
        DFLASH2 | {"metadata": {"dflash.block_size": None}},
        ModelFileError,
        "DFlash2 model is missing conv/selector metadata",
    ),
    (
        DFLASH2 | {"metadata": {"dflash.conv_group_size": 5}},
        ModelFileError,
        "hidden size must be divisible by conv_group_size; found 32 and .* = 5",
    ),
    (
        DFLASH2 | {"metadata": {"dflash.selector_top_k": 6}},
        ModelFileError,
        "DFlash2 hidden size is too small for the selector lattice; found 32 and .* = 6",
    ),
    (
        DFLASH2 | {"metadata": {"dflash.selector_rank": 5}},
        MismatchError,
        r"selector_hidden.weight: shape \[4, 32\], expected \[5, 32\]",
    ),
    (
        DFLASH2 | {"tensors": {"selector_successor.weight": zeros(258, 4)}},
        MismatchError,
        r"selector_successor.weight: shape \[258, 4\], expected \[259, 4\]",
    ),
    (
        DSPARK | {"metadata": {"dflash.block_size": None}},
        ModelFileError,
        "DSpark model is missing dflash.block_size",
    ),
    (
        DSPARK | {"tensors": {"markov_w1.weight": zeros(258, 6)}},
        MismatchError,
        r"markov_w1.weight: shape \[258, 6\], expected 259 rows",
    ),
    (
        DSPARK | {"tensors": {"markov_w1.weight": zeros(259)}},
        ModelFileError,
        r"markov_w1.weight: shape \[259\], expected 259 rows",
    ),
    (
        DSPARK | {"tensors": {"markov_w2.weight": zeros(259, 5)}},
        MismatchError,
        r"markov_w2.weight: shape \[259, 5\], expected \[259, 6\]",
    ),
    (
        DSPARK | {"d2t": (1, 2, 3), "tensors": {"markov_w2.weight": zeros(259, 6)}},
        MismatchError,
        r"markov_w2.weight: shape \[259, 6\], expected \[3, 6\]",
    ),
    (DSPARK | {"tensors": {"markov_w2.weight": None}}, ModelFileError, "'markov_w2.weight' is mis"),
    (
        DSPARK | {"tensors": {"conf_proj.weight": zeros(1, 37)}},
        MismatchError,
        r"conf_proj.weight: shape \[1, 37\], expected \[1, 38\]",
    ),
    (
        DSPARK | {"tensors": {"conf_proj.bias": zeros(2)}},
        MismatchError,
        r"conf_proj.bias: shape \[2\], expected \[1\]",
    ),
    (
        DSPARK | {"tensors": {"joint_proj.weight": zeros(18, 44)}},
        ModelFileError,
        "'joint_proj.bias' is missing",
    ),
    (
        DSPARK | {"tensors": {"joint_proj.weight": zeros(18, 38), "joint_proj.bias": zeros(18)}},
        MismatchError,
        r"joint_proj.weight: shape \[18, 38\], expected \[18, 44\]",
    ),
    (
        DSPARK | {"tensors": {"joint_proj.weight": zeros(18, 44), "joint_proj.bias": zeros(6)}},
        MismatchError,
        r"joint_proj.bias: shape \[6\], expected \[18\]",
    ),
    (
        LILICORR | {"metadata": {"dflash.block_size": None}},
        ModelFileError,
        "LiliCorr model is missing dflash.block_size",
    ),
    (
        LILICORR | {"metadata": {"lilicorr.num_heads": 5}},
        ModelFileError,
        "invalid LiLiCorr DFlash metadata: hidden_size 24, num_heads 5",
    ),
    (
        LILICORR | {"metadata": {"lilicorr.candidate_topk": 6}},
        ModelFileError,
        r"candidate_topk 6, .* within the width 32",
    ),
    (
        LILICORR | {"d2t": (1, 2), "metadata": {"lilicorr.candidate_topk": 3}},
        ModelFileError,
        "invalid LiLiCorr DFlash metadata: .* candidate_topk 3",
    ),
    (
        LILICORR | {"metadata": {"dflash.selector_top_k": 4}},
        ModelFileError,
        "invalid LiLiCorr DFlash metadata: .* no selector_top_k",
    ),
    (LILICORR | {"metadata": {"lilicorr.candidate_topk": None}}, ModelFileError, "candidate_topk"),
    (
        LILICORR | {"metadata": {"lilicorr.num_layers": 3}},
        ModelFileError,
        "invalid LiLiCorr head dimensions: .* num_layers 3; .* at most 2 layers",
    ),
    (
        LILICORR | {"metadata": {"lilicorr.num_layers": 2**30, "dflash.block_count": 2**31}},
        ModelFileError,
        "invalid LiLiCorr head dimensions: .* num_layers 1073741824",
    ),
    (
        LILICORR | {"metadata": {"lilicorr.factor_dim": 0}},
        ModelFileError,
        "invalid LiLiCorr head dimensions: factor_dim 0",
    ),
    (
        LILICORR | {"metadata": {"dflash.block_size": 6}},
        MismatchError,
        r"lilicorr.slot_embedding.weight: shape \[4, 24\], expected \[5, 24\]",
    ),
    (
        LILICORR | {"tensors": {"lilicorr.attention_bias.bias": zeros(2, 16, 15)}},
        MismatchError,
        r"lilicorr.attention_bias.bias: shape \[2, 16, 15\], expected \[2, 16, 16\]",
    ),
    (
        LILICORR | {"tensors": {"blk.4.ffn_up.bias": None}},
        ModelFileError,
        "'blk.4.ffn_up.bias' is missing",
    ),
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


@pytest.mark.parametrize(
    "draft",
    [
        {"metadata": {"dflash.has_confidence_head": False}},
        {"tensors": {"conf_proj.weight": None, "conf_proj.bias": None}},
    ],
    ids=["key", "tensor"],
)
def test_a_confidence_limit_needs_a_confidence_head(choose: Choose, draft: dict[str, Any]) -> None:
    text = r"^DSpark draft has no confidence head: please set --spec-draft-p-min 0 \(found 0.5"
    with pytest.raises(UsageError, match=text) as caught:
        choose(p_min=0.5, **DSPARK, **draft)
    assert caught.value.exit_code == 2
    assert choose("draft-dspark", **DSPARK, **draft) == ("draft-dspark",)
    assert choose("draft-dspark", p_min=0.5, **DSPARK) == ("draft-dspark",)


def test_another_vocabulary(tmp_path: Path, target: GGUFFile) -> None:
    """The same width and size, but two tokens change places."""
    tokens = target.get_strs("tokenizer.ggml.tokens")
    tokens[70], tokens[71] = tokens[71], tokens[70]
    path = tiny_drafts.write_dflash(
        tmp_path / "d.gguf",
        has_vocabulary=False,
        metadata={"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens},
    )
    with pytest.raises(MismatchError, match="token 70 is '<0x44>', in the target '<0x43>'"):
        choose_types(SpecOptions(types=("draft-dflash",)), target, GGUFFile.open(path))


def test_a_draft_without_a_token_list_uses_the_targets(choose: Choose) -> None:
    assert choose(has_vocabulary=False) == ("draft-dflash",)


def test_a_file_without_tensors(tmp_path: Path, target: GGUFFile) -> None:
    writer = gguf.GGUFWriter(tmp_path / "empty.gguf", "dflash")
    writer.add_uint32("dflash.embedding_length", 32)
    writer.add_array("dflash.target_layers", [0, 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"'fc.weight' is missing"):
        choose_types(SpecOptions(), target, GGUFFile.open(tmp_path / "empty.gguf"))

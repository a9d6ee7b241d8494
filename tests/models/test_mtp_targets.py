"""Targets whose files carry MTP layers: run without them, against llama.cpp's recorded numbers."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_mtp
import torch

from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.models.rows import ROW_BLOCK
from specdec.options import Kernels

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
FILES = {
    "mtp_hyv3": "mtp_hyv3",
    "mtp_hyv3_trunk": "mtp_hyv3",
    "mtp_glm4moe": "mtp_glm4moe",
    "mtp_mimo2": "mtp_mimo2",
    "mtp_qwen35": "mtp_qwen35",
    "mtp_gemma4": "mtp_gemma4_assistant",
    "mtp_accepted": "mtp_accepted",
    "mtp_chain_accepted": "mtp_chain_accepted",
}
"""File -> recording."""
DISTINCT = ("mtp_hyv3", "mtp_glm4moe", "mtp_mimo2", "mtp_qwen35", "mtp_gemma4")


def with_kernels(*names: str) -> list[tuple[str, Kernels]]:
    """Every file with every back end."""
    back_ends: tuple[Kernels, ...] = ("torch", "native")
    return [(name, kernels) for name in names for kernels in back_ends]


@functools.cache
def target_of(name: str, kernels: Kernels = "torch") -> Target:
    with GGUFFile.open(VECTORS / f"{name}.gguf") as file:
        return load_target(file, kernels=kernels)


def recording(name: str) -> dict[str, torch.Tensor]:
    with np.load(VECTORS / f"{FILES[name]}.npz") as recorded:
        values = {key: recorded[key] for key in recorded.files if key[0] == "p"}
    return {
        key: torch.from_numpy(value.astype(np.int64) if value.dtype == np.int32 else value)
        for key, value in values.items()
    }


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*FILES))
def test_logits_and_greedy_text(name: str, kernels: Kernels) -> None:
    target, values = target_of(name, kernels), recording(name)
    tolerance = 2e-2 if name == "mtp_gemma4" else 1e-4  # ggml's GELU is a half-precision table
    for prompt in ("p0", "p1"):
        if f"{prompt}_ids" not in values:
            continue
        cache, expected = target.new_cache(512), values[f"{prompt}_logits"]
        logits = target(values[f"{prompt}_ids"], cache).logits
        torch.testing.assert_close(logits[-len(expected) :], expected, atol=tolerance, rtol=0)
        if f"{prompt}_greedy" in values:
            text = [int(logits[-1].argmax())]
            for _ in values[f"{prompt}_greedy"][1:]:
                text.append(int(target(torch.tensor(text[-1:]), cache).logits.argmax()))
            assert text == values[f"{prompt}_greedy"].tolist()


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*DISTINCT))
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str, kernels: Kernels) -> None:
    target, ids = target_of(name, kernels), recording(name)["prompt_ids"]
    one_by_one = target.new_cache(512)
    alone = torch.cat([target(one, one_by_one).logits for one in ids.split(1)])
    for size in (2, ROW_BLOCK, ROW_BLOCK + 1, len(ids)):
        cache = target.new_cache(512)
        together = torch.cat([target(part, cache).logits for part in ids.split(size)])
        assert torch.equal(alone, together), f"{size} rows at once"


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*DISTINCT))
def test_prompt_chunks_agree_with_single_rows(name: str, kernels: Kernels) -> None:
    target, ids = target_of(name, kernels), recording(name)["prompt_ids"]
    taps = (*range(target.n_taps), -1)
    expected = target(ids, target.new_cache(512), taps=taps)
    for size in (len(ids), 9):
        cache = target.new_cache(512)
        parts = [target(part, cache, taps=taps, logit_rows=1) for part in ids.split(size)]
        hidden = torch.cat([part.hidden for part in parts])
        torch.testing.assert_close(parts[-1].logits[0], expected.logits[-1], atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden, expected.hidden, atol=1e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*DISTINCT))
def test_the_last_taps_are_the_state_before_and_after_the_output_norm(
    name: str, kernels: Kernels
) -> None:
    target, ids = target_of(name, kernels), recording(name)["prompt_ids"]
    before, after = target(
        ids, target.new_cache(64), taps=(target.config.n_layer, -1)
    ).hidden.unbind(1)
    torch.testing.assert_close(after, target.output_norm(before))
    logits = target(ids, target.new_cache(64)).logits
    cap = target.config.logit_softcap
    head = target.lm_head(after)
    torch.testing.assert_close(logits, cap * torch.tanh(head / cap) if cap else head)


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_layers_keys_and_values_can_be_made_again_from_its_tap(kernels: Kernels) -> None:
    target, ids = target_of("mtp_gemma4", kernels), recording("mtp_gemma4")["prompt_ids"]
    cache = target.new_cache(64)
    hidden = target(ids, cache, taps=range(3)).hidden
    for layer in range(3):
        keys, values = cache.committed(layer, torch.float32)
        k, v = target.keys_values(layer, hidden[5:, layer], start=5)
        torch.testing.assert_close(k.transpose(0, 1), keys[:, 5:])
        torch.testing.assert_close(v.transpose(0, 1), values[:, 5:])


def test_mtp_layers_alone_are_no_target() -> None:
    with (
        GGUFFile.open(VECTORS / "mtp_hyv3_head.gguf") as file,
        pytest.raises(UnsupportedError, match="MTP layers without the model"),
    ):
        load_target(file)


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next", "deepseek4"])
def test_relatives_of_known_architectures_are_refused_by_name(tmp_path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "target.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with (
        GGUFFile.open(tmp_path / "target.gguf") as file,
        pytest.raises(UnsupportedError, match=f"unknown architecture: {name}"),
    ):
        load_target(file)


@pytest.mark.parametrize(
    ("architecture", "metadata", "error", "message"),
    [
        ("hy_v3", {"nextn_predict_layers": 0}, ModelFileError, "not part of a hy_v3 model"),
        ("hy_v3", {"nextn_predict_layers": 3}, ModelFileError, "nextn_predict_layers is 3"),
        ("hy_v3", {"expert_used_count": 9}, ModelFileError, "expert_used_count must be 1 to 5"),
        ("qwen35", {"nextn_predict_layers": None}, ModelFileError, "blk.2.ssm_a is missing"),
        ("qwen35", {"full_attention_interval": 0}, ModelFileError, "is 0, expected above 0"),
        (
            "qwen35",
            {"attention.value_length": 16},
            ModelFileError,
            "is 16, expected 8",
        ),
        ("qwen35", {"ssm.group_count": 3}, ModelFileError, "do not fit"),
        ("qwen35", {"ssm.conv_kernel": 3}, ModelFileError, "ssm_conv1d.weight"),
        ("mimo2", {"attention.sliding_window_pattern": [True]}, ModelFileError, "pattern"),
        ("gemma4", {"embedding_length_per_layer_input": 8}, UnsupportedError, "per-layer"),
        ("gemma4", {"attention.shared_kv_layers": 2}, UnsupportedError, "shared caches"),
        ("gemma4", {"expert_count": 4}, UnsupportedError, "or experts are not supported"),
        ("gemma4", {"rope.dimension_count_swa": 10}, ModelFileError, "even and at most 8"),
    ],
)
def test_faulty_files_are_refused(
    tmp_path: Path, architecture: str, metadata: dict, error: type, message: str
) -> None:
    path = tiny_mtp.write_mtp(tmp_path / "target.gguf", architecture, metadata=metadata)
    with GGUFFile.open(path) as file, pytest.raises(error, match=message):
        load_target(file)


@pytest.mark.parametrize("value", [-1, 2**62])
@pytest.mark.parametrize(
    "key",
    [
        *("embedding_length", "feed_forward_length", "expert_feed_forward_length"),
        *("attention.head_count", "attention.key_length", "attention.value_length"),
        *("expert_count", "expert_used_count"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, key: str, value: int) -> None:
    path = tiny_mtp.write_mtp(tmp_path / "target.gguf", "hy_v3")
    with (
        GGUFFile.open(path, {f"hy_v3.{key}": value}) as file,
        pytest.raises(ModelFileError, match=r"target\.gguf: "),
    ):
        load_target(file)


@pytest.mark.parametrize("name", ["tgt_gemma3", "mtp_gemma4", "mtp_mimo2"])
def test_negative_windows_are_refused(name: str) -> None:
    """With one, attention would begin behind its last key."""
    path = VECTORS / f"{name}.gguf"
    with GGUFFile.open(path) as file:
        key = file.key("attention.sliding_window")
    with (
        GGUFFile.open(path, {key: -1000}) as file,
        pytest.raises(ModelFileError, match="is -1000, expected 0 or above"),
    ):
        load_target(file)

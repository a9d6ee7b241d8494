"""Every target architecture against outputs recorded from llama.cpp on tiny random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.models.rows import ROW_BLOCK
from specdec.options import Activations, Kernels

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
FLOAT_FILES = {
    "tgt_llama": 1e-4,
    "tgt_llama_ropefreqs": 1e-4,
    "tgt_qwen2": 1e-4,
    "tgt_qwen3": 1e-4,
    "tgt_qwen3_yarn": 1e-4,
    "tgt_qwen3_linear": 1e-4,
    "tgt_qwen3moe": 1e-4,
    "tgt_markovian": 1e-4,
    "tgt_gemma3": 5e-3,  # ggml's GELU is a half-precision table
}
QUANTISED = ("tgt_llama256.q8_0", "tgt_llama256.q4_k_m")
KERNELS: tuple[Kernels, ...] = ("torch", "native")


def with_kernels(*names: str) -> list[tuple[str, Kernels]]:
    """Every file with every back end."""
    return [(name, kernels) for name in names for kernels in KERNELS]


def load(
    name: str, kernels: Kernels, activations: Activations = "f32"
) -> tuple[Target, dict[str, np.ndarray]]:
    with GGUFFile.open(VECTORS / f"{name}.gguf") as file:
        target = load_target(file, kernels=kernels, activations=activations)
    with np.load(VECTORS / f"{name}.npz") as recorded:
        return target, dict(recorded)


def tokens(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def gap(actual: Tensor, expected: np.ndarray) -> float:
    return float((actual - torch.from_numpy(expected)).abs().max())


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*FLOAT_FILES))
def test_logits_taps_and_greedy_text(name: str, kernels: Kernels) -> None:
    target, recorded = load(name, kernels)
    taps = tuple(range(target.n_taps))
    for prompt in range(3):
        cache = target.new_cache(512)
        output = target(tokens(recorded[f"p{prompt}_ids"]), cache, taps=taps)
        assert gap(output.logits, recorded[f"p{prompt}_logits"]) < FLOAT_FILES[name]
        for layer in range(target.config.n_layer):
            if (key := f"p{prompt}_layer_inp_{layer}") in recorded:
                assert gap(output.hidden[:, layer], recorded[key]) < 1e-4
        text = [int(output.logits[-1].argmax())]
        for _ in recorded[f"p{prompt}_greedy"][1:]:
            text.append(int(target(torch.tensor(text[-1:]), cache).logits.argmax()))
        assert text == recorded[f"p{prompt}_greedy"].tolist()


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*FLOAT_FILES))
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str, kernels: Kernels) -> None:
    target, recorded = load(name, kernels)
    ids = tokens(recorded["p0_ids"])
    one_by_one = target.new_cache(512)
    alone = torch.cat([target(one, one_by_one).logits for one in ids.split(1)])
    for size in (2, 3, ROW_BLOCK, ROW_BLOCK + 1, len(ids)):
        cache = target.new_cache(512)
        together = torch.cat([target(part, cache).logits for part in ids.split(size)])
        assert torch.equal(alone, together), f"{size} rows at once"


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*FLOAT_FILES))
def test_prompt_chunks_agree_with_single_rows(name: str, kernels: Kernels) -> None:
    target, recorded = load(name, kernels)
    ids = tokens(recorded["p0_ids"])
    taps = tuple(range(target.n_taps))
    expected = target(ids, target.new_cache(512), taps=taps)
    for size in (len(ids), 17):
        cache = target.new_cache(512)
        parts = [target(part, cache, taps=taps, logit_rows=1) for part in ids.split(size)]
        hidden = torch.cat([part.hidden for part in parts])
        torch.testing.assert_close(parts[-1].logits[0], expected.logits[-1], atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden, expected.hidden, atol=1e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("activations", ["f32", "int8"])
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*QUANTISED))
def test_quantised_files_within_activation_rounding(
    name: str, kernels: Kernels, activations: Activations
) -> None:
    target, recorded = load(name, kernels, activations)
    logits = target(tokens(recorded["p0_ids"]), target.new_cache(512)).logits
    expected = torch.from_numpy(recorded["p0_logits"])
    assert float((logits - expected).abs().max()) < 0.3
    best = expected.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > 0.3
    assert torch.equal(logits.argmax(-1)[clear], expected.argmax(-1)[clear])


def plain_llama(file: GGUFFile, ids: Tensor) -> Tensor:
    """A llama forward written straight down in float64, rotated in interleaved pairs."""
    weight = {name: file.load(name).double() for name in file.tensors}
    n_head = file.get_int("llama.attention.head_count")
    n_kv = file.get_int("llama.attention.head_count_kv")
    eps = file.get_float("llama.attention.layer_norm_rms_epsilon")
    base = file.get_float("llama.rope.freq_base")

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight[name]

    def rotate(x: Tensor) -> Tensor:
        width = x.shape[-1]
        angle = torch.arange(len(x)).double()[:, None] * base ** (
            -torch.arange(0, width, 2).double() / width
        )
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    x = weight["token_embd.weight"][ids]
    for layer in range(file.get_int("llama.block_count")):
        p = f"blk.{layer}."
        h = norm(x, p + "attn_norm.weight")
        q = rotate((h @ weight[p + "attn_q.weight"].T).unflatten(-1, (n_head, -1)))
        k = rotate((h @ weight[p + "attn_k.weight"].T).unflatten(-1, (n_kv, -1)))
        v = (h @ weight[p + "attn_v.weight"].T).unflatten(-1, (n_kv, -1))
        k, v = (t.repeat_interleave(n_head // n_kv, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores + torch.full(scores.shape[1:], -torch.inf).double().triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + mixed @ weight[p + "attn_output.weight"].T
        h = norm(x, p + "ffn_norm.weight")
        gate = torch.nn.functional.silu(h @ weight[p + "ffn_gate.weight"].T)
        x = x + (gate * (h @ weight[p + "ffn_up.weight"].T)) @ weight[p + "ffn_down.weight"].T
    head = weight.get("output.weight", weight["token_embd.weight"])
    return norm(x, "output_norm.weight") @ head.T


@torch.inference_mode()
@pytest.mark.parametrize(("name", "kernels"), with_kernels(*QUANTISED, "tgt_llama"))
def test_agrees_with_a_plain_computation_on_the_dequantised_weights(
    name: str, kernels: Kernels
) -> None:
    target, recorded = load(name, kernels)
    ids = tokens(recorded["p0_ids"])
    with GGUFFile.open(VECTORS / f"{name}.gguf") as file:
        expected = plain_llama(file, ids)
    logits = target(ids, target.new_cache(512)).logits
    assert float((logits - expected).abs().max()) < 1e-4


@torch.inference_mode()
def test_a_tap_is_the_input_of_the_layer() -> None:
    """Layers that add known constants: a wrong offset would pass every shape check."""
    target, recorded = load("tgt_qwen3", "torch")
    for i, layer in enumerate(target.blk):
        layer.forward = lambda hidden, *_, i=i: hidden + 10.0**i  # type: ignore[method-assign]
    ids = tokens(recorded["p0_ids"])[:3]
    embedded = target.embed(ids)
    output = target(ids, target.new_cache(8), taps=(4, 0, 2, 2))
    for slot, added in enumerate((1111.0, 0.0, 11.0, 11.0)):
        torch.testing.assert_close(output.hidden[:, slot], embedded + added)


@torch.inference_mode()
def test_native_taps_are_those_of_torch() -> None:
    taps = (4, 0, 2, 2, -1, 1)
    found = []
    for kernels in KERNELS:
        target, recorded = load("tgt_qwen3", kernels)
        output = target(tokens(recorded["p0_ids"])[:3], target.new_cache(8), taps=taps)
        assert output.hidden is not None
        found.append(output.hidden)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)

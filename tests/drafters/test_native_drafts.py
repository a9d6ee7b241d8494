"""EAGLE-3 and MTP drafts on native kernels: what is packed, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import tiny_mtp
import torch
from torch import Tensor, nn

from specdec.drafters.eagle3 import Eagle3Drafter, Eagle3Model
from specdec.drafters.eagle3 import load as load_eagle3
from specdec.drafters.eagle3_layer import NativePairLayer
from specdec.drafters.mtp.assistant import load_assistant
from specdec.drafters.mtp.drafter import MTPDrafter
from specdec.drafters.mtp.heads import load_heads
from specdec.drafters.mtp.model import MTPModel
from specdec.drafters.selection import DraftContext, build_drafters
from specdec.errors import UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.native.layer import NativeLayer, NativeLinear
from specdec.options import (
    Activations,
    DraftOptions,
    Kernels,
    RopeOptions,
    SamplingOptions,
    SpecOptions,
)

N_EMBD, N_CTX, N_VOCAB = 32, 128, 259
CPU = torch.device("cpu")
TOKENS = torch.arange(70, 90)
MTP = ("hy_v3", "mimo2", "qwen35", "gemma4", "separate")

EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before fc": {"norm_before_fc": True},
    "norm before residual": {"metadata": {"eagle3.norm_before_residual": True}},
    "own ends": {"n_embd": 24, "d2t": (70, 80, 90)},
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf")))


@pytest.fixture(scope="module")
def mtp_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    """Targets with their heads; what `gemma4` and `separate` draft with has names of its own."""
    folder = tmp_path_factory.mktemp("mtp")
    paths = {
        name: tiny_mtp.write_mtp(folder / name, name, n_heads=3 if name == "mimo2" else 1)
        for name in MTP[:-1]
    }
    paths["gemma4 draft"] = tiny_mtp.write_assistant(folder / "assistant")
    tied: dict[str, np.ndarray | None] = {"output.weight": None}
    paths["separate draft"] = tiny_mtp.write_mtp(folder / "tied", "hy_v3", seed=3, tensors=tied)
    paths["separate"] = paths["hy_v3"]
    return {name: GGUFFile.open(path) for name, path in paths.items()}


def eagle3(target: Target, folder: Path, kernels: Kernels, **more: Any) -> Eagle3Model:
    with GGUFFile.open(tiny_drafts.write_eagle3(folder / "d.gguf", **more)) as file:
        return load_eagle3(file, target, kernels=kernels)


def mtp(files: dict[str, GGUFFile], name: str, kernels: Kernels) -> MTPModel:
    target, draft = load_target(files[name]), files.get(f"{name} draft", files[name])
    load = load_assistant if name == "gemma4" else load_heads
    more = {"is_separate": True} if name == "separate" else {}
    return load(draft, target, RopeOptions(), CPU, kernels=kernels, **more)  # type: ignore[operator]


def taps(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(len(TOKENS), count, N_EMBD, generator=generator)


def observed(drafter: Any, sizes: tuple[int, ...]) -> Any:
    """The drafter when it has seen the tokens in pieces."""
    drafter.begin(SamplingOptions(temp=0))
    hidden = taps(len(drafter.taps))
    for tokens, rows in zip(TOKENS.split(sizes), hidden.split(sizes), strict=True):
        drafter.observe(tokens, rows)
    return drafter


def eagle3_logits(model: Eagle3Model, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The logits of three steps, and all keys and values."""
    drafter = observed(Eagle3Drafter(model, DraftOptions(n_max=3), N_CTX), sizes)
    state, found = drafter._waiting(), []
    for token in (90, 80, 70):
        logits, state = drafter.step(token, state)
        found.append(logits)
    return torch.stack(found), *drafter._cache.committed(0, torch.float32)


def mtp_logits(model: MTPModel, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The logits of three steps, and the first head's keys and values."""
    drafter = observed(MTPDrafter(model, DraftOptions(n_max=3), N_CTX), sizes)
    kept = drafter._cache.committed(0, torch.float32)
    tokens, hidden, found = [90, 80, 70], [drafter._waiting()], []
    for step in range(3):
        so_far = torch.tensor(tokens[: step + 1])
        logits, output = model.step(so_far, torch.stack(hidden), drafter._cache)
        found.append(logits)
        hidden.append(output)
    return torch.stack(found), *kept


def assert_close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-5)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_agrees_with_torch(name: str, llama: Target, tmp_path: Path) -> None:
    plain, native = (eagle3(llama, tmp_path, k, **EAGLE3[name]) for k in ("torch", "native"))
    assert isinstance(plain.decoder.fc, nn.Linear)
    assert isinstance(native.decoder.fc, NativeLinear)
    assert isinstance(native.decoder.layer, NativePairLayer)
    assert not list(native.decoder.parameters())
    whole = eagle3_logits(native, (20,))
    assert_close(whole, eagle3_logits(plain, (20,)))
    for sizes in ((1,) * 20, (1, 12, 7)):
        assert_same(eagle3_logits(native, sizes), whole)


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_eagle3_with_weights_in_blocks(
    activations: Activations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import random_drafts

    path = tmp_path / "d.gguf"
    with GGUFFile.open(tiny.write_target(tmp_path / "t.gguf")) as file:
        random_drafts.write_eagle3(path, file)
        target = load_target(file)
    found = []
    for kernels in ("torch", "native"):
        with GGUFFile.open(path) as file:
            model = load_eagle3(file, target, kernels=kernels, activations=activations)  # type: ignore[arg-type]
            found.append(eagle3_logits(model, (20,)))
    for theirs, ours in zip(*found, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < (1e-5 if activations == "f32" else 0.03)
    assert_same(eagle3_logits(model, (1, 12, 7)), found[1])


@pytest.mark.parametrize("name", MTP)
def test_mtp_agrees_with_torch(name: str, mtp_files: dict[str, GGUFFile]) -> None:
    plain, native = (mtp(mtp_files, name, kernels) for kernels in ("torch", "native"))
    whole = mtp_logits(native, (20,))
    assert_close(whole, mtp_logits(plain, (20,)))
    if name != "gemma4":
        for sizes in ((1,) * 20, (1, 12, 7)):
            assert_same(mtp_logits(native, sizes), whole)


def test_layers_that_the_kernels_know_run_whole(mtp_files: dict[str, GGUFFile]) -> None:
    for name in ("hy_v3", "mimo2", "qwen35", "separate"):
        layers = mtp(mtp_files, name, "native")._layers  # type: ignore[attr-defined]
        assert all(isinstance(layer, NativeLayer) for layer in layers)
    assistant = mtp(mtp_files, "gemma4", "native").assistant  # type: ignore[attr-defined]
    assert isinstance(assistant.layers[0].ffn_down, NativeLinear)


def test_biases_are_added(tmp_path: Path) -> None:
    """Queries, keys and values of glm4moe have some."""
    random = np.random.default_rng(5)
    more = {
        f"blk.{layer}.attn_{name}.bias": random.standard_normal(size).astype(np.float32)
        for layer in range(3)
        for name, size in (("q", 32), ("k", 16), ("v", 16))
    }
    for layer in range(3):
        more[f"blk.{layer}.post_attention_norm.weight"] = np.ones(N_EMBD, np.float32)
    tiny_mtp.BLOCKS["glm4moe"] = lambda values, _: (
        tiny_mtp._attention(N_EMBD)
        | {
            f"ffn_{part}.weight": (N_EMBD, 64) if part == "down" else (64, N_EMBD)
            for part in ("gate", "up", "down")
        }
    )
    path = tiny_mtp.write_mtp(tmp_path / "glm.gguf", "glm4moe", tensors=more)
    del tiny_mtp.BLOCKS["glm4moe"]
    files = {"glm4moe": GGUFFile.open(path)}
    plain, native = (mtp(files, "glm4moe", kernels) for kernels in ("torch", "native"))
    assert_close(mtp_logits(native, (20,)), mtp_logits(plain, (20,)))


def test_where_the_kernels_cannot_run(llama: Target, tmp_path: Path) -> None:
    path = tiny_drafts.write_eagle3(tmp_path / "d.gguf")
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedError, match="need the CPU"):
        load_eagle3(file, llama, "meta", kernels="native")


def test_caches_in_half_precision(mtp_files: dict[str, GGUFFile]) -> None:
    types = SpecOptions(types=("draft-mtp",), draft=DraftOptions(cache_type_k="f16"))
    target_file = mtp_files["hy_v3"]

    def drafted(kernels: Kernels) -> list[int]:
        context = DraftContext(
            spec=types,
            target=load_target(target_file),
            target_file=target_file,
            draft_file=None,
            n_ctx=N_CTX,
            cache_types=(torch.float32, torch.float32),
            dtype_k=torch.float16,
            dtype_v=torch.float32,
            device=CPU,
            kernels=kernels,
        )
        drafter = build_drafters(("draft-mtp",), context).drafters[0]
        return observed(drafter, (20,)).draft(90, 2).tokens

    assert drafted("native") == drafted("torch")

"""The real SmolLM2-135M-Instruct against llama.cpp's float32 run of the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from real_model import PATH

from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target

RECORDED = Path(__file__).parent.parent / "data" / "vectors" / "real_smollm2_f32.npz"
N_GREEDY = 64


@pytest.fixture(scope="module", params=["torch", "native"])
def target(request: pytest.FixtureRequest) -> Target:
    with GGUFFile.open(PATH) as file:
        return load_target(file, kernels=request.param, activations="f32")


@torch.inference_mode()
@pytest.mark.parametrize("prompt", range(5))
def test_logits_layer_inputs_and_greedy_text(target: Target, prompt: int) -> None:
    with np.load(RECORDED) as recorded:
        ours = {
            key.removeprefix(f"p{prompt}_"): recorded[key]
            for key in recorded
            if key.startswith(f"p{prompt}_")
        }
    taps = (0, 7, 14, 21, 28)
    cache = target.new_cache(512)
    ids = torch.from_numpy(ours["ids"].astype(np.int64))
    output = target(ids, cache, taps=taps)
    for slot, layer in enumerate(taps):
        expected = torch.from_numpy(ours[f"layer_inp_{layer}_last"])
        torch.testing.assert_close(output.hidden[-1, slot], expected, atol=1e-2, rtol=1e-4)
    top = torch.from_numpy(ours["top_ids"].astype(np.int64))
    expected = torch.from_numpy(ours["top_logits"])
    torch.testing.assert_close(output.logits.gather(1, top), expected, atol=1e-3, rtol=0)

    token, text = int(output.logits[-1].argmax()), []
    for _ in range(N_GREEDY):
        text.append(token)
        token = int(target(torch.tensor([token]), cache).logits.argmax())
    assert text == ours["greedy"].tolist()


@torch.inference_mode()
def test_eight_bit_activations_seldom_change_the_best_token() -> None:
    """llama.cpp's own eight-bit activations differ from its float32 run about as often."""
    with GGUFFile.open(PATH) as file:
        target = load_target(file, kernels="native", activations="int8")
    n_rows, n_other = 0, 0
    with np.load(RECORDED) as recorded:
        for prompt in range(5):
            ids = torch.from_numpy(recorded[f"p{prompt}_ids"].astype(np.int64))
            best = torch.from_numpy(recorded[f"p{prompt}_top_ids"].astype(np.int64))[:, 0]
            found = target(ids, target.new_cache(512)).logits.argmax(-1)
            n_rows, n_other = n_rows + len(ids), n_other + int((found != best).sum())
    assert n_other <= 0.06 * n_rows

"""Drafts of MTP layers against llama.cpp's own numbers, all rounds of a recording.

``data/vectors/mtp_NAME.npz`` holds what llama.cpp computed with ``mtp_NAME.gguf``: final hidden
states of the target, and per round the drafts with logits and hidden outputs of each step. In
rounds 1 to 5 the number of accepted tokens is forced; round 3 has no draft. The ``accepted``
recordings are never forced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.drafters.mtp.drafter import MTPDrafter
from specdec.drafters.selection import DraftContext, build_drafters, choose_types
from specdec.generate import Limits, decode
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, Kernels, SamplingOptions, SpecOptions
from specdec.sampling import build_chain
from specdec.verify import Verifier

DATA = Path(__file__).parents[1] / "data" / "vectors"
N_CTX = 256
GREEDY = SamplingOptions(temp=0)
PAIRS = {
    "mtp_hyv3": ("mtp_hyv3", "mtp_hyv3", None),
    "mtp_hyv3_head": ("mtp_hyv3", "mtp_hyv3_trunk", "mtp_hyv3_head"),
    "mtp_hyv3_head_on_whole_file": ("mtp_hyv3", "mtp_hyv3", "mtp_hyv3_head"),
    "mtp_glm4moe": ("mtp_glm4moe", "mtp_glm4moe", None),
    "mtp_mimo2": ("mtp_mimo2", "mtp_mimo2", None),
    "mtp_qwen35": ("mtp_qwen35", "mtp_qwen35", None),
    "mtp_gemma4": ("mtp_gemma4_assistant", "mtp_gemma4", "mtp_gemma4_assistant"),
    "mtp_chain_accepted": ("mtp_chain_accepted", "mtp_chain_accepted", None),
    "mtp_accepted": ("mtp_accepted", "mtp_accepted", None),
}
"""Recording, target file, draft file."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def open_file(name: str) -> GGUFFile:
    return GGUFFile.open(DATA / f"{name}.gguf")


@functools.cache
def target_of(name: str) -> Target:
    return load_target(open_file(name))


@functools.cache
def recording(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz") as recorded:
        return dict(recorded)


def new_drafter(
    pair: str, options: DraftOptions | None = None, kernels: Kernels = "torch"
) -> MTPDrafter:
    """The drafter of a row of `PAIRS`, found as a run would find it."""
    _, target_name, draft_name = PAIRS[pair]
    target_file = open_file(target_name)
    draft_file = None if draft_name is None else open_file(draft_name)
    spec = SpecOptions(types=("draft-mtp",), draft=options or DraftOptions(n_max=4))
    context = DraftContext(
        spec=spec,
        target=target_of(target_name),
        target_file=target_file,
        draft_file=draft_file,
        n_ctx=N_CTX,
        cache_types=(torch.float32, torch.float32),
        dtype_k=torch.float32,
        dtype_v=torch.float32,
        device=torch.device("cpu"),
        kernels=kernels,
    )
    first = build_drafters(choose_types(spec, target_file, draft_file), context)
    drafter = first.drafters[0]
    assert isinstance(drafter, MTPDrafter)
    drafter.begin(GREEDY)
    return drafter


class Steps:
    """Keeps logits and hidden outputs of the steps that a drafter runs."""

    def __init__(self, drafter: MTPDrafter) -> None:
        self.logits: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.tokens: list[int] = []
        self._step = drafter.model.step
        drafter.model.step = self  # type: ignore[method-assign, assignment]

    def __call__(self, tokens: Tensor, hidden: Tensor, cache: object) -> tuple[Tensor, Tensor]:
        logits, output = self._step(tokens, hidden, cache)  # type: ignore[arg-type]
        self.logits.append(logits)
        self.hidden.append(output)
        self.tokens.append(int(tokens[-1]))
        return logits, output

    def take(self) -> tuple[list[int], Tensor, Tensor]:
        found = self.tokens, torch.stack(self.logits), torch.stack(self.hidden)
        self.tokens, self.logits, self.hidden = [], [], []
        return found


def close(found: Tensor, expected: np.ndarray, pair: str) -> None:
    tolerance = 3e-2 if "gemma4" in pair else 1e-4  # ggml's GELU is a half-precision table
    expected = expected[..., :: found.shape[-1] // expected.shape[-1]]
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=tolerance, rtol=0)


@pytest.mark.parametrize("split", [512, 7])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_steps_of_all_rounds(pair: str, split: int, kernels: Kernels) -> None:
    """Target, heads and driver together: only tokens and accept counts come from the recording."""
    name, target_name, _ = PAIRS[pair]
    values, target, drafter = (
        recording(name),
        target_of(target_name),
        new_drafter(pair, kernels=kernels),
    )
    steps, cache = Steps(drafter), target.new_cache(N_CTX)
    prompt = torch.from_numpy(values["prompt_ids"].astype(np.int64))[:-1]
    h = []
    for part in prompt.split(split):
        output = target(part, cache, taps=drafter.taps, logit_rows=0)
        drafter.observe(part, output.hidden)
        h.append(output.hidden[:, -1])
    close(torch.cat(h), values["prefill_h"], pair)
    n_rounds = sum(key.endswith("_n_past") for key in values)
    assert n_rounds == (6 if "accepted" in pair else 7)
    for index in range(n_rounds):
        mine = {k[3:]: v for k, v in values.items() if k.startswith(f"r{index}_")}
        assert cache.length == int(mine["n_past"])
        room = len(mine["draft"])
        if room:
            draft = drafter.draft(int(mine["id_last"]), room)
            tokens, logits, hidden = steps.take()
            close(drafter._waiting(), mine["pending_h"], pair)
            assert tokens == mine["step_tokens"].tolist()
            close(logits, mine["draft_logits"], pair)
            close(hidden, mine["head_h"], pair)
            assert draft.tokens == mine["draft"].tolist()
        block = torch.from_numpy(mine["verify_tokens"].astype(np.int64))
        output = target(block, cache, taps=drafter.taps)
        close(output.hidden[:, -1], mine["verify_h"], pair)
        assert output.logits.argmax(-1).tolist() == mine["verify_argmax"].tolist()
        keep = int(mine["n_accepted"]) + 1
        cache.truncate(int(mine["n_past"]) + keep)
        if room:
            drafter.accept(keep - 1)
        drafter.observe(block[:keep], output.hidden[:keep])


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "accepted" in pair])
def test_a_head_that_is_right_now_and_then(pair: str) -> None:
    """The loop itself: every round drafts, accepts and emits what llama.cpp did."""
    values, target = recording(pair), target_of(pair)
    prompt = values["prompt_ids"].tolist()
    final = values["final_tokens"].tolist()
    drafter = new_drafter(pair, DraftOptions(n_max=4))
    chain = build_chain(GREEDY, n_vocab=target.config.n_vocab, end_tokens=frozenset())
    rounds = decode(
        target,
        target.new_cache(N_CTX),
        drafter,
        Verifier(chain, frozenset()),
        prompt,
        Limits(N_CTX, n_predict=40),
    )
    text = list(prompt)
    for index in range(6):
        done = next(rounds)
        assert done.draft.tokens == values[f"r{index}_draft"].tolist()
        assert done.accepted == int(values[f"r{index}_n_accepted"])
        text += done.tokens
    assert text == final

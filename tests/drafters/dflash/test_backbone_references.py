"""The backbones of DSpark drafts against references in plain float64 loops.

DeepSeek-V4's reference is itself held against a run of llama.cpp; V4.1's and Mistral Large 4's, for
which there are no files, share its parts and otherwise rest on upstream's text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch
from drafters.dflash.dspark_reference import DSparkReference, Floats
from drafters.dflash.dsv4_reference import DSV4Reference
from drafters.dflash.dsv41_reference import DSV41Reference
from drafters.dflash.mistral_large4_reference import MistralLarge4Reference
from drafters.dflash.trace import Trace, path_of
from torch import Tensor

from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.dspark import DSparkHead
from specdec.drafters.dflash.model import load
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions

LAST = 105
BLOCK = 5
PIECES = (7, 1, 0, 4, 8)
"""Rows of a prompt per `observe`; 0 stands for a cut back to `CUT` rows."""
CUT = 5
REFERENCES: Mapping[str, type[DSparkReference]] = {
    "deepseek4": DSV4Reference,
    "deepseek4.1": DSV41Reference,
    "mistral-large4": MistralLarge4Reference,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
LARGER_V4 = {
    "n_head": 6,
    "head_dim": 16,
    "n_rot": 4,
    "q_rank": 14,
    "n_groups": 3,
    "rank": 5,
    "n_expert": 7,
    "n_shared": 2,
    "n_ff": 12,
}
SMALLER_V4 = {"n_head": 2, "head_dim": 6, "n_rot": 6, "n_groups": 1, "n_expert": 2}
STACKED = {"blk.0.attn_output_a.weight": np.ones((2, 8, 24), np.float32) / 20}
"""Files have the groups of heads stacked, as `tiny_drafts` writes them, or on an axis."""
GATED = {"tensors": tiny_drafts.joint_projection("joint_proj")}
V4: list[dict[str, Any]] = [
    {},
    {"sizes": LARGER_V4, "n_layer": 3, "keys": {"expert_used_count": 3}},
    {"sizes": SMALLER_V4, "n_layer": 1, "keys": {"attention.sliding_window": 1}},
    {"keys": {"attention.sliding_window": 2, "attention.causal": True}},
    {"keys": {"attention.sliding_window": 14, "sample_from_anchor": False}},
    {"keys": {"attention.sliding_window": 100, "attention.causal": True}},
    {"keys": {"swiglu_clamp_exp": 0.0, "expert_weights_norm": False}},
    {"keys": {"swiglu_clamp_exp": [0.1, 0.4], "swiglu_clamp_shexp": 0.2}},
    {"keys": {"hyper_connection.sinkhorn_iterations": 1, "hyper_connection.epsilon": 0.01}},
    {"keys": {"embedding_scale": 3.0, "final_logit_softcapping": 0.5, "rope.freq_base": 50.0}},
    {"keys": YARN},
    {"d2t": tuple(range(200, 60, -3)), "target_layers": (2, 0, 1)},
    {"tensors": STACKED | {"conf_proj.weight": None, "conf_proj.bias": None}},
]
MISTRAL: list[dict[str, Any]] = [
    {},
    {
        "sizes": {"n_head": 5, "rank": 11, "n_rot": 10, "n_rest": 3, "head_dim_v": 7, "n_ff": 40},
        "n_layer": 3,
        "keys": {"attention.key_length": 21},
    },
    GATED | {"keys": {"attention.sliding_window": 1, "final_logit_softcapping": 1.5}},
    {"keys": {"attention.sliding_window": 2, "attention.causal": True}},
    GATED | {"keys": {"attention.sliding_window": 14, "sample_from_anchor": False}},
    {"keys": {"attention.sliding_window": 100, "embedding_scale": 3.0, "rope.freq_base": 50.0}},
    {"keys": YARN | {"rope.scaling.yarn_beta_fast": 4.0}},
    {"keys": YARN | {"rope.scaling.yarn_log_multiplier": 1.0}},
    {"keys": YARN | {"rope.scaling.yarn_log_multiplier": 0.3, "rope.scaling.attn_factor": 1.3}},
    {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}},
    GATED | {"d2t": tuple(range(200, 60, -3)), "target_layers": (2, 0, 1)},
]
CASES = [
    (backbone, index, case)
    for backbone in REFERENCES
    for index, case in enumerate(MISTRAL if backbone == "mistral-large4" else V4)
]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf")))


def close(found: Tensor, expected: Floats, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), torch.from_numpy(expected), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("backbone", "seed", "case"), CASES, ids=[f"{name}-{index}" for name, index, _ in CASES]
)
def test_drafts_are_those_of_the_reference(
    tmp_path: Path, target: Target, backbone: str, seed: int, case: dict[str, Any]
) -> None:
    """Prompts in pieces, a cut in the middle, every length of a block."""
    path = write_draft(tmp_path / "d.gguf", backbone, seed, case)
    drafter = DFlashDrafter(load(GGUFFile.open(path), target), DraftOptions(n_max=BLOCK), 256)
    drafter.begin(SamplingOptions(temp=0))
    reference = REFERENCES[backbone](path)
    head, embed = drafter.model.head, drafter.model.vocabulary.embed
    assert isinstance(head, DSparkHead)
    table = embed(torch.arange(target.config.n_vocab)).double().numpy()
    output = target.lm_head(torch.eye(target.config.n_embd)).T.double().numpy()
    random = np.random.default_rng(seed)
    n_seen = 0
    for piece in PIECES:
        if piece == 0:
            n_seen = drafter.begin(SamplingOptions(temp=0), CUT)
            assert n_seen == CUT
            reference.cut(CUT)
            continue
        taps = random.standard_normal((piece, len(drafter.taps), target.config.n_embd))
        taps = taps.astype(np.float32)
        drafter.observe(torch.arange(piece), torch.from_numpy(taps))
        reference.observe(taps)
        n_seen += piece
        shortest = 1 + head.first_slot if piece == PIECES[-1] else BLOCK
        for n_slots in range(shortest, BLOCK + 1):
            n_draft = n_slots - head.first_slot
            logits, confidences, tokens = reference.draft(LAST, n_slots, table, output)
            found = head.chain(drafter.run(LAST, n_draft), n_draft)
            close(found[0], logits[head.first_slot :])
            if head.has_confidence:
                close(found[2], confidences[head.first_slot :])
            assert found[1].tolist() == tokens
            assert drafter.draft(LAST, n_draft).tokens == tokens
    assert n_seen == CUT + PIECES[-1] + PIECES[-2]


def write_draft(path: Path, backbone: str, seed: int, case: dict[str, Any]) -> Path:
    draft = dict(case)
    keys = {f"dflash.{name}": value for name, value in draft.pop("keys", {}).items()}
    return tiny_drafts.write_dflash(
        path,
        head="draft-dspark",
        backbone=backbone,
        seed=seed,
        block_size=BLOCK,
        metadata=keys,
        **draft,
    )


def test_the_reference_of_deepseek4_is_what_llama_cpp_computes() -> None:
    trace = Trace("dspark_dsv4")
    reference = DSV4Reference(path_of("dspark_dsv4.gguf"))
    config, vocabulary = trace.model.config, trace.model.vocabulary
    table = vocabulary.embed(torch.arange(config.n_vocab)).double().numpy()
    output = vocabulary.logits(torch.eye(config.n_embd)).T.double().numpy()
    columns = np.arange(config.n_vocab)

    def taps(rows: Tensor) -> Floats:
        return rows.view(len(rows), len(config.target_layers), config.n_embd).double().numpy()

    reference.observe(taps(trace.tensor("prefill_features")))
    for recorded in trace.rounds:
        logits, confidences, tokens = reference.draft(
            recorded.last_token, len(recorded.draft), table, output
        )
        assert tokens == recorded.draft
        close(recorded.tensor("confidence"), confidences)
        expected = recorded.tensor("draft_logits")
        close(expected, logits[:, columns[:: config.n_vocab // expected.shape[1]]])
        n_kept = int(recorded.values["n_accepted"]) + 1
        reference.observe(taps(recorded.tensor("verify_features"))[:n_kept])

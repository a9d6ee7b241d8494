"""Plain DFlash and DFlash2 drafts against llama.cpp's own numbers, all rounds of a recording."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from drafters.dflash.reference import PlainDraft
from drafters.dflash.trace import Round, Trace, by_id, names

from specdec.drafters.base import DraftSampler
from specdec.drafters.dflash.dflash2 import DFlash2Head
from specdec.drafters.dflash.head import DraftBlock, walk
from specdec.options import DraftOptions, SamplingOptions

QUANTISED = "dft_q8_on_q4km"
FLOAT = [name for name in names("dft") if name != QUANTISED]
DFLASH2 = names("dft2")
GELU_TOLERANCE = 5e-3  # ggml's GELU is a half-precision table


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def trace_of(name: str) -> Trace:
    return Trace(name)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("piece", [512, 7, 1])
def test_injected_keys_and_values(name: str, piece: int) -> None:
    trace = trace_of(name)
    drafter = trace.drafter()
    features = trace.tensor("prefill_features")
    trace.observe(drafter, features, piece)
    taps = features.view(features.shape[0], len(drafter.taps), -1)
    close(trace.model.trunk.fuse(taps), trace.tensor("dbg_inject_inp_g_embeddings"))
    for layer in range(trace.model.config.n_layer):
        keys, values = drafter._cache.committed(layer, torch.float32)
        close(keys.transpose(0, 1), trace.tensor(f"dbg_inject_Kcur_injected-{layer}"))
        recorded = trace.tensor(f"dbg_inject_Vcur_injected-{layer}")
        close(values.transpose(0, 1), recorded.view(values.transpose(0, 1).shape))


@pytest.mark.parametrize("name", FLOAT)
def test_blocks_and_drafts_of_all_rounds(name: str) -> None:
    trace = trace_of(name)
    tolerance = GELU_TOLERANCE if name == "dft_opts" else 1e-4
    head = trace.model.head
    score = head.logits if isinstance(head, DFlash2Head) else trace.model.vocabulary.logits
    drafter = trace.drafter()

    def look(recorded: Round, block: DraftBlock) -> None:
        assert drafter._cache.length == recorded.values["n_past"]
        expected = recorded.tensor("draft_logits")
        close(trace.scattered(score(block.hidden), expected.shape[1]), expected, tolerance)
        if recorded.values["n_past"] == trace.rounds[0].values["n_past"]:
            close(block.hidden, trace.tensor("dbg_block_result_norm"), tolerance)

    drafts = list(trace.replay(drafter, look))
    assert len(drafts) == 7
    for recorded, tokens in drafts:
        assert tokens == recorded.draft


@pytest.mark.parametrize("name", DFLASH2)
def test_lattices_and_step_probabilities(name: str) -> None:
    trace = trace_of(name)
    head = trace.model.head
    assert isinstance(head, DFlash2Head)
    sampler = DraftSampler(DraftOptions(), SamplingOptions(temp=0))

    def look(recorded: Round, block: DraftBlock) -> None:
        ids, scores = head.lattice(block.hidden[1:], block.last_token)
        recorded_ids = recorded.tensor("lattice_ids")[1:]
        expected_ids, expected = by_id(recorded_ids, recorded.tensor("lattice_scores")[1:])
        assert torch.equal(ids, expected_ids)
        close(scores, expected)
        found = torch.tensor([pick.confidence for pick in walk(ids, scores, sampler)])
        close(found, recorded.tensor("lattice_prob"))

    assert len(list(trace.replay(trace.drafter(), look))) == 7


def test_quantised_draft_on_a_quantised_target() -> None:
    """llama.cpp rounds activations to 8 bits here, so its numbers are compared loosely and a plain
    float64 computation on the dequantised weights closely."""
    trace = trace_of(QUANTISED)
    plain = PlainDraft(trace.file)
    plain.observe(trace.values["prefill_features"].astype("float64"))
    drafter = trace.drafter()
    vocabulary = trace.model.vocabulary

    def look(recorded: Round, block: DraftBlock) -> None:
        embeddings = vocabulary.embed(torch.tensor(recorded.values["block_tokens"]).long())
        hidden = torch.from_numpy(plain.block(embeddings.double().numpy())).float()
        close(block.hidden, hidden)
        logits = vocabulary.logits(block.hidden)
        close(logits, vocabulary.logits(hidden))
        expected = recorded.tensor("draft_logits")
        close(trace.scattered(logits, expected.shape[1]), expected, tolerance=0.3)

    agreed = 0
    for recorded, tokens in trace.replay(drafter, look):
        agreed += tokens == recorded.draft
        n_accepted = int(recorded.values["n_accepted"])
        plain.observe(recorded.values["verify_features"][: n_accepted + 1].astype("float64"))
    assert agreed >= 5

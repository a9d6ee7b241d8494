"""LiliCorr drafts against llama.cpp's own numbers, and what the anchor depends on."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from drafters.dflash.trace import Round, Trace, by_id, names

from specdec.drafters.base import DraftSampler
from specdec.drafters.dflash.head import DraftBlock, walk
from specdec.drafters.dflash.lilicorr import LiliCorrHead
from specdec.options import DraftOptions, SamplingOptions

RECORDED = names("lilicorr")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def trace_of(name: str) -> Trace:
    return Trace(name)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_lattices_and_drafts(name: str) -> None:
    trace = trace_of(name)
    head = trace.model.head
    assert isinstance(head, LiliCorrHead)
    sampler = DraftSampler(DraftOptions(), SamplingOptions(temp=0))

    def look(recorded: Round, block: DraftBlock) -> None:
        assert block.anchor is not None
        close(block.anchor, recorded.tensor("anchor_state"))
        assert block.hidden.shape[0] == trace.model.config.block_size
        expected = recorded.tensor("draft_logits")
        logits = trace.model.vocabulary.logits(block.hidden)
        close(trace.scattered(logits, expected.shape[1]), expected)
        rows, scores = head.lattice(block.hidden[1:], block.anchor)
        ids = head.vocabulary.to_target(rows)
        unary = torch.stack([row[at] for row, at in zip(logits[1:], ids, strict=True)])
        assert torch.equal(unary, unary.sort(descending=True).values)
        wanted = recorded.tensor("lattice_ids")[1:], recorded.tensor("lattice_scores")[1:]
        for found, recorded_part in zip(by_id(ids, scores), by_id(*wanted), strict=True):
            close(found, recorded_part)
        probabilities = torch.tensor([pick.confidence for pick in walk(ids, scores, sampler)])
        recorded_probabilities = recorded.tensor("lattice_prob")
        close(probabilities[: len(recorded_probabilities)], recorded_probabilities)

    drafts = list(trace.replay(trace.drafter(), look))
    assert len(drafts) == 7
    for recorded, tokens in drafts:
        assert tokens == recorded.draft


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("piece", [512, 7, 1])
def test_the_anchor_is_the_newest_observed_feature(name: str, piece: int) -> None:
    trace = trace_of(name)
    drafter = trace.drafter()
    features = trace.tensor("prefill_features")
    trace.observe(drafter, features, piece)
    first = trace.rounds[0]
    anchor = drafter.run(first.last_token, 1).anchor
    assert anchor is not None
    close(anchor, first.tensor("anchor_state"))
    for kept in (features.shape[0] - 1, 5, 1):
        assert drafter.begin(SamplingOptions(temp=0), kept) == kept
        shortened = drafter.run(first.last_token, 1).anchor
        taps = features[:kept].view(kept, len(drafter.taps), -1)
        assert shortened is not None
        close(shortened, trace.model.trunk.fuse(taps)[-1])


@pytest.mark.parametrize("name", RECORDED)
def test_a_short_draft_is_the_beginning_of_a_long_one(name: str) -> None:
    """The block always has all its slots, whatever the room."""
    trace = trace_of(name)
    drafter = trace.drafter()
    trace.observe(drafter, trace.tensor("prefill_features"))
    last_token = trace.rounds[0].last_token
    whole = drafter.draft(last_token, 50).tokens
    assert len(whole) == trace.model.config.block_size - 1
    for room in range(1, len(whole)):
        assert drafter.draft(last_token, room).tokens == whole[:room]

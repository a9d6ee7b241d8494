"""draft-simple where its vocabulary or its context is not the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from specdec.drafters.draft_model import DraftModel
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.options import DraftOptions, SamplingOptions


@pytest.fixture
def drafter(tmp_path: Path) -> DraftModel:
    with GGUFFile.open(tiny.write_target(tmp_path / "draft.gguf", n_ctx=16)) as file:
        model = load_target(file)
    return DraftModel(model, DraftOptions(n_max=4), 64, tiny.N_VOCAB)


@torch.inference_mode()
def test_it_stops_where_its_training_context_ends(
    drafter: DraftModel, caplog: pytest.LogCaptureFixture
) -> None:
    drafter.begin(SamplingOptions(temp=0))
    drafter.observe(torch.arange(70, 80), None)
    assert len(drafter.draft(80, 40).tokens) == 4
    assert not caplog.records
    drafter.accept(4)
    drafter.observe(torch.arange(80, 85), None)
    assert len(drafter.draft(85, 40).tokens) == 1
    drafter.accept(1)
    drafter.observe(torch.arange(85, 87), None)
    assert drafter.draft(87, 40).tokens == []
    assert len(caplog.records) == 1
    assert "trained for a context of 16" in caplog.text


@torch.inference_mode()
def test_tokens_that_only_the_target_knows(drafter: DraftModel) -> None:
    drafter.begin(SamplingOptions(temp=0))
    drafter.observe(torch.tensor([5, tiny.N_VOCAB + 3, 6]), None)
    assert drafter.draft(tiny.N_VOCAB, 4).tokens == []
    assert len(drafter.draft(7, 4).tokens) == 4


@torch.inference_mode()
def test_tokens_that_only_the_draft_knows_are_never_drafted(tmp_path: Path) -> None:
    with GGUFFile.open(tiny.write_target(tmp_path / "draft.gguf")) as file:
        model = load_target(file)
    drafter = DraftModel(model, DraftOptions(n_max=40), 64, 60)
    drafter.begin(SamplingOptions(temp=0))
    drafter.observe(torch.arange(10, 20), None)
    assert max(drafter.draft(20, 40).tokens) < 60


@torch.inference_mode()
def test_only_greedy_drafts_are_dropped_for_being_short(tmp_path: Path) -> None:
    with GGUFFile.open(tiny.write_target(tmp_path / "draft.gguf")) as file:
        model = load_target(file)
    for sampling, is_dropped in (("greedy", True), ("probabilistic", False)):
        options = DraftOptions(n_max=8, n_min=8, p_min=0.6, sampling=sampling)  # type: ignore[arg-type]
        drafter = DraftModel(model, options, 512, tiny.N_VOCAB)
        drafter.begin(SamplingOptions(temp=0.8, seed=1))
        lengths = set()
        for token in range(20, 60):
            draft = drafter.draft(token, 8)
            lengths.add(len(draft.tokens))
            if draft.tokens:
                drafter.accept(0)
            drafter.observe(torch.tensor([token]), None)
        assert lengths <= {0, 8} if is_dropped else lengths & set(range(1, 8))

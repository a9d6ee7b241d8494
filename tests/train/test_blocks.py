"""Many blocks at once are what the drafter does block by block."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny
import torch
from tiny_training import read, student_of
from torch import Tensor

from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.head import DraftBlock
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions
from specdec.train.alignment import accepted_at_run_time
from specdec.train.blocks import (
    ROUND_UP,
    Student,
    acceptance_rates,
    eligible_anchors,
    make_labels,
)
from specdec.train.dataset import Conversation
from specdec.train.losses import LOSSES

ANCHORS = torch.tensor([3, 4, 5, 17, 30, 38])
"""Neighbours, far ones and the last that has a label, in any order of context lengths."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("blocks") / "t.gguf"))


@pytest.fixture(scope="module")
def target(file: GGUFFile) -> Target:
    return load_target(file, kernels="torch")


@pytest.fixture(scope="module")
def text(target: Target) -> Conversation:
    return read(target, 40)


def stirred(student: Student) -> Student:
    """The student with weights of a size that lets every slot and every key matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return student


def block_by_block(student: Student, text: Conversation, anchor: int, n: int) -> DraftBlock:
    """What the run-time drafter makes of the text before ``anchor``."""
    drafter = DFlashDrafter(student.model, DraftOptions(p_min=0.0), len(text.tokens) + 1)
    drafter.begin(SamplingOptions(temp=0.0))
    drafter.observe(text.tokens[:anchor], text.taps[:anchor])
    return drafter.run(int(text.tokens[anchor]), n)


@torch.no_grad()
@pytest.mark.parametrize("head", list(LOSSES))
@pytest.mark.parametrize("n_drafts", [1, 2, 3])
def test_blocks_together_are_blocks_alone(
    tmp_path: Path, file: GGUFFile, target: Target, text: Conversation, head: str, n_drafts: int
) -> None:
    student = stirred(student_of(tmp_path, file, target, head))
    hidden, state, fused = student.run_trunk(text, ANCHORS, n_drafts)
    assert fused.shape[0] % ROUND_UP == 0
    for index, anchor in enumerate(ANCHORS.tolist()):
        alone = block_by_block(student, text, anchor, n_drafts)
        assert hidden[index].shape == alone.hidden.shape
        torch.testing.assert_close(hidden[index], alone.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state[index], alone.state, rtol=1e-4, atol=1e-4)
        if alone.anchor is not None:
            torch.testing.assert_close(fused[anchor - 1], alone.anchor)
    blocks = student.run(text, make_labels(text, ANCHORS, n_drafts))
    slots = slice(student.first_slot, student.first_slot + n_drafts)
    torch.testing.assert_close(blocks.hidden, hidden[:, slots])
    torch.testing.assert_close(blocks.anchor, fused[ANCHORS - 1])


@torch.no_grad()
def test_a_block_knows_nothing_of_what_follows(
    tmp_path: Path, file: GGUFFile, target: Target, text: Conversation
) -> None:
    """Neither the state at its own anchor nor tokens, though other blocks of the pass see them."""
    student = stirred(student_of(tmp_path, file, target, "draft-dflash"))
    before, _, _ = student.run_trunk(text, ANCHORS, 3)
    taps, tokens = text.taps.clone(), text.tokens.clone()
    taps[17:], tokens[18:] = 9.0, 200
    changed = dataclasses.replace(text, taps=taps, tokens=tokens)
    after, _, _ = student.run_trunk(changed, ANCHORS, 3)
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(before, after, strict=True)]
    assert same == [True, True, True, True, False, False]
    taps[16] = 9.0
    after, _, _ = student.run_trunk(changed, ANCHORS, 3)
    assert not torch.allclose(before[3], after[3], atol=1e-3)


@torch.no_grad()
def test_the_teacher_is_the_targets_distribution_after_each_token(
    tmp_path: Path, file: GGUFFile, target: Target, text: Conversation
) -> None:
    student = student_of(tmp_path, file, target, "draft-dspark")
    logits = target.forward(text.tokens, target.new_cache(64)).logits
    wanted: Tensor = logits.log_softmax(-1)[:, 30:62]
    torch.testing.assert_close(student.teacher(text), wanted, rtol=1e-4, atol=1e-4)
    labels = make_labels(text, ANCHORS, 3)
    blocks = student.run(text, labels)
    for index, anchor in enumerate(ANCHORS.tolist()):
        for k in range(3):
            if labels.valid[index, k]:
                torch.testing.assert_close(
                    blocks.teacher[index, k], wanted[anchor + k], rtol=1e-4, atol=1e-4
                )
                label = int(text.tokens[anchor + k + 1])
                row = label - 30 if 30 <= label < 62 else -1
                assert blocks.rows[index, k] == row


@pytest.mark.parametrize("head", list(LOSSES))
def test_accepted_lengths_are_those_of_the_drafter(
    tmp_path: Path, file: GGUFFile, target: Target, text: Conversation, head: str
) -> None:
    student = student_of(tmp_path, file, target, head)
    anchors = eligible_anchors(text.supervised)
    assert student.accepted(text, anchors) == accepted_at_run_time(student, text, anchors)


def test_rates_of_acceptance() -> None:
    assert acceptance_rates([0, 2, 1, 3], 3) == [0.75, 0.5, 0.25]
    assert acceptance_rates([], 2) == [0.0, 0.0]

"""Each head's loss on a toy language whose right continuation is known, and the terms by hand.

The toy language is that of `tiny_training.py`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny
import torch
from tiny_training import say, student_of
from torch import Tensor

from specdec.drafters.dflash.dflash2 import DFlash2Head
from specdec.drafters.dflash.dspark import DSparkHead
from specdec.drafters.dflash.lilicorr import LiliCorrHead
from specdec.errors import UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.train.blocks import eligible_anchors, make_labels
from specdec.train.dataset import Conversation
from specdec.train.losses import LOSSES, distil, loss_of, slot_weights
from specdec.train.optimise import Schedule, Trainer

N_STEPS = 120


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("target") / "t.gguf"))


@pytest.fixture(scope="module")
def target(target_file: GGUFFile) -> Target:
    return load_target(target_file, kernels="torch")


@pytest.mark.parametrize("head", list(LOSSES))
def test_a_head_learns_the_toy_language(
    tmp_path: Path, target_file: GGUFFile, target: Target, head: str
) -> None:
    torch.manual_seed(0)
    student = student_of(tmp_path, target_file, target, head)
    texts = [say(target, first, 24) for first in range(12)]
    schedule = Schedule(
        minutes=0, blocks=N_STEPS * 21, learning_rate=1e-2, n_conversations=1, n_anchors=21
    )
    trainer = Trainer(student, texts, [], schedule)
    for _, batch in zip(range(N_STEPS), trainer._batches(), strict=False):
        trainer.step(batch)
    heard = say(target, 4, 15)
    anchors = eligible_anchors(heard.supervised)[:-4]
    lengths = student.accepted(heard, anchors)
    assert sum(lengths) / len(lengths) > 0.8 * student.n_drafts


def test_the_base_loss_is_least_where_draft_and_target_agree() -> None:
    teacher = torch.tensor([[0.7, 0.2, 0.1]]).log()
    rows = torch.tensor([0])
    for progress in (0.0, 0.9):
        best, overlap, _ = distil(teacher, teacher, torch.tensor([-1]), progress)
        assert overlap.item() == pytest.approx(1.0)
        for change in ([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]):
            other, _, _ = distil(teacher + torch.tensor(change), teacher, rows * 0 - 1, progress)
            assert other.item() > best.item()


def test_what_a_reduced_vocabulary_leaves_out_lowers_the_overlap() -> None:
    teacher = torch.tensor([[0.5, 0.3]]).log()  # 0.2 of the target's mass is elsewhere
    _, overlap, _ = distil(torch.tensor([[0.5, 0.3]]).log(), teacher, torch.tensor([0]), 0.0)
    assert overlap.item() == pytest.approx(0.8)


def test_later_slots_weigh_less_and_stop_at_the_first_invalid_one() -> None:
    valid = torch.tensor([[True, True, False]])
    assert slot_weights(valid, 4.0).tolist()[0] == pytest.approx([1.0, math.exp(-0.25), 0.0])


def test_labels_follow_their_anchor(target: Target) -> None:
    """Drafted token k of a block at a is the token at a + 1 + k, after the one at a + k."""
    text = say(target, 0, 8)
    labels = make_labels(text, torch.tensor([3, 5]), 3)
    assert torch.equal(labels.tokens[0], text.tokens[4:7])
    assert torch.equal(labels.before[0], text.tokens[3:6])
    assert labels.valid.tolist() == [[True] * 3, [True, True, False]]
    padded = make_labels(text, torch.tensor([3, 5]), 3, n_blocks=4)
    assert padded.anchors.tolist() == [3, 5, 3, 3]
    assert not padded.valid[2:].any()


def test_an_unsupervised_token_ends_a_block(target: Target) -> None:
    text = say(target, 0, 8)
    supervised: Tensor = text.supervised.clone()
    supervised[5] = False
    labels = make_labels(
        Conversation(text.tokens, supervised, text.taps, text.final, text.log_z),
        torch.tensor([3]),
        3,
    )
    assert labels.valid.tolist() == [[True, False, False]]


def test_dspark_starts_as_its_trunk_and_follows_as_it_drafts(
    tmp_path: Path, target_file: GGUFFile, target: Target
) -> None:
    student = student_of(tmp_path, target_file, target, "draft-dspark")
    text, head = say(target, 0, 12), student.model.head
    assert isinstance(head, DSparkHead)
    blocks = student.run(text, make_labels(text, torch.tensor([3, 6]), 3))
    logits, confidence = head.follow(blocks.hidden, blocks.state, blocks.labels.before)
    torch.testing.assert_close(logits, student.model.vocabulary.logits(blocks.hidden))
    assert torch.equal(confidence, torch.zeros_like(confidence))
    losses = loss_of("draft-dspark")(student, blocks, 0.0)
    assert losses.head.flatten().tolist() == pytest.approx([math.log(2)] * 6)


def test_a_label_that_is_no_candidate_takes_the_last_place(
    tmp_path: Path, target_file: GGUFFile, target: Target
) -> None:
    student = student_of(tmp_path, target_file, target, "draft-dflash2")
    text, head = say(target, 0, 12), student.model.head
    assert isinstance(head, DFlash2Head)
    blocks = student.run(text, make_labels(text, torch.tensor([3]), 3))
    losses = loss_of("draft-dflash2")(student, blocks, 1.0)
    for slot, row in enumerate(blocks.rows[0].tolist()):
        logits = head.logits(blocks.hidden)[0, slot]
        best = logits.topk(head.n_candidates).indices.tolist()
        rows = best if row in best else [*best[:-1], row]
        expected = -logits[rows].log_softmax(-1)[rows.index(row)]
        assert losses.head[0, slot].item() == pytest.approx(expected.item(), abs=1e-5)
    assert not loss_of("draft-dflash2")(student, blocks, 0.1).head.any()


def test_lilicorr_counts_slots_up_to_the_first_lost_label(
    tmp_path: Path, target_file: GGUFFile, target: Target
) -> None:
    student = student_of(tmp_path, target_file, target, "draft-lilicorr")
    text, head = say(target, 0, 16), student.model.head
    assert isinstance(head, LiliCorrHead)
    blocks = student.run(text, make_labels(text, torch.arange(3, 9), 3))
    losses = loss_of("draft-lilicorr")(student, blocks, 1.0)
    rows, _ = head.lattice(blocks.hidden, blocks.anchor)
    for block in range(6):
        alive = True
        for slot in range(3):
            alive = alive and bool((rows[block, slot] == blocks.rows[block, slot]).any())
            assert (losses.head[block, slot].item() > 0) == alive


def test_an_unknown_head_is_named() -> None:
    with pytest.raises(UnsupportedError, match="draft-dflash2"):
        loss_of("draft-eagle3")

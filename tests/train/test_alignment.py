"""The check before a training passes what is right and finds what is one off."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny
import torch
from tiny_training import read, student_of

from specdec.errors import SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.train import alignment, blocks
from specdec.train.alignment import require_alignment, shortened
from specdec.train.blocks import Labels, Student
from specdec.train.dataset import Conversation


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("alignment") / "t.gguf"))


@pytest.fixture(scope="module")
def target(file: GGUFFile) -> Target:
    return load_target(file, kernels="torch")


@pytest.fixture
def student(tmp_path: Path, file: GGUFFile, target: Target) -> Student:
    return student_of(tmp_path, file, target, "draft-dflash", n_rows=0)


@pytest.fixture(scope="module")
def reply(target: Target) -> Conversation:
    return read(target, 24)


def test_what_is_right_passes(student: Student, reply: Conversation) -> None:
    told: list[float] = []
    found = require_alignment(student, reply, 1e-2, told.append)
    assert found.in_training == pytest.approx(found.at_run_time)
    assert found.agreement == 1.0
    assert told[-1] == 1.0


def test_states_one_row_late_are_found(student: Student, reply: Conversation) -> None:
    late = dataclasses.replace(reply, taps=reply.taps.roll(1, dims=0))
    with pytest.raises(SpecdecError, match="training and run time disagree"):
        require_alignment(student, late, 1e-2)


def test_labels_one_off_are_found(
    student: Student, reply: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = blocks.make_labels

    def shifted(text: Conversation, anchors: torch.Tensor, *sizes: int) -> Labels:
        labels = make(text, anchors, *sizes)
        positions = labels.anchors[:, None] + torch.arange(labels.tokens.shape[1]) + 2
        tokens = text.tokens[positions.clamp(max=len(text.tokens) - 1)]
        return dataclasses.replace(labels, tokens=tokens)

    monkeypatch.setattr(blocks, "make_labels", shifted)
    monkeypatch.setattr("specdec.train.optimise.make_labels", shifted)
    with pytest.raises(SpecdecError, match="training and run time disagree"):
        require_alignment(student, reply, 1e-2)


def test_another_texts_distribution_is_found(student: Student, reply: Conversation) -> None:
    late = dataclasses.replace(reply, final=reply.final.roll(1, dims=0))
    with pytest.raises(SpecdecError, match="are the target's best"):
        require_alignment(student, late, 1e-2)


def test_a_short_piece_is_enough(reply: Conversation) -> None:
    short = shortened(reply, 5)
    assert short.supervised.sum() == 6
    assert len(short.tokens) == len(short.taps) == len(short.log_z) == 9
    assert alignment.shortened(reply, 99).tokens.equal(reply.tokens)

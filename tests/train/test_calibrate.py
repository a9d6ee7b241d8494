"""Confidences that mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from tiny_training import say, student_of

from specdec.drafters.dflash.dspark import DSparkHead
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.train.blocks import eligible_anchors
from specdec.train.calibrate import calibrate, calibration_error, fit_logistic


def test_scale_and_shift_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20000, generator=generator)
    outcomes = torch.bernoulli((0.5 * logits - 1).sigmoid(), generator=generator)
    scale, shift = fit_logistic(logits, outcomes)
    assert scale == pytest.approx(0.5, abs=0.03)
    assert shift == pytest.approx(-1, abs=0.06)
    assert calibration_error(logits.sigmoid(), outcomes) > 0.1
    assert calibration_error((scale * logits + shift).sigmoid(), outcomes) < 0.02


def test_the_error_is_the_gap_of_the_bins_by_their_size() -> None:
    probabilities = torch.tensor([0.05, 0.05, 0.95, 0.95])
    outcomes = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert calibration_error(probabilities, outcomes) == pytest.approx(0.5 * 0.45 + 0.5 * 0.05)


def test_a_head_is_rescaled_in_place_whatever_shares_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GGUFFile.open(tiny.write_target(tmp_path / "t.gguf"))
    target = load_target(file, kernels="torch")
    texts, found = [say(target, first, 20) for first in range(3)], []
    for n_blocks in (64, 5):
        monkeypatch.setattr("specdec.train.calibrate.N_BLOCKS", n_blocks)
        student = student_of(tmp_path, file, target, "draft-dspark")
        head, told = student.model.head, list[float]()
        assert isinstance(head, DSparkHead)
        with torch.no_grad():
            head.conf_proj.bias.fill_(2.0)
        result = calibrate(student, texts, told.append)
        assert result is not None
        assert result.after < result.before
        assert len(told) == 3
        found.append(float(head.conf_proj.bias.detach()))
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    # an untrained draft is right about once in a vocabulary, whatever it says
    right = sum(
        sum(length > 0 for length in student.accepted(text, eligible_anchors(text.supervised)))
        for text in texts
    )
    assert torch.tensor(found[1]).sigmoid() == pytest.approx(right / (3 * 17), abs=0.05)


def test_heads_without_a_confidence_are_left_alone(tmp_path: Path) -> None:
    file = GGUFFile.open(tiny.write_target(tmp_path / "t.gguf"))
    target = load_target(file, kernels="torch")
    student = student_of(tmp_path, file, target, "draft-dflash")
    assert calibrate(student, [say(target, 0, 20)]) is None

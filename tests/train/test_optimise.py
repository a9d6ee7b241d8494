"""The training loop: continued as if it had never been broken off, and safe from full disks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from tiny_training import say, student_of

from specdec.errors import ModelFileError, SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.train.optimise import Report, Schedule, State, Trainer, rate_factor, read_checkpoint

SCHEDULE = Schedule(minutes=0, blocks=180, learning_rate=1e-2, n_conversations=2, n_anchors=8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("optimise") / "t.gguf"))


@pytest.fixture(scope="module")
def target(file: GGUFFile) -> Target:
    return load_target(file, kernels="torch")


@pytest.fixture
def new_trainer(tmp_path: Path, file: GGUFFile, target: Target) -> Callable[[str], Trainer]:
    """Trainers of equal fresh students, each with a checkpoint of the name that is given."""
    texts = [say(target, first, 20) for first in range(5)]

    def make(name: str) -> Trainer:
        student = student_of(tmp_path, file, target, "draft-dspark")
        return Trainer(student, texts, [say(target, 7, 20)], SCHEDULE, tmp_path / name)

    return make


def ignore(*_: object) -> None:
    """Hears nothing."""


def stop_at(step: int) -> Callable[[State, float], None]:
    def tell(state: State, _: float) -> None:
        if state.step == step:
            raise KeyboardInterrupt

    return tell


def test_a_training_goes_on_as_if_it_had_not_stopped(
    new_trainer: Callable[[str], Trainer],
) -> None:
    whole, reports = new_trainer("whole.pt"), list[Report]()
    whole.run(ignore, reports.append)
    assert whole.progress == 1.0
    assert len(reports) == 1
    with pytest.raises(KeyboardInterrupt):
        new_trainer("parts.pt").run(stop_at(4), ignore)
    second = new_trainer("parts.pt")
    assert second.restore()
    assert second.state.step == 4
    second.run(ignore, ignore)
    assert second.state.step == whole.state.step
    assert second.state.loss == pytest.approx(whole.state.loss)
    for mine, other in zip(second.student.parameters(), whole.student.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_finished_training_makes_no_more_steps(new_trainer: Callable[[str], Trainer]) -> None:
    new_trainer("c.pt").run(ignore, ignore)
    again, reports = new_trainer("c.pt"), list[Report]()
    again.restore()
    step = again.state.step
    again.run(ignore, reports.append)
    assert again.state.step == step
    assert len(reports) == 1


def test_a_full_disk_keeps_the_checkpoint_before(
    new_trainer: Callable[[str], Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer("c.pt")
    trainer.save()
    before = (tmp_path / "c.pt").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SpecdecError, match=r"c\.pt: No space left on device; the checkpoint"):
        trainer.run(stop_at(2), ignore)
    assert (tmp_path / "c.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("content", [b"", b"nonsense" * 99, None])
def test_a_damaged_checkpoint_is_one_line(
    new_trainer: Callable[[str], Trainer], tmp_path: Path, content: bytes | None
) -> None:
    trainer, path = new_trainer("c.pt"), tmp_path / "c.pt"
    assert not trainer.restore()
    trainer.save()
    path.write_bytes(path.read_bytes()[:-5000] if content is None else content)
    with pytest.raises(ModelFileError, match=r"c\.pt: is damaged; remove it"):
        trainer.restore()
    torch.save([1, 2], path)
    with pytest.raises(ModelFileError, match="is damaged"):
        read_checkpoint(path)


def test_weights_of_other_sizes_are_refused(
    new_trainer: Callable[[str], Trainer], tmp_path: Path
) -> None:
    trainer, path = new_trainer("c.pt"), tmp_path / "c.pt"
    trainer.save()
    held = read_checkpoint(path)
    held["modules"][0].pop("fc.weight")
    torch.save(held, path)
    with pytest.raises(ModelFileError, match="does not fit this training"):
        trainer.restore()


def test_a_loss_that_is_no_number_ends_the_training(
    new_trainer: Callable[[str], Trainer],
) -> None:
    trainer = new_trainer("c.pt")
    with torch.no_grad():
        trainer.student.parameters()[0].fill_(torch.nan)
    with pytest.raises(SpecdecError, match="smaller --learning-rate"):
        trainer.run(ignore, ignore)


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [rate_factor(x) for x in (0.0, 0.02, 0.04, 0.5, 1.0)]
    assert factors == pytest.approx([0.025, 0.5, 1.0, 0.545, 0.05], abs=0.02)

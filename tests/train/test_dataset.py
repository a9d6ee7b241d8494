"""Features of conversations: right, complete, and continued after any break."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import specdec.train.dataset
from specdec.errors import SpecdecError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.train.conversations import FILE, Record, RecordFile
from specdec.train.dataset import Dataset, compute_features, is_held_out

TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tiny.write_target(tmp_path_factory.mktemp("dataset") / "target.gguf")
    with GGUFFile.open(path) as file:
        return load_target(file, kernels="torch")


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.train.dataset, "BATCH_ROWS", 1)


def write(folder: Path, first: int, last: int) -> None:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(first)
    with RecordFile(folder / FILE) as file:
        for serial in range(first, last):
            tokens = random.integers(3, 259, 20 + serial).tolist()
            spans = [[5, 12], [15, len(tokens)]] if serial % 2 else [[6, len(tokens)]]
            file.append(
                Record(serial, f"prompt {serial}", "user", "user", True, False, 0.0, tokens, spans)
            )


@torch.inference_mode()
def test_states_are_those_of_a_forward(target: Target, tmp_path: Path) -> None:
    write(tmp_path, 0, 5)
    compute_features(target, tmp_path, TAPS)
    dataset = Dataset.open(tmp_path)
    assert len(dataset) == 5
    assert dataset.taps == TAPS
    for index, record in enumerate(dataset.records()):
        found = dataset[index]
        tokens = torch.tensor(record.tokens)
        out = target.forward(tokens, target.new_cache(64), taps=(*TAPS, -1))
        assert out.hidden is not None
        assert found.tokens.tolist() == record.tokens
        torch.testing.assert_close(found.taps, out.hidden[:, :-1].bfloat16(), rtol=0.01, atol=0.01)
        torch.testing.assert_close(found.final, out.hidden[:, -1], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(found.log_z, out.logits.logsumexp(-1), rtol=1e-2, atol=1e-2)
        mine = target.softcap(target.lm_head(found.final)).logsumexp(-1)
        torch.testing.assert_close(found.log_z, mine, rtol=1e-5, atol=1e-5)
        written = [i for start, end in record.supervised for i in range(start, end)]
        assert found.supervised.nonzero().flatten().tolist() == written
    with pytest.raises(IndexError):
        dataset[5]


@torch.inference_mode()
def test_counts_and_mass_cover_the_training_part(target: Target, tmp_path: Path) -> None:
    write(tmp_path, 0, 60)
    compute_features(target, tmp_path, TAPS)
    dataset = Dataset.open(tmp_path)
    records = dataset.records()
    assert dataset.held_out == [i for i, r in enumerate(records) if is_held_out(r.prompt)]
    assert sorted(dataset.train + dataset.held_out) == list(range(60))
    assert 0 < len(dataset.held_out) < 12
    counts, mass = torch.zeros(259, dtype=torch.int64), torch.zeros(259, dtype=torch.float64)
    for i in dataset.train:
        found = dataset[i]
        counts += torch.bincount(found.tokens[found.supervised], minlength=259)
        p = target.softcap(target.lm_head(found.final)).softmax(-1).double()
        mass += p[:-1][found.supervised[1:]].sum(0)
    assert torch.equal(dataset.counts(), counts)
    torch.testing.assert_close(dataset.mass(), mass, rtol=1e-5, atol=1e-5)
    assert dataset.n_supervised(dataset.train) == counts.sum() == pytest.approx(mass.sum())


def content(folder: Path) -> list[bytes]:
    names = ("taps", "final", "log_z", "tokens", "supervised")
    return [(folder / "features" / f"{name}.bin").read_bytes() for name in names]


@pytest.mark.usefixtures("one_by_one")
def test_a_broken_pass_goes_on(target: Target, tmp_path: Path) -> None:
    write(tmp_path / "whole", 0, 6)
    compute_features(target, tmp_path / "whole", TAPS)
    work = tmp_path / "broken"
    work.mkdir()
    shutil.copy(tmp_path / "whole" / FILE, work / FILE)
    asked = iter([False, False, True])
    compute_features(target, work, TAPS, should_stop=lambda: next(asked))
    assert len(Dataset.open(work)) == 2
    with (work / "features" / "taps.bin").open("ab") as file:
        file.write(b"not committed")
    done: list[int] = []
    compute_features(target, work, TAPS, progress=lambda p: done.append(p.n_done))
    assert done == [3, 4, 5, 6]
    assert content(work) == content(tmp_path / "whole")
    torch.testing.assert_close(Dataset.open(work).mass(), Dataset.open(tmp_path / "whole").mass())


@pytest.mark.usefixtures("one_by_one")
def test_new_conversations_are_added(target: Target, tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    compute_features(target, tmp_path, TAPS)
    write(tmp_path, 3, 5)
    done: list[int] = []
    compute_features(target, tmp_path, TAPS, progress=lambda p: done.append(p.n_done))
    assert done == [4, 5]
    assert len(Dataset.open(tmp_path)) == 5


def test_other_taps_or_conversations_start_anew(target: Target, tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    compute_features(target, tmp_path, TAPS)
    compute_features(target, tmp_path, (1,))
    assert Dataset.open(tmp_path)[0].taps.shape[1] == 1
    (tmp_path / FILE).unlink()
    write(tmp_path, 7, 9)
    compute_features(target, tmp_path, (1,))
    dataset = Dataset.open(tmp_path)
    assert [dataset[i].tokens.tolist() for i in range(2)] == [r.tokens for r in dataset.records()]


def test_clear_errors(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecdecError, match="generate some first"):
        compute_features(target, tmp_path, TAPS)
    with pytest.raises(UsageError, match="holds no features"):
        Dataset.open(tmp_path)
    write(tmp_path, 0, 3)
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SpecdecError, match="features of 63 tokens need"):
        compute_features(target, tmp_path, TAPS)
    (tmp_path / "target.json").write_text(json.dumps({"fingerprint": "x"}))
    with pytest.raises(UsageError, match="another target"):
        compute_features(target, tmp_path, TAPS)


@pytest.mark.parametrize("name", ["progress.npz", "meta.json", "tokens.bin"])
def test_damaged_features_are_computed_again(target: Target, tmp_path: Path, name: str) -> None:
    write(tmp_path, 0, 3)
    compute_features(target, tmp_path, TAPS)
    before = content(tmp_path)
    path = tmp_path / "features" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    compute_features(target, tmp_path, TAPS)
    assert content(tmp_path) == before


def test_states_that_are_cut_short_are_said(target: Target, tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    compute_features(target, tmp_path, TAPS)
    path = tmp_path / "features" / "taps.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SpecdecError, match="is cut short; remove"):
        compute_features(target, tmp_path, TAPS)
    with pytest.raises(UsageError, match="holds no features"):
        Dataset.open(tmp_path)


@pytest.mark.usefixtures("one_by_one")
def test_a_full_disk_keeps_what_was_committed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, 4)
    asked = iter([False, False, True])
    compute_features(target, tmp_path, TAPS, should_stop=lambda: next(asked))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(specdec.train.dataset._Store, "_write", lambda self, _: self.commit())
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(SpecdecError, match="features: No space left on device"):
        compute_features(target, tmp_path, TAPS)
    monkeypatch.undo()
    assert len(Dataset.open(tmp_path)) == 2
    monkeypatch.setattr(specdec.train.dataset, "BATCH_ROWS", 1)
    done: list[int] = []
    compute_features(target, tmp_path, TAPS, progress=lambda p: done.append(p.n_done))
    assert done == [3, 4]

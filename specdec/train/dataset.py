"""What a draft learns from, computed once: the target's states at every token of the data.

A teacher-forced pass in float32 stores, memory-mapped in ``WORK/features/``, the tapped layers, the
normed final state that the output matrix reads, and the logarithm of the softmax's denominator over
the whole vocabulary. ``progress.npz`` says how much of the files counts; it is replaced in one
step, so that a pass broken off anywhere continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.errors import SpecdecError, UsageError
from specdec.folders import write_whole
from specdec.models.base import Target
from specdec.train.conversations import FILE, Record, check_folder, fingerprint, read_records
from specdec.train.packed import check_target, read_texts

log = logging.getLogger(__name__)

FOLDER, PROGRESS = "features", "progress.npz"
HELD_OUT = 0.05
"""Share of the prompts that are kept from training."""
COMMIT_SECONDS = 20.0
BATCH_ROWS = 512
"""Rows that are read together, unless one conversation has more."""
HEAD_ROWS = 128
"""Rows whose logits over the whole vocabulary are held at once."""
RESERVE = 2**28
"""Bytes of the disk that are left free."""

DAMAGES = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
"""What reading a damaged file may raise."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of S tokens with the target's states."""

    tokens: Tensor
    """[S] int64."""
    supervised: Tensor
    """[S] bool: tokens that the target wrote."""
    taps: Tensor
    """[S, n_taps, D] bfloat16."""
    final: Tensor
    """[S, D] float32, behind the output norm: what the output matrix reads."""
    log_z: Tensor
    """[S] float32: log of the sum of exp(logits) over the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class FeatureProgress:
    """How far a feature pass is."""

    n_done: int
    n_conversations: int
    n_tokens: int
    """Tokens read in this run."""
    tokens_per_second: float
    seconds_left: float


@dataclass(frozen=True, slots=True)
class _Column:
    """One file of the store: a row for every token."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def _columns(n_taps: int, width: int) -> tuple[_Column, ...]:
    return (
        _Column("taps", "uint16", (n_taps, width)),  # bfloat16, which numpy does not have
        _Column("final", "float16", (width,)),
        _Column("log_z", "float32", ()),
        _Column("tokens", "int32", ()),
        _Column("supervised", "bool", ()),
    )


def compute_features(
    target: Target,
    folder: Path,
    taps: Sequence[int],
    *,
    progress: Callable[[FeatureProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> None:
    """Reads the conversations in ``folder`` that have no features yet.

    ``taps``: layers whose inputs are stored, 0 to n_layer - 1, as for `Target.forward`. Features of
    other taps, of another target or of conversations that have changed are thrown away.
    ``progress`` and ``should_stop`` are called every few conversations; what is done stays,
    whatever ends the call. Raises `UsageError` for a folder of another target, `SpecdecError`
    without conversations or without space for their features.
    """
    check_target(target)
    check_folder(target, folder)
    path = folder / FILE
    records = list(read_records(path)) if path.exists() else []
    if not records:
        raise SpecdecError(f"{path}: holds no conversations; generate some first")
    store = _Store.open(folder / FOLDER, target, taps, records)
    todo = records[store.n_conversations :]
    try:
        store.check_space(sum(len(record.tokens) for record in todo))
        _read_all(target, taps, todo, store, progress, should_stop)
        store.commit()
    except SpecdecError:
        raise  # there is no room, or nothing that counts
    except BaseException:
        store.commit()
        raise
    finally:
        store.close()


def _read_all(
    target: Target,
    taps: Sequence[int],
    todo: Sequence[Record],
    store: _Store,
    progress: Callable[[FeatureProgress], None] | None,
    should_stop: Callable[[], bool] | None,
) -> None:
    n_left, n_done = sum(len(record.tokens) for record in todo), 0
    n_all, started = store.n_conversations + len(todo), time.perf_counter()
    for batch in _batches(todo):
        if should_stop is not None and should_stop():
            return
        for record, states in zip(batch, read_conversations(target, batch, taps), strict=True):
            store.append(record, states)
            n_done += len(record.tokens)
        rate = n_done / (time.perf_counter() - started)
        if progress is not None:
            seconds_left = (n_left - n_done) / rate
            progress(FeatureProgress(store.n_conversations, n_all, n_done, rate, seconds_left))


def _batches(records: Sequence[Record]) -> Iterator[list[Record]]:
    """The records in order, some `BATCH_ROWS` tokens at a time."""
    batch: list[Record] = []
    for record in records:
        if batch and sum(len(r.tokens) for r in (*batch, record)) > BATCH_ROWS:
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class States:
    """What one pass finds out about a conversation of S tokens."""

    taps: Tensor
    """[S, n_taps, D]."""
    final: Tensor
    """[S, D] float16."""
    log_z: Tensor
    """[S]."""
    mass: Tensor
    """[V] float64: the target's probability of every token, summed over where it wrote."""


@torch.inference_mode()
def read_conversations(
    target: Target, records: Sequence[Record], taps: Sequence[int]
) -> list[States]:
    """The target's states, computed together. log Z is that of ``final`` as it is stored."""
    counts = [len(record.tokens) for record in records]
    hidden, tapped = read_texts(target, [record.tokens for record in records], taps)
    final = target.output_norm(hidden).half()
    parts = zip(records, torch.split(tapped, counts), torch.split(final, counts), strict=True)
    return [States(t, f, *_read_head(target, record, f)) for record, t, f in parts]


def _read_head(target: Target, record: Record, final: Tensor) -> tuple[Tensor, Tensor]:
    """log Z [S] and mass [V] of final states [S, D]."""
    before = torch.zeros(final.shape[0], dtype=torch.bool, device=final.device)
    for start, end in record.supervised:
        before[start - 1 : end - 1] = True
    log_z = torch.empty(final.shape[0], device=final.device)
    mass = torch.zeros(target.config.n_vocab, dtype=torch.float64, device=final.device)
    for first in range(0, final.shape[0], HEAD_ROWS):
        rows = slice(first, first + HEAD_ROWS)
        logits = target.softcap(target.lm_head(final[rows].float()))
        log_z[rows] = logits.logsumexp(dim=-1)
        p = logits.sub_(log_z[rows, None]).exp_()
        mass += (before[rows].float() @ p).double()
    return log_z, mass


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept from training; depends on its text alone."""
    digest = hashlib.sha256(prompt.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


class _Store:
    """The files of one feature folder, open for appending."""

    def __init__(self, folder: Path, columns: Sequence[_Column], n_vocab: int) -> None:
        self.folder, self._columns = folder, columns
        self._offsets, self._held_out = [0], list[bool]()
        self._mass = np.zeros(n_vocab)
        if (folder / PROGRESS).exists():
            saved = _read_progress(folder)
            self._offsets = saved["offsets"].tolist()
            self._held_out = saved["held_out"].tolist()
            self._mass = saved["mass"]
        for column in columns:
            self._check_size(column)
        self._files = {column.name: self._open(column) for column in columns}
        self._committed = time.perf_counter()

    @classmethod
    def open(
        cls, folder: Path, target: Target, taps: Sequence[int], records: Sequence[Record]
    ) -> _Store:
        """The store in ``folder``, emptied first if it is not the beginning of what is wanted."""
        meta = {
            "taps": list(taps),
            "width": target.config.n_embd,
            "n_vocab": target.config.n_vocab,
            "target": fingerprint(target),
        }
        columns = _columns(len(taps), target.config.n_embd)
        try:
            if folder.exists() and not _is_same(folder, meta, records):
                if (folder / PROGRESS).exists():
                    log.warning("%s: not of these conversations and layers; made again", folder)
                shutil.rmtree(folder)
            if not folder.exists():
                folder.mkdir(parents=True)
                write_whole(folder / "meta.json", json.dumps(meta))
            return cls(folder, columns, target.config.n_vocab)
        except OSError as error:
            raise SpecdecError(f"{folder}: {error.strerror}") from None

    def _check_size(self, column: _Column) -> None:
        path = self.folder / f"{column.name}.bin"
        size = path.stat().st_size if path.exists() else 0
        if size < self._offsets[-1] * column.row_bytes:
            raise SpecdecError(f"{path}: is cut short; remove {self.folder}")

    def _open(self, column: _Column) -> Any:
        """The file, without rows that were not committed."""
        file = (self.folder / f"{column.name}.bin").open("ab")
        file.truncate(self._offsets[-1] * column.row_bytes)
        return file

    @property
    def n_conversations(self) -> int:
        """How many are stored."""
        return len(self._offsets) - 1

    def check_space(self, n_tokens: int) -> None:
        """Raises `SpecdecError` unless there is room on the disk for so many tokens more."""
        needed = n_tokens * sum(column.row_bytes for column in self._columns)
        free = shutil.disk_usage(self.folder).free - RESERVE
        if needed > free:
            raise SpecdecError(
                f"{self.folder}: the features of {n_tokens} tokens need {needed / 2**20:.0f} MiB, "
                f"{max(free, 0) / 2**20:.0f} MiB are free beside {RESERVE >> 20} for the training; "
                "make room, or move the folder and continue there"
            )

    def append(self, record: Record, states: States) -> None:
        """Adds a conversation."""
        supervised = np.zeros(len(record.tokens), dtype=bool)
        for start, end in record.supervised:
            supervised[start:end] = True
        values: dict[str, Array] = {
            "taps": states.taps.bfloat16().view(torch.int16).cpu().numpy(),
            "final": states.final.cpu().numpy(),
            "log_z": states.log_z.cpu().numpy(),
            "tokens": np.array(record.tokens, dtype=np.int32),
            "supervised": supervised,
        }
        if not np.isfinite(values["final"]).all() or not np.isfinite(values["log_z"]).all():
            raise SpecdecError("training: the target's final states do not fit float16")
        self._write(values)
        self._offsets.append(self._offsets[-1] + len(record.tokens))
        self._held_out.append(is_held_out(record.prompt))
        if not self._held_out[-1]:
            self._mass += states.mass.cpu().numpy()
        if time.perf_counter() - self._committed > COMMIT_SECONDS:
            self.commit()

    def _write(self, values: dict[str, Array]) -> None:
        try:
            for name, rows in values.items():
                self._files[name].write(rows.tobytes())
        except OSError as error:
            raise SpecdecError(f"{self.folder}: {error.strerror}") from None

    def commit(self) -> None:
        """Makes what was appended count."""
        part = self.folder / "progress.part.npz"
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            np.savez(
                part,
                offsets=np.array(self._offsets, dtype=np.int64),
                held_out=np.array(self._held_out, dtype=bool),
                mass=self._mass,
            )
            part.replace(self.folder / PROGRESS)
        except OSError as error:
            raise SpecdecError(f"{self.folder}: {error.strerror}") from None
        self._committed = time.perf_counter()

    def close(self) -> None:
        """Closes the files; rows that were not committed do not count."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def _is_same(folder: Path, meta: dict[str, Any], records: Sequence[Record]) -> bool:
    """Whether a store was made with this target and taps, of the first of these conversations."""
    try:
        if json.loads((folder / "meta.json").read_text(encoding="utf-8")) != meta:
            return False
        offsets = _read_progress(folder)["offsets"]
        tokens = np.fromfile(folder / "tokens.bin", dtype=np.int32)[: offsets[-1]]
    except DAMAGES:
        return False
    n = len(offsets) - 1
    mine = [token for record in records[:n] for token in record.tokens]
    return n <= len(records) and np.array_equal(tokens, np.array(mine, dtype=np.int32))


def _read_progress(folder: Path) -> dict[str, Array]:
    """What counts in a feature folder. Raises one of `DAMAGES`."""
    with (folder / PROGRESS).open("rb") as file, np.load(file) as saved:
        return {name: saved[name] for name in ("offsets", "held_out", "mass")}


class Dataset:
    """The conversations of a feature folder, in the order of the file."""

    def __init__(self, folder: Path, columns: dict[str, Array], saved: dict[str, Array]) -> None:
        self.folder = folder
        self._columns = columns
        self._offsets = saved["offsets"]
        self._mass = saved["mass"]
        held_out: list[bool] = saved["held_out"].tolist()
        self.train = [i for i, held in enumerate(held_out) if not held]
        """Indices to train on."""
        self.held_out = [i for i, held in enumerate(held_out) if held]
        """Indices to measure with."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.taps: tuple[int, ...] = tuple(meta["taps"])
        self.n_vocab: int = meta["n_vocab"]

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """The features in ``folder``, a work folder. Raises `UsageError` if it has none."""
        features = folder / FOLDER
        try:
            meta = json.loads((features / "meta.json").read_text(encoding="utf-8"))
            saved = _read_progress(features)
            n_tokens = int(saved["offsets"][-1])
            columns: dict[str, Array] = {
                column.name: np.memmap(
                    features / f"{column.name}.bin",
                    dtype=column.dtype,
                    mode="r",
                    shape=(n_tokens, *column.shape),
                )
                for column in _columns(len(meta["taps"]), meta["width"])
            }
        except DAMAGES as error:
            raise UsageError(f"{features}: holds no features: {error}") from None
        return cls(features, columns, saved)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Conversation:
        rows = self._rows(index)
        column = {name: np.array(values[rows]) for name, values in self._columns.items()}
        return Conversation(
            tokens=torch.from_numpy(column["tokens"]).long(),
            supervised=torch.from_numpy(column["supervised"]),
            taps=torch.from_numpy(column["taps"].view(np.int16)).view(torch.bfloat16),
            final=torch.from_numpy(column["final"]).float(),
            log_z=torch.from_numpy(column["log_z"]),
        )

    def _rows(self, index: int) -> slice:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return slice(int(self._offsets[index]), int(self._offsets[index + 1]))

    @property
    def n_tokens(self) -> int:
        """All tokens."""
        return int(self._offsets[-1])

    def length(self, index: int) -> int:
        """Tokens of one conversation."""
        return int(self._offsets[index + 1] - self._offsets[index])

    def supervised(self, index: int) -> Tensor:
        """Which tokens of one conversation the target wrote, [S] bool."""
        return torch.from_numpy(np.array(self._columns["supervised"][self._rows(index)]))

    def n_supervised(self, indices: Sequence[int]) -> int:
        """Supervised tokens of some conversations."""
        supervised = self._columns["supervised"]
        return sum(int(supervised[self._rows(i)].sum()) for i in indices)

    def counts(self, indices: Sequence[int] | None = None) -> Tensor:
        """How often each token was written, [V] int64; in the training part unless told."""
        counts = np.zeros(self.n_vocab, dtype=np.int64)
        for index in self.train if indices is None else indices:
            rows = self._rows(index)
            tokens = self._columns["tokens"][rows][self._columns["supervised"][rows]]
            counts += np.bincount(tokens, minlength=self.n_vocab)
        return torch.from_numpy(counts)

    def mass(self) -> Tensor:
        """The target's probability of each token, summed over the training part, [V] float64."""
        return torch.from_numpy(self._mass.copy())

    def records(self) -> list[Record]:
        """The conversations with their prompts and kinds, as many as there are features."""
        return list(read_records(self.folder.parent / FILE))[: len(self)]

"""`specdec train` from end to end: data, features, draft, check, training, measuring, file.

Everything lives in a work folder: conversations and features serve every head, each head has a
folder of its own with the file it began from and a checkpoint. Whatever is there is continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from specdec.bench import load_prompts
from specdec.drafters.dflash.model import load
from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.folders import write_whole
from specdec.gguf_file import GGUFFile
from specdec.models import check_architecture
from specdec.options import Options, SpecOptions
from specdec.resources import open_target
from specdec.train.alignment import require_alignment
from specdec.train.blocks import Student, eligible_anchors
from specdec.train.calibrate import calibrate
from specdec.train.conversations import DataOptions, DataProgress, generate_data
from specdec.train.dataset import Conversation, Dataset, FeatureProgress, compute_features
from specdec.train.draft_file import draft_metadata, pick_outtype, write_draft, write_fresh_draft
from specdec.train.folder import work_folder
from specdec.train.optimise import Report, Schedule, State, Trainer, read_checkpoint
from specdec.train.precision import fast_memory
from specdec.train.shape import DraftShape, default_shape
from specdec.train.vocabulary import coverage, pick_vocabulary, required_tokens
from specdec.train.warm_start import start_from_target, start_from_trunk

DATA_SHARE, TRAINING_SHARE = 0.3, 0.55
"""Of the minutes; features, checks and measuring take the rest."""
BLOCKS_PER_TOKEN = 2.5
"""Length of a training whose data is given in tokens."""
LONG_TRAINING, SHORT_BLOCK, LONG_BLOCK = 120.0, 5, 8
"""Minutes from which on a block has more slots; before, tokens past the fourth are never right."""
N_MEASURED = 16
"""Held-out conversations that are measured every minute."""
START, CHECKPOINT, RESULT = "start.gguf", "checkpoint.pt", "result.json"


class Listener(Protocol):
    """Whoever watches a training."""

    def progress(self, stage: str, fraction: float, text: str) -> None:
        """A stage is so far (0 to 1); may raise to end the run between two steps."""

    def say(self, text: str) -> None:
        """A line for the log."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training made."""

    path: Path
    n_bytes: int
    acceptance_length: float
    """Teacher-forced: blocks at all positions of held-out replies, with the written weights."""


def run_training(options: Options, listener: Listener) -> Trained:
    """Trains what `TrainOptions` ask for and writes the file.

    Raises `UsageError`, `UnsupportedError` and their kin; an interrupted run is continued by the
    same call with ``resume``.
    """
    folder = work_folder(options)
    prompts = _read_prompts(options.train.prompts, "--prompts")
    excluded = _read_prompts(options.train.excluded, "--exclude")
    with open_target(options) as file:
        check_architecture(file)
        draft_shape(options, file)  # what cannot be trained is said before anything is loaded
    plain = {"model.kernels": "torch", "model.warmup": False}
    options = options.merge(plain, {"spec": SpecOptions()})

    def read(done: int, total: int) -> None:
        listener.progress("loading", done / total, "")

    with fast_memory(), Engine.load(options, read) as engine, open_target(options) as file:
        return _Run(options, engine, file, folder, listener).run(prompts, excluded)


def _read_prompts(path: Path | None, flag: str) -> tuple[str, ...]:
    return tuple(load_prompts(path, flag)) if path is not None else ()


def draft_shape(options: Options, file: GGUFFile, d2t: tuple[int, ...] = ()) -> DraftShape:
    """The draft that the options ask for, with the map ``d2t``."""
    train = options.train
    return default_shape(
        file,
        f"draft-{train.head}",
        n_layer=train.n_layer,
        block_size=train.block_size or pick_block_size(train.minutes),
        mask_token=train.mask_token,
        target_layers=train.taps,
        d2t=d2t,
    )


def pick_block_size(minutes: float) -> int:
    """Slots of a block that a training of so many minutes can fill."""
    return LONG_BLOCK if minutes >= LONG_TRAINING else SHORT_BLOCK


class _Run:
    """One training."""

    def __init__(
        self, options: Options, engine: Engine, file: GGUFFile, folder: Path, listener: Listener
    ) -> None:
        self.options, self.train = options, options.train
        self.engine, self.target, self.file = engine, engine.target, file
        self.folder, self.listener = folder, listener
        self.head_folder = folder / f"draft-{self.train.head}"

    def run(self, prompts: tuple[str, ...], excluded: tuple[str, ...]) -> Trained:
        """All stages in order."""
        shape, start = draft_shape(self.options, self.file), self.head_folder / START
        if start.exists():  # other sizes must not throw away features
            check_start(start, shape)
        self._make_data(shape, prompts, excluded)
        dataset = Dataset.open(self.folder)
        shape = self._choose_vocabulary(dataset, start)
        held_out = _Part(dataset, dataset.held_out)
        conversations = _Part(dataset, dataset.train)
        if not len(conversations) or not len(held_out):
            raise SpecdecError(
                f"{self.folder}: {len(conversations)} conversations to train on and "
                f"{len(held_out)} to measure with, expected some of both; give more "
                f"{'--tokens' if self.train.n_tokens else '--minutes'}"
            )
        if not start.exists():
            self.head_folder.mkdir(exist_ok=True)
            write_fresh_draft(start, self.file, shape, self.train.seed)
        self._check_alignment(start, dataset)
        student = self._student(start)
        trainer = self._trainer(student, conversations, held_out)
        trainer.run(self._tell, self._report)
        self._calibrate(student, held_out)
        return self._write(shape, student, trainer, held_out)

    def _telling(self, stage: str) -> Callable[[float], None]:
        """Tells the listener how far ``stage`` is, which also lets Ctrl-C in."""
        return lambda fraction: self.listener.progress(stage, fraction, "")

    # Data

    def _make_data(
        self, shape: DraftShape, prompts: tuple[str, ...], excluded: tuple[str, ...]
    ) -> None:
        train = self.train
        data = DataOptions(
            prompts=prompts,
            excluded=excluded,
            unwanted=frozenset({shape.mask_token}),
            minutes=None if train.n_tokens else DATA_SHARE * train.minutes,
            n_tokens=train.n_tokens or None,
            seed=train.seed,
        )

        def heard(done: DataProgress) -> None:
            self.listener.progress(
                "data",
                done.fraction,
                f"{done.n_tokens} tokens, {done.tokens_per_second:.0f} tokens/s",
            )

        done = generate_data(self.engine, self.folder, data, progress=heard)
        self.listener.say(
            f"data: {done.n_conversations} conversations, {done.n_tokens} tokens by the target, "
            f"{done.seconds / 60:.1f} minutes"
        )

        def read(done: FeatureProgress) -> None:
            self.listener.progress(
                "features",
                done.n_done / done.n_conversations,
                f"{done.tokens_per_second:.0f} tokens/s",
            )

        compute_features(self.target, self.folder, shape.target_layers, progress=read)

    def _choose_vocabulary(self, dataset: Dataset, start: Path) -> DraftShape:
        """The shape with the vocabulary that the data suggest, or that of ``start`` if it is there.

        Data may have grown since ``start`` was written, so the two can differ in their tokens.
        """
        required = required_tokens(self.engine.tokenizer)
        counts = dataset.counts()
        d2t = pick_vocabulary(counts, dataset.mass(), self.train.n_rows, required)
        if start.exists():
            d2t = read_start_vocabulary(start, len(d2t))
        covered = coverage(dataset.counts(dataset.held_out), d2t)
        self.listener.say(
            f"vocabulary: {len(d2t) or len(counts)} tokens, {100 * covered:.1f} % of held-out text"
        )
        return draft_shape(self.options, self.file, d2t)

    # The draft

    def _student(self, start: Path, *, warm: bool = True) -> Student:
        with GGUFFile.open(start) as file:
            model = load(file, self.target, trainable=True)
        start_from_target(model, self.target)
        trunk = self._trained_trunk()
        if warm and trunk:
            start_from_trunk(model, trunk)
            self.listener.say("start: the trunk of the plain DFlash draft in the work folder")
        return Student(model, self.target)

    def _trained_trunk(self) -> dict[str, Tensor]:
        """The trunk of a plain draft that was trained in this folder; empty if there is none."""
        path = self.folder / "draft-dflash" / CHECKPOINT
        finished = self.folder / "draft-dflash" / RESULT
        if self.train.head == "dflash" or not finished.exists() or not path.exists():
            return {}
        trunk: dict[str, Tensor] = read_checkpoint(path)["modules"][0]
        return trunk

    def _check_alignment(self, start: Path, dataset: Dataset) -> None:
        records = dataset.records()
        greedy = [i for i, record in enumerate(records) if record.greedy] or [*range(len(records))]
        conversation = max((dataset[i] for i in greedy[:8]), key=lambda one: one.supervised.sum())
        student = self._student(start, warm=False)
        rate, tell = self.train.learning_rate, self._telling("check")
        found = require_alignment(student, conversation, rate, tell)
        self.listener.say(
            f"check: a reply learned by heart is drafted alike in training and at run time "
            f"({found.at_run_time:.2f} tokens a draft)"
        )

    def _trainer(self, student: Student, conversations: _Part, held_out: _Part) -> Trainer:
        train = self.train
        n_tokens = sum(conversations.n_supervised)
        schedule = Schedule(
            minutes=TRAINING_SHARE * train.minutes,
            blocks=round(BLOCKS_PER_TOKEN * n_tokens) if train.n_tokens else 0,
            learning_rate=train.learning_rate,
            seed=train.seed,
        )
        measured = [held_out[i] for i in range(min(N_MEASURED, len(held_out)))]
        checkpoint = self.head_folder / CHECKPOINT
        trainer = Trainer(student, conversations, measured, schedule, checkpoint)
        if trainer.restore():
            self.listener.say(f"resumed: step {trainer.state.step} of {checkpoint}")
        return trainer

    def _tell(self, state: State, progress: float) -> None:
        rate = state.blocks / max(state.seconds, 1e-9)
        self.listener.progress(
            "training", progress, f"step {state.step}, {rate:.0f} blocks/s, loss {state.loss:.3f}"
        )

    def _report(self, found: Report) -> None:
        state = found.state
        self.listener.say(
            f"training: {100 * found.progress:.0f} %, step {state.step}, {state.blocks} blocks, "
            f"loss {state.loss:.3f}, held-out acceptance {found.acceptance_length:.3f} "
            f"({', '.join(f'{rate:.2f}' for rate in found.rates)})"
        )

    def _calibrate(self, student: Student, held_out: _Part) -> None:
        found = calibrate(student, held_out, self._telling("confidence"))
        if found is not None:
            self.listener.say(
                f"confidence: calibration error {found.before:.3f}, {found.after:.3f} after"
            )

    # The file

    def _write(
        self, shape: DraftShape, student: Student, trainer: Trainer, held_out: _Part
    ) -> Trained:
        path, model = self.train.output, student.model
        assert path is not None
        weights: dict[str, Tensor] = {}
        for module in (student.trunk, model.vocabulary, model.head):
            weights |= module.state_dict()
        outtype = pick_outtype(self.train.outtype, weights, self.file)
        write_draft(path, self.file, shape, weights, ggml_type=outtype)
        with GGUFFile.open(path) as file:
            written = load(file, self.target)
        trainer.student = Student(written, self.target)
        trainer.held_out = [held_out[i] for i in range(len(held_out))]
        found = trainer.measure(tell=self._telling("measuring"))
        result = Trained(path, path.stat().st_size, found.acceptance_length)
        self.listener.say(
            f"{path}: {result.n_bytes / 1e6:.1f} MB, matrices {outtype}, held-out acceptance "
            f"{found.acceptance_length:.3f} with these weights "
            f"({', '.join(f'{rate:.2f}' for rate in found.rates)})"
        )
        summary = {
            "head": self.train.head,
            "steps": found.state.step,
            "blocks": found.state.blocks,
            "minutes": found.state.seconds / 60,
            "acceptance_length": found.acceptance_length,
            "rates": found.rates,
        }
        write_whole(self.head_folder / RESULT, json.dumps(summary, indent=2))
        return result


class _Part(Sequence[Conversation]):
    """Some conversations of a data set, those that have blocks, read when they are needed."""

    def __init__(self, dataset: Dataset, indices: Sequence[int]) -> None:
        self._dataset = dataset
        self._indices = [i for i in indices if len(eligible_anchors(dataset.supervised(i)))]
        self.n_supervised = [dataset.n_supervised([index]) for index in self._indices]
        """Supervised tokens of each."""

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Conversation:  # type: ignore[override]
        return self._dataset[self._indices[index]]


def check_start(path: Path, wanted: DraftShape) -> None:
    """Raises `UsageError` if the file that a training began from has other sizes than ``wanted``.

    The vocabulary is left to `read_start_vocabulary`.
    """
    with GGUFFile.open(path) as file:
        for key, value in draft_metadata(wanted).items():
            found = np.array(file.metadata.get(key))
            is_same = (
                np.allclose(found, value) if isinstance(value, float) else found.tolist() == value
            )
            if not is_same:
                raise _differs(path, key, found, value)


def read_start_vocabulary(path: Path, n_rows: int) -> tuple[int, ...]:
    """The map in the file that a training began from, () = none.

    Raises `UsageError` if it has other than ``n_rows`` rows.
    """
    with GGUFFile.open(path) as file:
        d2t = tuple(file.load("d2t").tolist()) if "d2t" in file.tensors else ()
    if len(d2t) != n_rows:
        raise _differs(path, "--draft-vocab", len(d2t), n_rows)
    return d2t


def _differs(path: Path, name: str, found: object, wanted: object) -> UsageError:
    return UsageError(
        f"{path}: the training in this folder has {name} = {found}, asked for is {wanted}; use "
        "the same flags, or another folder"
    )

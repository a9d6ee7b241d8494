"""The training loop: steps, schedule, checkpoints and what is said about them.

Learning rate and losses follow the progress of the budget, so that a slow machine anneals as well
as a fast one.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.drafters.dflash.lilicorr import LiliCorrHead
from specdec.errors import ModelFileError, SpecdecError
from specdec.train.blocks import Labels, Student, acceptance_rates, eligible_anchors, make_labels
from specdec.train.dataset import Conversation
from specdec.train.losses import loss_of, slot_weights
from specdec.train.precision import fastest_dtype

WARM_UP, FINAL_RATE = 0.04, 0.05
"""Share of a training in which the learning rate rises, and what is left of it at the end."""
SHORT_BLOCKS = 0.3
"""Share of the conversations whose blocks lack their last slots, as short drafts do."""
CHECKPOINT_SECONDS, REPORT_SECONDS = 300.0, 60.0
BETAS, CLIP = (0.9, 0.95), 1.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes of a step and the budget: minutes, or blocks if they are not 0."""

    minutes: float
    blocks: int = 0
    learning_rate: float = 1.5e-3
    n_conversations: int = 6
    """Conversations of a step."""
    n_anchors: int = 40
    """Blocks of a conversation in one step, at most."""
    seed: int = 0


@dataclass(slots=True)
class State:
    """How far a training is."""

    step: int = 0
    blocks: int = 0
    seconds: float = 0.0
    """Time spent, earlier runs included."""
    loss: float = 0.0
    """Mean over recent steps."""
    overlap: float = 0.0
    """Mean rate at which first tokens would be accepted when sampled, over recent steps."""


@dataclass(frozen=True, slots=True)
class Report:
    """What is said once a minute."""

    state: State
    progress: float
    acceptance_length: float
    """1 + accepted tokens of blocks at every position of held-out replies."""
    rates: tuple[float, ...]
    """Share of these blocks in which at least 1, 2, ... tokens were right."""


class Trainer:
    """Trains ``student`` on ``conversations`` and measures it on ``held_out`` ones."""

    def __init__(
        self,
        student: Student,
        conversations: Sequence[Conversation],
        held_out: Sequence[Conversation],
        schedule: Schedule,
        checkpoint: Path | None = None,
    ) -> None:
        head = student.model.head
        self.student, self.schedule, self.checkpoint = student, schedule, checkpoint
        self.conversations, self.held_out = conversations, held_out
        self.state = State()
        self._loss = loss_of(head.name)
        self._parameters = student.parameters()
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=0.0, betas=BETAS, weight_decay=0.0, fused=True
        )
        self._dtype = fastest_dtype(student.model.device)
        self._gamma = max(1.0, student.model.config.block_size / 2)
        self._always_full = isinstance(head, LiliCorrHead)

    @property
    def progress(self) -> float:
        """How much of the budget is used, 0 to 1."""
        if self.schedule.blocks:
            return min(1.0, self.state.blocks / self.schedule.blocks)
        return min(1.0, self.state.seconds / (60 * self.schedule.minutes))

    def run(self, tell: Callable[[State, float], None], report: Callable[[Report], None]) -> None:
        """Trains until the budget is used; ``tell`` hears of every step, ``report`` of minutes.

        Ctrl-C saves a checkpoint and goes on its way. Raises `SpecdecError` if a checkpoint cannot
        be written, or if the loss is no number any more.
        """
        if self.progress >= 1.0:  # all that was left was the file
            report(self.measure())
            return
        started = time.monotonic() - self.state.seconds
        saved = reported = self.state.seconds
        try:
            for batch in self._batches():
                self.step(batch)
                self.state.seconds = time.monotonic() - started
                tell(self.state, self.progress)
                if self.state.seconds - reported >= REPORT_SECONDS:
                    reported = self.state.seconds
                    report(self.measure())
                if self.state.seconds - saved >= CHECKPOINT_SECONDS:
                    saved = self.state.seconds
                    self.save()
                if self.progress >= 1.0:
                    break
        finally:
            self.save()
        report(self.measure())

    def step(self, batch: Sequence[Conversation]) -> None:
        """One update from some blocks of each conversation."""
        random = np.random.default_rng((self.schedule.seed, 1, self.state.step))
        chosen = [(c, self._pick_labels(c, random)) for c in batch]
        total = sum(float(slot_weights(labels.valid, self._gamma).sum()) for _, labels in chosen)
        loss, overlap, count = 0.0, 0.0, 0
        for conversation, labels in chosen:
            with _products_in(self._dtype, self.student.model.device):
                blocks = self.student.run(conversation, labels)
                slots = self._loss(self.student, blocks, self.progress)
            weights = slot_weights(labels.valid, self._gamma)
            mean = ((slots.base + slots.head) * weights).sum() / total
            mean.backward()  # type: ignore[no-untyped-call]
            loss += float(mean.detach())
            if not math.isfinite(loss):
                raise SpecdecError(
                    f"training: the loss at step {self.state.step} is {loss}; continue with a "
                    "smaller --learning-rate"
                )
            overlap += float((slots.overlap * labels.valid)[:, 0].sum())
            count += int(labels.valid[:, 0].sum())
        self._update()
        self._remember(loss, overlap / max(1, count), count)

    def _pick_labels(self, conversation: Conversation, random: np.random.Generator) -> Labels:
        """Random anchors of a conversation, with the labels of full or of shortened blocks."""
        eligible = eligible_anchors(conversation.supervised)
        count = min(self.schedule.n_anchors, len(eligible))
        chosen = np.sort(random.choice(len(eligible), count, replace=False))
        n_drafts = self.student.n_drafts
        if not self._always_full and n_drafts > 1 and random.random() < SHORT_BLOCKS:
            n_drafts = int(random.integers(1, n_drafts))
        anchors = eligible[torch.from_numpy(chosen)]
        return make_labels(conversation, anchors, n_drafts, -(-count // 8) * 8)

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * rate_factor(self.progress)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _remember(self, loss: float, overlap: float, n_blocks: int) -> None:
        state = self.state
        keep = min(0.98, state.step / (state.step + 1))
        state.loss = keep * state.loss + (1 - keep) * loss
        state.overlap = keep * state.overlap + (1 - keep) * overlap
        state.step += 1
        state.blocks += n_blocks

    def _batches(self) -> Iterator[list[Conversation]]:
        """Conversations in a new random order for each pass over them, without end."""
        size, position = self.schedule.n_conversations, self.state.step
        per_epoch = max(1, len(self.conversations) // size)
        while True:
            epoch = position // per_epoch
            order = np.random.default_rng((self.schedule.seed, 0, epoch)).permutation(
                len(self.conversations)
            )
            for index in range(position % per_epoch, per_epoch):
                yield [self.conversations[i] for i in order[index * size : (index + 1) * size]]
                position += 1

    def measure(self, n_anchors: int = 32, tell: Callable[[float], None] | None = None) -> Report:
        """Acceptance on the held-out conversations, blocks at evenly spread positions.

        ``tell`` hears which share of them is done.
        """
        lengths: list[int] = []
        for index, conversation in enumerate(self.held_out):
            if tell is not None:
                tell(index / len(self.held_out))
            eligible = eligible_anchors(conversation.supervised)
            spread = eligible[:: max(1, len(eligible) // n_anchors)]
            lengths += self.student.accepted(conversation, spread)
        rates = acceptance_rates(lengths, self.student.n_drafts)
        return Report(
            state=replace(self.state),
            progress=self.progress,
            acceptance_length=1 + sum(rates),
            rates=tuple(rates),
        )

    def save(self) -> None:
        """Writes a checkpoint that `restore` continues from; the old one stays until it is done.

        Raises `SpecdecError` if it cannot be written.
        """
        if self.checkpoint is None:
            return
        unfinished = self.checkpoint.with_suffix(".new")
        modules = self.student.trunk, self.student.model.head
        held = {
            "state": asdict(self.state),
            "modules": [module.state_dict() for module in modules],
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            with unfinished.open("wb") as file:
                torch.save(held, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.checkpoint)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else "it could not be written"
            raise SpecdecError(
                f"{self.checkpoint}: {reason}; the checkpoint before it is kept, continue with "
                "--resume"
            ) from None

    def restore(self) -> bool:
        """Continues from the checkpoint; False if there is none. Raises `ModelFileError`."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return False
        held = read_checkpoint(self.checkpoint)
        try:
            for module, weights in zip(
                (self.student.trunk, self.student.model.head), held["modules"], strict=True
            ):
                module.load_state_dict(weights)
            self._optimizer.load_state_dict(held["optimizer"])
            self.state = State(**held["state"])
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            raise ModelFileError(
                f"{self.checkpoint}: does not fit this training ({type(error).__name__}); "
                "remove it to start again"
            ) from None
        return True


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `Trainer.save` wrote. Raises `ModelFileError` for a file that is none or is damaged."""
    try:
        held = torch.load(path, weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        held = error
    if not isinstance(held, dict) or not {"state", "modules", "optimizer"} <= held.keys():
        raise ModelFileError(f"{path}: is damaged; remove it to start this training again")
    return held


@contextlib.contextmanager
def _products_in(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Runs matrix products in ``dtype``."""
    with warnings.catch_warnings(), torch.autocast(device.type, dtype, dtype != torch.float32):
        # Norms have float32 weights whatever they are given; torch merely has no fused kernel.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def rate_factor(progress: float) -> float:
    """The learning rate's factor: up, then down along a cosine to `FINAL_RATE`."""
    if progress < WARM_UP:
        return max(progress, 0.001) / WARM_UP
    down = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return FINAL_RATE + (1 - FINAL_RATE) * down

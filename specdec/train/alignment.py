"""The check before every training: does a draft that knows a text by heart draft it at run time?

Labels one step off, features one row late or a forgotten mask all look fine in a training's loss.
They cannot hide here: a copy of the draft learns one reply, then the run-time drafter, fed by a
fresh pass of the target, must draft as much of it as training thinks it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.errors import SpecdecError
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions
from specdec.train.blocks import Student, eligible_anchors
from specdec.train.dataset import Conversation
from specdec.train.optimise import Schedule, Trainer

N_STEPS, N_ANCHORS, N_TOKENS = 100, 24, 64
MAX_ROUNDS = 4
"""How often so many steps are made at most; small drafts learn slowly."""
TOLERANCE = 0.02
AGREEMENT = 0.8
"""Share of a greedy reply's tokens that must be the teacher's best; a few are ties."""
ENOUGH = 1.0
"""Accepted tokens a draft that the copy must reach; untrained drafts have about 0."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Mean accepted tokens a draft on the learned reply."""

    in_training: float
    at_run_time: float
    agreement: float
    """Share of the reply's tokens, as far as the draft knows them, that are the teacher's best."""

    @property
    def agrees(self) -> bool:
        """Whether training, run time and teacher say the same."""
        return abs(self.in_training - self.at_run_time) <= TOLERANCE and self.agreement >= AGREEMENT


def require_alignment(
    student: Student,
    conversation: Conversation,
    learning_rate: float,
    tell: Callable[[float], None] | None = None,
) -> Alignment:
    """Teaches ``student`` a short greedy reply, which spoils it, and compares.

    ``tell`` hears which share of the steps is done. Raises `SpecdecError` if they disagree.
    """
    found = measure_alignment(student, conversation, learning_rate, tell)
    if not found.agrees:
        raise SpecdecError(
            f"training and run time disagree: of a reply learned by heart a draft has "
            f"{found.in_training:.2f} tokens right in training and {found.at_run_time:.2f} at run "
            f"time, expected a difference of at most {TOLERANCE:g}; of its tokens "
            f"{found.agreement:.0%} are the target's best, expected {AGREEMENT:.0%}; training "
            "would be in vain, please report this target"
        )
    if found.in_training < ENOUGH:
        raise SpecdecError(
            f"the draft could not learn one reply by heart: {found.in_training:.2f} tokens of a "
            f"draft are right, expected at least {ENOUGH:g}; training would be in vain, try "
            "another --learning-rate or more --layers"
        )
    return found


def measure_alignment(
    student: Student,
    conversation: Conversation,
    learning_rate: float,
    tell: Callable[[float], None] | None = None,
) -> Alignment:
    """See `require_alignment`."""
    short = shortened(conversation, N_TOKENS)
    anchors = eligible_anchors(short.supervised)
    schedule = Schedule(
        minutes=0,
        blocks=N_STEPS * min(N_ANCHORS, len(anchors)),
        learning_rate=learning_rate,
        n_conversations=1,
        n_anchors=N_ANCHORS,
    )
    student.by_heart = True
    trained: list[int] = []
    for _ in range(MAX_ROUNDS):
        _learn(Trainer(student, [short], [], schedule), short, tell)
        trained = student.accepted(short, anchors)
        if sum(trained) >= ENOUGH * len(trained):
            break
    run = accepted_at_run_time(student, short, anchors)
    known = student.row_of[short.tokens[anchors + 1]]
    best = student.teacher(short)[anchors].argmax(dim=-1)
    agreement = (best == known)[known >= 0].float().mean()
    return Alignment(sum(trained) / len(trained), sum(run) / len(run), float(agreement))


def _learn(
    trainer: Trainer, conversation: Conversation, tell: Callable[[float], None] | None
) -> None:
    for step in range(N_STEPS):
        trainer.step([conversation])
        if tell is not None:
            tell((step + 1) / N_STEPS)


def shortened(conversation: Conversation, n_tokens: int) -> Conversation:
    """The conversation up to the ``n_tokens``-th supervised token."""
    supervised = conversation.supervised.nonzero().flatten()
    end = int(supervised[: n_tokens + 1][-1]) + 1
    return Conversation(
        tokens=conversation.tokens[:end],
        supervised=conversation.supervised[:end],
        taps=conversation.taps[:end],
        final=conversation.final[:end],
        log_z=conversation.log_z[:end],
    )


@torch.no_grad()
def accepted_at_run_time(
    student: Student, conversation: Conversation, anchors: Tensor
) -> list[int]:
    """How many tokens of the drafts of a `DFlashDrafter` at each anchor are the conversation's."""
    model, tokens = student.model, conversation.tokens
    options = DraftOptions(n_max=student.n_drafts, p_min=0.0)
    drafter = DFlashDrafter(model, options, len(tokens) + 1)
    taps = _target_taps(student.target, tokens, model.config.target_layers)
    drafter.begin(SamplingOptions(temp=0.0))
    observed, lengths = 0, []
    for anchor in anchors.tolist():
        drafter.observe(tokens[observed:anchor], taps[observed:anchor])
        observed = anchor
        room = min(student.n_drafts, len(tokens) - anchor - 1)
        draft = torch.tensor(drafter.draft(int(tokens[anchor]), room).tokens)
        wanted = tokens[anchor + 1 : anchor + 1 + len(draft)]
        right = (draft == wanted) & conversation.supervised[anchor + 1 : anchor + 1 + len(draft)]
        lengths.append(int(right.cumprod(0).sum()))
    return lengths


def _target_taps(target: Target, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
    tokens, cache = tokens.to(target.device), target.new_cache(len(tokens))
    output = target.forward(tokens, cache, taps=taps, logit_rows=0)
    assert output.hidden is not None
    return output.hidden

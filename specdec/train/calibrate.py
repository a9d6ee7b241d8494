"""After the training: a confidence that means what it says.

A confidence head learns the rate at which sampled drafts are accepted; with greedy drafts it is
compared with `p_min`, so its logits are scaled and shifted until they predict whether the drafted
token is the target's. Both numbers fold into the head's weights, as llama.cpp knows no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.dflash.dspark import DSparkHead
from specdec.train.blocks import Student, eligible_anchors, make_labels
from specdec.train.dataset import Conversation

N_BINS = 10
N_BLOCKS = 64
"""Blocks whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Expected calibration error of the confidences, before and after."""

    before: float
    after: float


@torch.no_grad()
def calibrate(
    student: Student,
    held_out: Sequence[Conversation],
    tell: Callable[[float], None] | None = None,
) -> Calibration | None:
    """Rescales the confidence head on held-out replies; None for heads without one.

    ``tell`` hears which share of the replies is done.
    """
    head = student.model.head
    if not isinstance(head, DSparkHead) or not head.has_confidence or not held_out:
        return None
    logits, outcomes = _collect(student, head, held_out, tell)
    if not len(logits):
        return None
    scale, shift = fit_logistic(logits, outcomes)
    head.conf_proj.weight.mul_(scale)
    head.conf_proj.bias.mul_(scale).add_(shift)
    return Calibration(
        calibration_error(logits.sigmoid(), outcomes),
        calibration_error((scale * logits + shift).sigmoid(), outcomes),
    )


def _collect(
    student: Student,
    head: DSparkHead,
    held_out: Sequence[Conversation],
    tell: Callable[[float], None] | None,
) -> tuple[Tensor, Tensor]:
    """Confidence logits [N], and whether the drafted token was right, for drafts still alive."""
    found: list[Tensor] = []
    right: list[Tensor] = []
    for index, conversation in enumerate(held_out):
        if tell is not None:
            tell(index / len(held_out))
        for anchors in torch.split(eligible_anchors(conversation.supervised), N_BLOCKS):
            if not len(anchors):
                continue
            blocks = student.run(conversation, make_labels(conversation, anchors, student.n_drafts))
            logits, confidence = head.follow(blocks.hidden, blocks.state, blocks.labels.before)
            is_right = (logits.argmax(-1) == blocks.rows) & blocks.labels.valid
            # Beyond the first wrong token the true predecessors are not what a draft would have.
            alive = F.pad(is_right.cumprod(-1)[:, :-1].bool(), (1, 0), value=True)
            alive &= blocks.labels.valid
            found.append(confidence[alive])
            right.append(is_right[alive])
    return torch.cat(found), torch.cat(right).float()


def fit_logistic(logits: Tensor, outcomes: Tensor) -> tuple[float, float]:
    """Scale and shift of logits [N] that predict outcomes [N] of 0 and 1 best (Platt)."""
    with torch.enable_grad():
        parameters = torch.tensor([1.0, 0.0], requires_grad=True)
        optimizer = torch.optim.LBFGS([parameters], max_iter=50, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            scaled = parameters[0] * logits + parameters[1]
            value = F.binary_cross_entropy_with_logits(scaled, outcomes)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
    scale, shift = parameters.detach().tolist()
    return max(scale, 0.01), shift


def calibration_error(probabilities: Tensor, outcomes: Tensor) -> float:
    """Mean distance of predicted and found rates over `N_BINS` bins, weighted by their sizes."""
    bins = (probabilities * N_BINS).long().clamp(0, N_BINS - 1)
    error = 0.0
    for index in range(N_BINS):
        inside = bins == index
        if inside.any():
            gap = probabilities[inside].mean() - outcomes[inside].mean()
            error += float(gap.abs()) * float(inside.float().mean())
    return error

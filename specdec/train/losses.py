"""What each head minimises.

Common to all: with p the target's and q the draft's distribution of a slot, label y,

    base = 0.9 * divergence + 0.1 * -log q(y)

where the divergence is the cross-entropy of p and q for the first part of a training and twice
their total variation after that, as 1 - total variation is the rate at which a sampled draft is
accepted. The k-th drafted token of a block (k = 0, 1, ...) weighs exp(-k / gamma), since it counts
only if those before it are right. References: the training note, sections 2.3, 3, 4.2 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.dflash.dflash2 import DFlash2Head
from specdec.drafters.dflash.dspark import DSparkHead
from specdec.drafters.dflash.lilicorr import LiliCorrHead
from specdec.errors import UnsupportedError
from specdec.train.blocks import Blocks, Student

SWITCH = 0.6
"""Share of a training after which the divergence is the total variation."""
LATTICE_START = 0.3
"""Share of a training before which candidates are too poor to learn paths through them."""
LABEL_WEIGHT = 0.1
LILICORR_WEIGHTS = (0.25, 0.25)
"""Of cross-entropy and penalty."""


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """The loss of every drafted token, [A, K], to be weighted and added up."""

    base: Tensor
    head: Tensor
    """What the head adds, already weighted against the base; zeros for plain DFlash."""
    overlap: Tensor
    """sum of min(p, q): how likely a sampled draft would be accepted, given those before."""


Loss = Callable[[Student, Blocks, float], SlotLosses]


def loss_of(head: str) -> Loss:
    """The loss of a head by its spec type. Raises `UnsupportedError`."""
    if head not in LOSSES:
        raise UnsupportedError(f"no training for {head}; known: {', '.join(LOSSES)}")
    return LOSSES[head]


def slot_weights(valid: Tensor, gamma: float) -> Tensor:
    """Weights [A, K] of drafted tokens: exp(-k / gamma), 0 where they are not valid."""
    decay = torch.exp(-torch.arange(valid.shape[1]) / gamma)
    return valid * decay


def distil(
    logits: Tensor, teacher: Tensor, rows: Tensor, progress: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(base loss [...], overlap [...], log q [..., VD]) of logits [..., VD].

    ``teacher`` [..., VD] are log-probabilities; ``rows`` [...] the labels' rows, -1 without one,
    which leaves out the label's own term.
    """
    log_q = logits.float().log_softmax(dim=-1)
    p = teacher.exp()
    overlap = torch.minimum(log_q.exp(), p).sum(dim=-1)
    if progress < SWITCH:
        divergence = -(p * log_q).sum(dim=-1)
    else:
        divergence = 2 * (1 - overlap)
    label = -log_q.gather(-1, rows.clamp(min=0)[..., None])[..., 0] * (rows >= 0)
    return (1 - LABEL_WEIGHT) * divergence + LABEL_WEIGHT * label, overlap.detach(), log_q


def plain_loss(student: Student, blocks: Blocks, progress: float) -> SlotLosses:
    """DFlash: the base loss of the output matrix's logits."""
    logits = student.model.vocabulary.logits(blocks.hidden)
    base, overlap, _ = distil(logits, blocks.teacher, blocks.rows, progress)
    return SlotLosses(base, torch.zeros_like(base), overlap)


def dspark_loss(student: Student, blocks: Blocks, progress: float) -> SlotLosses:
    """DSpark: the base loss of the chain along the true tokens, and of the confidence.

    The confidence learns the overlap by binary cross-entropy; its gradient reaches the trunk, too.
    """
    head = student.model.head
    assert isinstance(head, DSparkHead)
    logits, confidence = head.follow(blocks.hidden, blocks.state, blocks.labels.before)
    base, overlap, _ = distil(logits, blocks.teacher, blocks.rows, progress)
    if not head.has_confidence:
        return SlotLosses(base, torch.zeros_like(base), overlap)
    wanted = overlap.clamp(0, 1)
    sure = F.binary_cross_entropy_with_logits(confidence.float(), wanted, reduction="none")
    return SlotLosses(base, sure, overlap)


def dflash2_loss(student: Student, blocks: Blocks, progress: float) -> SlotLosses:
    """DFlash2: the base loss, and cross-entropy among the candidates after the true token.

    A label that is no candidate takes the last one's place, so that hard slots teach something.
    """
    head = student.model.head
    assert isinstance(head, DFlash2Head)
    logits = head.logits(blocks.hidden)
    base, overlap, _ = distil(logits, blocks.teacher, blocks.rows, progress)
    if progress < LATTICE_START:
        return SlotLosses(base, torch.zeros_like(base), overlap)
    candidates = logits.detach().topk(head.n_candidates).indices  # [A, K, C]
    gold = blocks.rows.clamp(min=0)[..., None]
    is_missing = (candidates != gold).all(dim=-1, keepdim=True)
    candidates = torch.where(is_missing & _is_last(candidates), gold, candidates)
    pairs = head.pairs(
        blocks.labels.before[..., None],
        blocks.hidden,
        student.model.vocabulary.to_target(candidates),
    )
    scores = logits.gather(-1, candidates).float() + pairs[..., 0, :].float()
    chosen = (candidates == gold).int().argmax(dim=-1)
    selector = F.cross_entropy(scores.flatten(0, 1), chosen.flatten(), reduction="none")
    return SlotLosses(base, selector.view_as(base) * (blocks.rows >= 0), overlap)


def lilicorr_loss(student: Student, blocks: Blocks, progress: float) -> SlotLosses:
    """LiliCorr: the base loss, cross-entropy among the candidates and a penalty on wrong rivals.

    A slot counts as long as its label and those before are candidates. A rival costs its
    probability times how much less likely than the label the target finds it.
    """
    head = student.model.head
    assert isinstance(head, LiliCorrHead)
    logits = student.model.vocabulary.logits(blocks.hidden)
    base, overlap, log_q = distil(logits, blocks.teacher, blocks.rows, progress)
    is_full = blocks.labels.tokens.shape[1] == head.block_size - 1
    if progress < LATTICE_START or not is_full:
        return SlotLosses(base, torch.zeros_like(base), overlap)
    candidates, scores = head.lattice(blocks.hidden, blocks.anchor, log_q)
    is_gold = candidates == blocks.rows[..., None]  # [A, K, C]
    counts = is_gold.any(dim=-1).cumprod(dim=-1).bool()
    gold = is_gold.int().argmax(dim=-1)
    before = F.pad(gold[:, :-1], (1, 0))  # the only predecessor of the first step is in row 0
    table = before[..., None, None].expand(-1, -1, 1, scores.shape[-1])
    chosen = scores.float().gather(-2, table)[..., 0, :]
    entropy = F.cross_entropy(chosen.flatten(0, 1), gold.flatten(), reduction="none")
    target = blocks.teacher.gather(-1, candidates)
    lead = (target.gather(-1, gold[..., None]) - target).clamp(min=0)
    penalty = (chosen.softmax(dim=-1) * lead).sum(dim=-1)
    weights = LILICORR_WEIGHTS
    extra = weights[0] * entropy.view_as(base) + weights[1] * penalty
    return SlotLosses(base, extra * counts, overlap)


def _is_last(candidates: Tensor) -> Tensor:
    """Which of the candidates [..., C] are the last of their slot, [C]."""
    return torch.arange(candidates.shape[-1]) == candidates.shape[-1] - 1


LOSSES: dict[str, Loss] = {
    "draft-dflash": plain_loss,
    "draft-dspark": dspark_loss,
    "draft-dflash2": dflash2_loss,
    "draft-lilicorr": lilicorr_loss,
}
"""Spec type of a head -> its loss."""

"""Many blocks of one conversation at once: what the draft says, and what it should have said.

A block is anchored at position a, whose token the draft is given: it sees the context before a and
drafts the tokens at a + 1, a + 2, ... The target's distribution for the token at position j comes
from its last hidden state at j - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.drafters.base import DraftSampler
from specdec.drafters.dflash.head import DraftBlock
from specdec.drafters.dflash.model import DFlashModel
from specdec.drafters.dflash.trunk import Trunk
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions
from specdec.train.dataset import Conversation

ROUND_UP = 64
"""Rows of contexts are padded to a multiple of this: fast kernels are made once for each shape."""

UNLIKELY = -20.0
"""Log-probability of a token that is not the text's, where the text is learned by heart."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What K drafted tokens of A blocks should be."""

    anchors: Tensor
    """[A] int64 positions."""
    before: Tensor
    """[A, K] int64, the token before each drafted one; column 0 are the anchors' tokens."""
    tokens: Tensor
    """[A, K] int64."""
    valid: Tensor
    """[A, K] bool: supervised, and so are all tokens of the block before it."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The trunk's answer to A blocks of S slots, K of which draft, and their labels."""

    labels: Labels
    rows: Tensor
    """[A, K] int64, the labels' rows in the draft's vocabulary, -1 where they have none."""
    hidden: Tensor
    """[A, K, D] the drafting slots after the output norm."""
    state: Tensor
    """[A, K, D] what a confidence head reads."""
    anchor: Tensor
    """[A, D] the fused feature before each block."""
    teacher: Tensor
    """[A, K, VD] the target's log-probabilities over the whole vocabulary, at the draft's rows."""


def eligible_anchors(supervised: Tensor) -> Tensor:
    """Positions [N] whose token and the next one are both part of a reply."""
    return (supervised[:-1] & supervised[1:]).nonzero().flatten()


def make_labels(
    conversation: Conversation, anchors: Tensor, n_drafts: int, n_blocks: int = 0
) -> Labels:
    """Labels of the ``n_drafts`` tokens after each anchor; those past the end are invalid.

    Fewer anchors than ``n_blocks`` are followed by copies of the first, which are invalid.
    """
    missing = max(0, n_blocks - len(anchors))
    is_real = torch.arange(len(anchors) + missing) < len(anchors)
    anchors = torch.cat((anchors, anchors[:1].expand(missing)))
    steps = torch.arange(n_drafts)
    positions = anchors[:, None] + steps + 1
    inside = positions < len(conversation.tokens)
    positions = positions.clamp(max=len(conversation.tokens) - 1)
    valid = conversation.supervised[positions] & inside & is_real[:, None]
    valid = valid.cumprod(dim=1).bool()
    return Labels(
        anchors=anchors,
        before=conversation.tokens[positions - 1],
        tokens=conversation.tokens[positions],
        valid=valid,
    )


class Student:
    """A draft in training beside the target that it imitates."""

    def __init__(self, model: DFlashModel, target: Target) -> None:
        assert isinstance(model.trunk, Trunk)
        self.model = model
        self.target = target
        self.trunk: Trunk = model.trunk
        self.first_slot: int = getattr(model.head, "first_slot", 1)
        self.by_heart = False
        """Whether the text itself is learned in place of the target's distribution."""
        self.row_of = torch.arange(model.config.n_vocab)
        """[V] the row of each target token in the draft's vocabulary, -1 = none."""
        if model.vocabulary.d2t is not None:
            self.row_of = torch.full((model.config.n_vocab,), -1)
            self.row_of[model.vocabulary.d2t] = torch.arange(model.vocabulary.n_rows)
        for parameter in model.vocabulary.parameters():
            parameter.requires_grad_(False)

    @property
    def n_drafts(self) -> int:
        """Tokens that a full block drafts."""
        return self.model.head.n_max

    def parameters(self) -> list[torch.nn.Parameter]:
        """Everything that learns: trunk and head."""
        modules = (self.trunk, self.model.head)
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    def run(self, conversation: Conversation, labels: Labels) -> Blocks:
        """The blocks of ``labels``, as long as their rows are."""
        anchors, n_drafts = labels.anchors, labels.tokens.shape[1]
        hidden, state, fused = self.run_trunk(conversation, anchors, n_drafts)
        drafting = slice(self.first_slot, self.first_slot + n_drafts)
        steps = torch.arange(n_drafts)
        positions = (anchors[:, None] + steps).clamp(max=len(conversation.tokens) - 1)
        rows = self.row_of[labels.tokens]
        teacher = self.teacher(conversation)[positions]
        return Blocks(
            labels=labels,
            rows=rows,
            hidden=hidden[:, drafting],
            state=state[:, drafting],
            anchor=fused[anchors - 1],
            teacher=_certain(teacher, rows) if self.by_heart else teacher,
        )

    def run_trunk(
        self, conversation: Conversation, anchors: Tensor, n_drafts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden [A, S, D], state [A, S, D], fused features [N, D]) of blocks at ``anchors``."""
        fused = self.trunk.fuse(padded(conversation.taps[: int(anchors.max())].float()))
        context = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in self.trunk.context(fused, 0)]
        n_slots = self.model.head.block_len(n_drafts)
        tokens = torch.full((len(anchors), n_slots), self.model.config.mask_token)
        tokens[:, 0] = conversation.tokens[anchors]
        embeddings = self.model.vocabulary.embed(tokens.flatten())
        output = self.trunk.run(embeddings, anchors.tolist(), context)
        shape = (len(anchors), n_slots, -1)
        return output.hidden.view(shape), output.state.view(shape), fused

    @torch.no_grad()
    def teacher(self, conversation: Conversation) -> Tensor:
        """The target's log-probabilities [N, VD] after every token, at the draft's rows.

        They sum to less than one where the draft's vocabulary leaves tokens out.
        """
        final = padded(conversation.final)
        own = self.model.vocabulary.output
        if own is None:
            logits = self.target.lm_head(final.to(self.target.device)).to(final.device)
        else:
            logits = own(final).float()
        logits = self.target.softcap(logits[: len(conversation.tokens)])
        log_p: Tensor = logits - conversation.log_z[:, None]
        return log_p

    @torch.no_grad()
    def accepted(self, conversation: Conversation, anchors: Tensor) -> list[int]:
        """How many drafted tokens of a block at each anchor are those of the conversation.

        Drafts are made by the head as at run time, greedily. A block at the end counts as far as
        the reply goes.
        """
        hidden, state, fused = self.run_trunk(conversation, anchors, self.n_drafts)
        labels = make_labels(conversation, anchors, self.n_drafts)
        sampler = DraftSampler(DraftOptions(p_min=0.0), SamplingOptions())
        lengths = []
        for index, anchor in enumerate(anchors.tolist()):
            block = DraftBlock(
                hidden[index],
                state[index],
                last_token=int(conversation.tokens[anchor]),
                anchor=fused[anchor - 1],
            )
            picks = self.model.head.propose(block, self.n_drafts, sampler)
            tokens = torch.tensor([pick.token for pick in picks])
            right = (tokens == labels.tokens[index]) & labels.valid[index]
            lengths.append(int(right.cumprod(0).sum()))
        return lengths


def _certain(teacher: Tensor, rows: Tensor) -> Tensor:
    """Log-probabilities like ``teacher`` [..., VD] of which only those at ``rows`` [...] count."""
    certain = torch.full_like(teacher, UNLIKELY)
    return certain.scatter(-1, rows.clamp(min=0)[..., None], 0.0)


def padded(rows: Tensor) -> Tensor:
    """Rows [N, ...] with zeros behind them up to a multiple of `ROUND_UP`."""
    missing = -len(rows) % ROUND_UP
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))


def acceptance_rates(lengths: Sequence[int], n_drafts: int) -> list[float]:
    """Share of blocks in which at least 1, 2, ... ``n_drafts`` tokens were right."""
    return [
        sum(length > position for length in lengths) / max(1, len(lengths))
        for position in range(n_drafts)
    ]

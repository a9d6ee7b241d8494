"""What crosses the line between the loop and a drafter, and how a draft token is picked.

A drafter has four verbs: `begin` a request, `observe` committed tokens, `draft`, `accept`. It never
sees the verifier and is never shown a rejected token.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from specdec.options import RANDOM_SEED, DraftOptions, SamplingOptions
from specdec.sampling.chain import stream_seed

N_BEST = 10
"""Candidates a draft model's logits are cut to before anything else, as in llama.cpp."""


@dataclass(slots=True)
class Candidates:
    """The distributions q that K draft tokens were drawn from; zero outside the C candidates."""

    ids: Tensor
    """[K, C] int64, token ids in the target's vocabulary."""
    probs: Tensor
    """[K, C] float32, each row sums to one."""


@dataclass(slots=True)
class Draft:
    """The proposed tokens of one round."""

    tokens: list[int] = field(default_factory=list)
    """K token ids, may be empty."""
    q: Candidates | None = None
    """None: a deterministic draft, verified by matching."""
    end: str = "none"
    """Why it is not longer: `n_max`, `auto`, `room`, `p_min`, `n_min`, `no match` or `none`."""
    drafter: str = ""
    """The spec type that made it; filled in by `FirstOf`."""


class Drafter(Protocol):
    """Whatever makes drafts."""

    name: str
    """Its spec type."""
    taps: tuple[int, ...]
    """The target's layer inputs it wants to see; () = tokens only."""
    n_max: int
    """Its longest draft, after clamping."""

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """Starts a request, keeping the state of the first ``kept`` observed tokens.

        Assigns fresh per-request state and never mutates the old one. Returns how many tokens could
        be kept.
        """

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Takes tokens [T] int64 that are now in the target's cache, with their taps.

        ``hidden`` is [T, len(taps), D]. Called for prompt chunks and after each round.
        """

    def draft(self, last_token: int, room: int) -> Draft:
        """At most ``room`` >= 1 tokens to follow ``last_token``, which is not observed yet."""

    def accept(self, accepted: int) -> None:
        """Keeps the first ``accepted`` tokens of this drafter's last draft, undoes the rest."""


@runtime_checkable
class Saves(Protocol):
    """A drafter that keeps something from run to run."""

    def save(self) -> None:
        """Writes it down."""


class Pick(NamedTuple):
    """One drafted token."""

    token: int
    confidence: float
    """Probability of the best candidate; what `p_min` is compared with."""
    ids: Tensor | None
    """[C] the candidates; None when the token was not sampled."""
    probs: Tensor | None
    """[C] the distribution it was drawn from."""


class DraftSampler:
    """The only place where a draft token and its q are made, so that they cannot disagree."""

    def __init__(self, options: DraftOptions, sampling: SamplingOptions) -> None:
        self.p_min = options.p_min
        self.samples = (
            options.sampling == "probabilistic" and sampling.temp > 0 and not sampling.stateful
        )
        self.temperature = sampling.temp if self.samples else 1.0
        seed = secrets.randbelow(RANDOM_SEED) if sampling.seed == RANDOM_SEED else sampling.seed
        self._generator = torch.Generator().manual_seed(stream_seed(seed, "draft"))

    def pick(self, scores: Tensor, ids: Tensor | None = None) -> Pick:
        """The next token from logits [V], or from scores [C] of a head's own candidates ``ids``.

        Logits of a vocabulary are cut to the ten best. Softmax is over the candidates, at the
        request's temperature when drafts are sampled and at 1 otherwise.
        """
        if ids is None:
            scores, ids = scores.topk(min(N_BEST, scores.shape[-1]))
        probs = (scores.float() / self.temperature).softmax(dim=-1)
        best = int(scores.argmax())
        confidence = float(probs[best])
        if not self.samples:
            return Pick(int(ids[best]), confidence, None, None)
        drawn = int(torch.multinomial(probs.cpu(), 1, generator=self._generator))
        return Pick(int(ids[drawn]), confidence, ids, probs)


def as_candidates(picks: Sequence[Pick]) -> Candidates | None:
    """The q of a sampled draft; None when its tokens were not sampled."""
    ids = [pick.ids for pick in picks if pick.ids is not None]
    probs = [pick.probs for pick in picks if pick.probs is not None]
    return Candidates(torch.stack(ids), torch.stack(probs)) if ids else None


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, after one transfer; integers must be below 2^53."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    packed = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu()
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    return [
        part.to(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


class FirstOf:
    """Several drafters as one: the first non-empty draft wins, in the order given.

    Everybody observes everything, each with its own slice of the taps. With no drafters at all it
    makes empty drafts, which is plain decoding.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.name = ",".join(drafter.name for drafter in drafters) or "none"
        self.taps = tuple(dict.fromkeys(tap for d in drafters for tap in d.taps))
        self.n_max = max((drafter.n_max for drafter in drafters), default=0)
        self._slots = [
            None if d.taps == self.taps else torch.tensor([self.taps.index(tap) for tap in d.taps])
            for d in drafters
        ]
        self._author: Drafter | None = None

    def __copy__(self) -> Self:
        """Copies of all drafters: after `begin` a second session on the same weights and tables."""
        return type(self)([copy.copy(drafter) for drafter in self.drafters])

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`; what is kept is what all of them could keep."""
        self._author = None
        while True:
            common = min((d.begin(sampling, kept) for d in self.drafters), default=kept)
            if common == kept:
                return kept
            kept = common

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        for drafter, slots in zip(self.drafters, self._slots, strict=True):
            mine = hidden
            if hidden is not None and slots is not None:
                mine = hidden.index_select(1, slots.to(device=hidden.device, dtype=torch.int64))
            drafter.observe(tokens, mine)

    def draft(self, last_token: int, room: int) -> Draft:
        """The first non-empty draft, cut to ``room`` together with its q."""
        draft = Draft()
        for drafter in self.drafters:
            draft = drafter.draft(last_token, room)
            if draft.tokens:
                self._author = drafter
                return _cut(draft, room, drafter.name)
        return draft

    def accept(self, accepted: int) -> None:
        """Tells the drafter of the last draft."""
        if self._author is not None:
            self._author.accept(accepted)

    def save(self) -> None:
        """Lets those that keep something from run to run write it down."""
        for drafter in self.drafters:
            if isinstance(drafter, Saves):
                drafter.save()


def _cut(draft: Draft, room: int, name: str) -> Draft:
    if len(draft.tokens) <= room:
        return Draft(draft.tokens, draft.q, draft.end, name)
    q = None if draft.q is None else Candidates(draft.q.ids[:room], draft.q.probs[:room])
    return Draft(draft.tokens[:room], q, "room", name)

"""Candidates: the tokens that are still in the race, and the draw from them.

Filters take and return `Candidates`. The point of the type is speed: as long as nothing needs an
order, the whole vocabulary stays one unsorted row; once something does, only the best few tokens
are sorted, and from then on all work is on those, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import SpecdecError

_HEAD_SIZES = (256, 4096)
"""Sizes of the sorted head that are tried before the whole vocabulary is sorted."""


def _nothing_left() -> SpecdecError:
    return SpecdecError(
        "sampling: no token is left to choose from; the model's logits are not numbers, "
        "or --logit-bias excludes every token"
    )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Logits of the remaining tokens. Sorted means: descending, ties by lower id, on the CPU."""

    logits: Tensor  # [n] float32
    ids: Tensor | None = None  # [n] int64; None: position is id
    is_sorted: bool = False

    def __len__(self) -> int:
        return self.logits.shape[0]

    def token_ids(self) -> Tensor:
        """The token of each position, int64 [n]."""
        if self.ids is not None:
            return self.ids
        return torch.arange(len(self), device=self.logits.device)

    def probabilities(self) -> Tensor:
        """Softmax over the candidates, float32 [n]."""
        return self.logits.softmax(0)

    def keep(self, mask: Tensor) -> Candidates:
        """The candidates where ``mask`` (bool [n]) holds; `SpecdecError` if it holds nowhere."""
        positions = mask.nonzero().squeeze(1)
        if len(positions) == 0:
            raise _nothing_left()
        return self.take(positions)

    def take(self, positions: Tensor) -> Candidates:
        """The candidates at ``positions`` (int64), which must be ascending."""
        ids = positions if self.ids is None else self.ids[positions]
        return Candidates(self.logits[positions], ids, self.is_sorted)

    def with_logits(self, logits: Tensor, *, is_sorted: bool = False) -> Candidates:
        """The same tokens with other logits."""
        return Candidates(logits, self.ids, is_sorted)

    def positions_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where ``tokens`` (int64 [m], distinct) are, and which of them are candidates at all.

        Returns positions, int64 [f], and a bool mask [m] with f true values.
        """
        if self.ids is None:
            found = tokens < len(self)
            return tokens[found], found
        ordered, order = self.ids.sort()
        slots = torch.searchsorted(ordered, tokens).clamp(max=len(self) - 1)
        found = ordered[slots] == tokens
        return order[slots[found]], found

    def sorted(self) -> Candidates:
        """All candidates in order, without those at minus infinity.

        Raises `SpecdecError` if none is left or the logits are not numbers.
        """
        if self.is_sorted:
            return self
        logits, ids = self.logits.cpu(), self.token_ids().cpu()
        if self.ids is not None:  # the stable sort breaks ties by position: make that the id
            ids, order = ids.sort()
            logits = logits[order]
        logits, order = logits.sort(descending=True, stable=True)
        alive = int((logits > -torch.inf).sum())
        if alive == 0 or torch.isnan(logits[0]):
            raise _nothing_left()
        return Candidates(logits[:alive], ids[order[:alive]], is_sorted=True)

    def head(self, n: int) -> Candidates:
        """The ``n`` best candidates (fewer if there are fewer), sorted."""
        if n >= len(self):
            return self.sorted()
        if self.is_sorted:
            return Candidates(self.logits[:n], self.token_ids()[:n], is_sorted=True)
        values, positions = self.logits.topk(n + 1)
        edge, beyond = values[n - 1 :].tolist()
        if edge == beyond:  # topk may keep either of two equal tokens; we keep the lower id
            mask = (self.logits >= edge) & (self.logits > -torch.inf)
            positions = mask.nonzero().squeeze(1)
        else:
            positions = positions[:n]
        ids = positions if self.ids is None else self.ids[positions]
        ordered = Candidates(self.logits[positions], ids).sorted()
        return Candidates(ordered.logits[:n], ordered.token_ids()[:n], is_sorted=True)

    def until(self, mass: float) -> tuple[Candidates, Tensor]:
        """A sorted head that holds at least ``mass`` of the probability, and its running sums.

        The sums, float64 [h], are over the probabilities of all candidates. The head is not the
        smallest one; it is all candidates if ``mass`` is never reached.
        """
        total = self.logits.logsumexp(0).cpu()
        for size in (*_HEAD_SIZES, len(self)):
            head = self.head(size)
            sums = (head.logits - total).exp().double().cumsum(0)
            if size >= len(self) or float(sums[-1]) >= mass:
                break
        return head, sums

    def probability_of(self, token: int) -> float:
        """Softmax probability of one candidate; 0 if it is none."""
        position, found = self.positions_of(torch.tensor([token], device=self.logits.device))
        return float(self.probabilities()[position[0]]) if bool(found[0]) else 0.0

    def draw(self, uniform: float) -> int:
        """The token that ``uniform`` in [0, 1) falls on, walking down from the most probable one.

        Small differences in the logits change the result only if they move a boundary across
        ``uniform``: the order is by logit and id, the sums are float64.
        """
        head, sums = self.until(uniform + 1e-6)
        end = sums[-1] if len(head) == len(self) else torch.ones((), dtype=torch.float64)
        slot = int(torch.searchsorted(sums, uniform * end, right=True))
        return int(head.token_ids()[min(slot, len(head) - 1)])


def draw(probabilities: Tensor, uniform: float) -> int:
    """The token of a row of probabilities, [V], any positive total, that ``uniform`` falls on.

    The same walk as `SamplerChain.sample`: down from the most probable token.
    """
    return Candidates(probabilities.float().log()).draw(uniform)

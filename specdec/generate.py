"""The generation loop. There is one: plain decoding is the same loop with empty drafts.

Terms: ``history`` = tokens whose keys and values are in the target's cache; ``last_token`` = the
newest token of the text, not in the cache yet; a *round* drafts, runs the target on
``[last_token, *draft]``, verifies and rolls back.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from specdec.drafters.base import Draft, Drafter
from specdec.errors import ContextFullError
from specdec.kv_cache import KVCache
from specdec.models.base import Target
from specdec.verify import Verifier


class Finish(enum.Enum):
    """Why generation ended."""

    STOP = "stop"
    """An end-of-generation token or a stop string."""
    LENGTH = "length"
    """The token limit, or the context is full."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request ends by itself."""

    n_ctx: int
    """Tokens of prompt and reply together."""
    n_predict: int = -1
    """Tokens of the reply; negative = no limit."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the reply; the last one of it."""
    n_batch: int = 512
    """Prompt tokens per forward pass."""

    def room(self, n_history: int, n_emitted: int) -> int:
        """The longest draft that can still be used; negative when the context is full."""
        room = self.n_ctx - n_history - 2
        return room if self.n_predict < 0 else min(room, self.n_predict - n_emitted - 1)

    def cut(self, emitted: list[int], n_history: int, n_emitted: int) -> tuple[int, Finish | None]:
        """How many emitted tokens of a round are kept, and why generation ends with them."""
        for i, token in enumerate(emitted, start=1):
            if token in self.end_tokens:
                return i, Finish.STOP
            if n_emitted + i == self.n_predict or n_history + i + 1 >= self.n_ctx:
                return i, Finish.LENGTH
        return len(emitted), None


@dataclass(slots=True)
class RoundTimes:
    """Seconds of one round."""

    draft: float
    target: float
    verify: float
    observe: float

    @property
    def total(self) -> float:
        """The whole round."""
        return self.draft + self.target + self.verify + self.observe


@dataclass(slots=True)
class Round:
    """What one round did."""

    position: int
    """Position of the round's first emitted token in the text."""
    draft: Draft
    """The draft that was verified."""
    accepted: int
    """Draft tokens that stand, before limits cut the round."""
    tokens: list[int]
    """Emitted and kept."""
    finish: Finish | None
    times: RoundTimes


def prefill(
    target: Target,
    cache: KVCache,
    drafter: Drafter,
    tokens: Sequence[int],
    n_batch: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Runs prompt ``tokens`` through the target in chunks and shows each chunk to the drafter.

    ``progress`` is told how many tokens of it are done.
    """
    for start in range(0, len(tokens), n_batch):
        chunk = torch.tensor(tokens[start : start + n_batch], device=target.device)
        output = target(chunk, cache, taps=drafter.taps, logit_rows=0)
        drafter.observe(chunk, output.hidden)
        if progress is not None:
            progress(start + len(chunk))


@torch.inference_mode()
def warm_up(target: Target) -> None:
    """Runs one token and forgets it, so that the first request does not pay for first-time work."""
    target(torch.zeros(1, dtype=torch.int64, device=target.device), target.new_cache(1))


def decode(
    target: Target,
    cache: KVCache,
    drafter: Drafter,
    verifier: Verifier,
    prompt: Sequence[int],
    limits: Limits,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Round]:
    """Yields the rounds of one request.

    ``cache`` and ``drafter`` may already hold the first ``cache.length`` tokens of ``prompt``.
    After every round both hold exactly the text without its last token, also when generation ends
    inside one. Raises `ContextFullError` when the prompt leaves no room for a reply.
    """
    if len(prompt) >= limits.n_ctx:
        raise ContextFullError(
            f"prompt: {len(prompt)} tokens do not fit the context of {limits.n_ctx}; "
            "shorten it or raise --ctx-size"
        )
    if limits.n_predict == 0:
        return
    with torch.inference_mode():
        cache.make_room(len(prompt))
        prefill(target, cache, drafter, prompt[cache.length : -1], limits.n_batch, progress)
        cache.checkpoint()
    last_token, n_emitted, finish, device = prompt[-1], 0, None, target.device
    while finish is None:
        # Not around the generator as a whole: torch would wrap every step of it.
        with torch.inference_mode():
            start = cache.length
            clock = [time.perf_counter()]
            room = limits.room(start, n_emitted)
            draft = drafter.draft(last_token, room) if room >= 1 else Draft(end="room")
            clock.append(time.perf_counter())

            block = torch.tensor([last_token, *draft.tokens], device=device)
            output = target(block, cache, taps=drafter.taps)
            clock.append(time.perf_counter())

            emitted = verifier.verify(draft, output.logits, output.best)
            keep, finish = limits.cut(emitted, start, n_emitted)
            clock.append(time.perf_counter())

            cache.truncate(start + keep)
            if draft.tokens:
                drafter.accept(keep - 1)
            hidden = output.hidden
            if keep <= len(draft.tokens):
                block, hidden = block[:keep], None if hidden is None else hidden[:keep]
            drafter.observe(block, hidden)
            clock.append(time.perf_counter())

        n_emitted, last_token = n_emitted + keep, emitted[keep - 1]
        times = RoundTimes(*(b - a for a, b in itertools.pairwise(clock)))
        yield Round(start + 1, draft, len(emitted) - 1, emitted[:keep], finish, times)

"""Many texts at once from one target: continuous batching, for making training data.

Every lane holds one text of its own length; a step reads one token of each, and the prompts of new
ones. A lane's text depends on its request alone: its random numbers are its own, and in float32 so
are its numbers up to rounding.

Lanes are kept in order of length, roughly: they all grow by one a step, and a new one goes to the
end. Attention then runs group by group, each over no more rows than its longest lane has.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.errors import UsageError
from specdec.models.base import Target
from specdec.models.layers import DecoderLayer, attention
from specdec.train.packed import attend_text, check_target, run_rows

GROUP = 16
"""Lanes that attend together."""
MAX_DRAWS = 50
"""Draws outside the nucleus before the likeliest token is taken instead."""


class End(Enum):
    """Why a text is finished."""

    END_TOKEN = "end token"
    STOPPED = "stopped"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """One text to be written."""

    tokens: Sequence[int]
    """What it follows, at least one token."""
    limit: int
    """Tokens after which it is cut."""
    end_tokens: frozenset[int]
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    seed: int | str = 0
    stop: Callable[[Sequence[int]], bool] | None = None
    """Asked after every token, with all tokens of the text so far."""
    tag: Any = None
    """The caller's own."""


@dataclass(slots=True)
class Text:
    """A request and what has been written for it, the end token included."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    """None: it was broken off."""


@dataclass(slots=True)
class _Lane:
    text: Text
    random: random.Random
    length: int
    """Rows in the cache."""


class Lanes:
    """Up to ``n_lanes`` texts in progress, each of at most ``n_ctx`` tokens with its prompt."""

    def __init__(
        self,
        target: Target,
        n_lanes: int,
        n_ctx: int,
        *,
        dtype: torch.dtype = torch.float32,
        prefix: Sequence[int] = (),
    ) -> None:
        """``dtype`` is that of weights, activations and cache; other than float32 takes a copy.

        ``prefix`` is read once for all requests that begin with it. Raises what `check_target`
        raises.
        """
        check_target(target)
        self.n_lanes, self.n_ctx, self.dtype = n_lanes, n_ctx, dtype
        self._target = target if dtype is torch.float32 else copy.deepcopy(target).to(dtype)
        self._lanes: list[_Lane] = []
        self._waiting: list[Request] = []
        shapes = [target.cache_shape(i) for i in range(len(target.layers))]
        device = target.device
        # zeros, not empty: what a mask hides must still be a number
        self._keys = [
            torch.zeros(n_lanes, s.n_head_kv, n_ctx, s.head_dim, dtype=dtype, device=device)
            for s in shapes
        ]
        self._values = [
            torch.zeros(n_lanes, s.n_head_kv, n_ctx, s.head_dim_v, dtype=dtype, device=device)
            for s in shapes
        ]
        self._read_prefix(prefix)

    @property
    def n_free(self) -> int:
        """How many requests can be added before the next step."""
        return self.n_lanes - len(self._lanes) - len(self._waiting)

    @property
    def texts(self) -> list[Text]:
        """The texts in progress."""
        return [lane.text for lane in self._lanes]

    def add(self, request: Request) -> None:
        """Starts a text with the next step. Raises `UsageError` if there is no lane for it."""
        if not self.n_free:
            raise UsageError(f"all {self.n_lanes} lanes are taken")
        if not 0 < len(request.tokens) <= self.n_ctx - request.limit:
            raise UsageError(
                f"a prompt of {len(request.tokens)} tokens and {request.limit} more do not fit "
                f"lanes of {self.n_ctx}"
            )
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Text]:
        """One token more for every text; the texts that are finished leave their lanes."""
        old, new = self._lanes, self._start_waiting()
        if not old and not new:
            return []
        passes = [part for part in (_Old(old), _New(len(old), new)) if part.n_rows]
        logits = self._read(passes)
        self._lanes = old + new
        self._choose(self._lanes, logits)
        finished = [i for i, lane in enumerate(self._lanes) if lane.text.end is not None]
        texts = [self._lanes[i].text for i in finished]
        for i in reversed(finished):
            self._remove(i)
        return texts

    # Passes of the target

    def _start_waiting(self) -> list[_Lane]:
        """Lanes for the requests that wait; those that begin with the prefix have read it."""
        lanes = []
        for place, request in enumerate(self._waiting, start=len(self._lanes)):
            n_known = len(self._prefix)
            if len(request.tokens) <= n_known or [*request.tokens[:n_known]] != self._prefix:
                n_known = 0
            if n_known:
                buffers = (*self._keys, *self._values)
                for buffer, rows in zip(buffers, self._kept, strict=True):
                    buffer[place, :, :n_known] = rows
            lanes.append(_Lane(Text(request), random.Random(request.seed), n_known))
        self._waiting = []
        return lanes

    def _read(self, passes: Sequence[_Old | _New]) -> Tensor:
        """Reads what is new in every lane, in one pass; logits [B, V] of the lanes' last rows."""
        counts = [part.n_rows for part in passes]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            block = self._target.layers[layer]
            cache = self._keys[layer], self._values[layer]
            rows = zip(passes, *(torch.split(x, counts) for x in (q, k, v)), strict=True)
            return torch.cat([part.attend(block, cache, *qkv) for part, *qkv in rows])

        tokens = torch.tensor([token for part in passes for token in part.tokens])
        positions = torch.cat([part.positions for part in passes])
        hidden, _ = run_rows(self._target, tokens, positions, attend)
        parts = zip(passes, torch.split(hidden, counts), strict=True)
        final = torch.cat([rows[part.last] for part, rows in parts])
        for part in passes:
            part.finish()
        target = self._target
        return target.softcap(target.lm_head(target.output_norm(final)))  # type: ignore[no-any-return]

    def _read_prefix(self, prefix: Sequence[int]) -> None:
        """Fills `_kept` with the keys and values of texts that begin with ``prefix``."""
        self._prefix: list[int] = []
        self._kept: list[Tensor] = []
        if prefix:
            self.add(Request([*prefix], 1, frozenset()))
            self.step()
            n = len(prefix)
            self._kept = [rows[0, :, :n].clone() for rows in (*self._keys, *self._values)]
            self._prefix = [*prefix]

    # Tokens

    def _choose(self, lanes: Sequence[_Lane], logits: Tensor) -> None:
        """Appends the next token to the text of each lane, chosen from its row of logits."""
        tokens = logits.argmax(dim=-1)
        sampled = [i for i, lane in enumerate(lanes) if lane.text.request.temperature > 0]
        if sampled:
            chosen = [lanes[i] for i in sampled]
            tokens[sampled] = _sample(logits[sampled], chosen)
        for lane, token in zip(lanes, tokens.tolist(), strict=True):
            text, request = lane.text, lane.text.request
            text.tokens.append(token)
            if token in request.end_tokens:
                text.end = End.END_TOKEN
            elif request.stop is not None and request.stop(text.tokens):
                text.end = End.STOPPED
            elif len(text.tokens) >= request.limit:
                text.end = End.LENGTH

    # Places in the cache

    def _remove(self, lane: int) -> None:
        """Empties a lane and closes the gap.

        It is filled from the next group with its longest lane, the gap there likewise, and the
        last gap with the last lane, so that groups stay in order of length.
        """
        last = len(self._lanes) - 1
        while lane < last:
            first = (lane // GROUP + 1) * GROUP
            group = range(first, min(first + GROUP, last + 1))
            source = max(group, key=lambda i: self._lanes[i].length, default=last)
            length = self._lanes[source].length
            for buffer in (*self._keys, *self._values):
                buffer[lane, :, :length] = buffer[source, :, :length]
            self._lanes[lane] = self._lanes[source]
            lane = source
        self._lanes.pop()


@dataclass(slots=True)
class _Old:
    """One row of each lane that has a text already, from the first lane on."""

    lanes: Sequence[_Lane]
    positions: Tensor = field(init=False)
    _groups: list[tuple[slice, int]] = field(init=False)
    """Lanes that attend together, and how many rows of the cache they need."""
    _masks: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths, n = [lane.length for lane in self.lanes], len(self.lanes)
        self.positions = torch.tensor(lengths, dtype=torch.int64)
        groups = [slice(first, min(first + GROUP, n)) for first in range(0, n, GROUP)]
        self._groups = [(group, max(lengths[group]) + 1) for group in groups]

    @property
    def n_rows(self) -> int:
        """Rows of this part of the pass."""
        return len(self.lanes)

    @property
    def last(self) -> slice:
        """The rows whose logits are wanted."""
        return slice(None)

    @property
    def tokens(self) -> list[int]:
        """What is read."""
        return [lane.text.tokens[-1] for lane in self.lanes]

    def attend(
        self, block: DecoderLayer, cache: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Stores k and v in the cache and attends, [B, H * Dv]."""
        lanes = torch.arange(self.n_rows)
        cache[0][lanes, :, self.positions], cache[1][lanes, :, self.positions] = k, v
        mixed = [
            _attend_group(block, q[group], cache[0][group, :, :n], cache[1][group, :, :n], mask)
            for (group, n), mask in zip(self._groups, self._visible(block, q), strict=True)
        ]
        return torch.cat(mixed)

    def _visible(self, block: DecoderLayer, q: Tensor) -> list[Tensor]:
        window = block.spec.window
        if window not in self._masks:
            self._masks[window] = [
                _visible(self.positions[group], n, window, q.dtype).to(q.device)
                for group, n in self._groups
            ]
        return self._masks[window]

    def finish(self) -> None:
        """Counts the rows as read."""
        for lane in self.lanes:
            lane.length += 1


@dataclass(slots=True)
class _New:
    """The prompts of new lanes, as far as they have not been read."""

    first: int
    """Place of the first of them."""
    lanes: Sequence[_Lane]
    positions: Tensor = field(init=False)
    last: Tensor = field(init=False)
    """The rows whose logits are wanted."""
    _counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        spans = [(lane.length, len(lane.text.request.tokens)) for lane in self.lanes]
        self._counts = [end - start for start, end in spans]
        nothing = torch.empty(0, dtype=torch.int64)
        self.positions = torch.cat([nothing, *(torch.arange(*span) for span in spans)])
        self.last = torch.tensor(self._counts, dtype=torch.int64).cumsum(0) - 1

    @property
    def n_rows(self) -> int:
        """Rows of this part of the pass."""
        return sum(self._counts)

    @property
    def tokens(self) -> list[int]:
        """What is read."""
        return [t for lane in self.lanes for t in lane.text.request.tokens[lane.length :]]

    def attend(
        self, block: DecoderLayer, cache: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Stores k and v in the cache and attends, [T, H * Dv]."""
        parts = zip(*(torch.split(x, self._counts) for x in (q, k, v)), strict=True)
        mixed = []
        for place, (lane, (query, *new)) in enumerate(zip(self.lanes, parts, strict=True)):
            end = lane.length + query.shape[0]
            for buffer, rows in zip(cache, new, strict=True):
                buffer[self.first + place, :, lane.length : end] = rows.transpose(0, 1)
            held = [buffer[self.first + place, :, :end] for buffer in cache]
            mixed.append(attend_text(block, query, *held))
        return torch.cat(mixed)

    def finish(self) -> None:
        """Counts the rows as read."""
        for lane in self.lanes:
            lane.length = len(lane.text.request.tokens)


def _visible(positions: Tensor, n: int, window: int, dtype: torch.dtype) -> Tensor:
    """Added to scores, [G, 1, 1, N]: 0 for keys that queries at positions [G] see, else -inf."""
    keys, queries = torch.arange(n), positions[:, None]
    seen = keys <= queries
    if window:
        seen &= queries - keys < window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None]


def _attend_group(block: DecoderLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention [G, H * Dv] of one query a lane, q [G, H, Dh], over k, v [G, Hkv, N, Dh]."""
    if block.spec.has_sinks:
        sinks = block.attn_sinks.weight
        mixed = [
            attention(q[i : i + 1], k[i], v[i], visible=mask[i, 0] == 0, sinks=sinks)
            for i in range(q.shape[0])
        ]
        return torch.cat(mixed).flatten(1)
    # the heads that share keys are handed over as rows: their masks are the same
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[2])
    mixed_heads = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=1.0)
    return mixed_heads.flatten(1)


def _sample(logits: Tensor, lanes: Sequence[_Lane]) -> Tensor:
    """A token [R] from the nucleus of each row [R, V], with the random numbers of its lane.

    Drawn from the whole distribution until the tokens above the drawn one hold less than top-p,
    which needs no sorting.
    """
    requests = [lane.text.request for lane in lanes]
    device = logits.device
    temperature = torch.tensor([r.temperature for r in requests], device=device)
    top_p = torch.tensor([r.top_p for r in requests], device=device)
    p = (logits / temperature[:, None]).softmax(dim=-1)
    cumulated = p.cumsum(dim=-1)
    tokens = torch.empty(len(lanes), dtype=torch.int64, device=device)
    todo = torch.arange(len(lanes), device=device)
    for _ in range(MAX_DRAWS):
        u = torch.tensor([lanes[i].random.random() for i in todo.tolist()], device=device)
        sums = cumulated if len(todo) == len(lanes) else cumulated[todo]
        drawn = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]
        tokens[todo] = drawn = drawn.clamp(max=p.shape[1] - 1)
        own = p[todo, drawn]
        # likelier than all that the nucleus may leave out: inside without looking further
        todo, own = todo[own <= 1 - top_p[todo]], own[own <= 1 - top_p[todo]]
        rows = p[todo]
        above = (rows * (rows > own[:, None])).sum(dim=-1)
        todo = todo[above >= top_p[todo]]
        if not len(todo):
            return tokens
    tokens[todo] = p[todo].argmax(dim=-1)
    return tokens

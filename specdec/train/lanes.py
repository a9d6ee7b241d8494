"""Many texts at once from one target: continuous batching, for making training data.

Every lane holds one text of its own length; a step reads one token of each. All but the attention
is row-wise, so the target's own layers do it; attention runs over one cache of all lanes. A lane's
text depends on its request alone: its random numbers are its own, and in float32 so are its numbers
up to rounding.

Lanes are kept in order of length, roughly: they all grow by one a step, and a new one goes to the
end. Attention then runs group by group, each over no more rows than its longest lane has.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.errors import UnsupportedError, UsageError
from specdec.models.base import Target
from specdec.models.layers import DecoderLayer, attention
from specdec.models.rows import Rows

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
    ) -> None:
        """``dtype`` is that of weights, activations and cache; other than float32 takes a copy.

        Raises `UnsupportedError` for a target with recurrent or gated layers, and `UsageError` for
        one on native kernels.
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
        n_old = len(self._lanes)
        if self._waiting:
            logits = self._read_prompts()
            self._choose(self._lanes[n_old:], logits)
        if n_old:
            self._choose(self._lanes[:n_old], self._read_last(n_old))
        finished = [i for i, lane in enumerate(self._lanes) if lane.text.end is not None]
        texts = [self._lanes[i].text for i in finished]
        for i in reversed(finished):
            self._remove(i)
        return texts

    # Passes of the target

    def _read_prompts(self) -> Tensor:
        """Reads the waiting prompts into new lanes, in one pass; logits [R, V] of their ends."""
        first = len(self._lanes)
        counts = [len(request.tokens) for request in self._waiting]
        for request, count in zip(self._waiting, counts, strict=True):
            self._lanes.append(_Lane(Text(request), random.Random(request.seed), count))
        tokens = torch.tensor([token for r in self._waiting for token in r.tokens])
        positions = torch.cat([torch.arange(count) for count in counts])
        self._waiting = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
            mixed = []
            for lane, (query, key, value) in enumerate(parts, start=first):
                n = query.shape[0]
                self._keys[layer][lane, :, :n] = key.transpose(0, 1)
                self._values[layer][lane, :, :n] = value.transpose(0, 1)
                mixed.append(self._attend_prompt(layer, query, key, value))
            return torch.cat(mixed)

        hidden = self._run(tokens, positions, attend)
        ends = torch.tensor(counts).cumsum(0) - 1
        return self._logits(hidden[ends.to(hidden.device)])

    def _attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention [T, H * Dv] of a prompt, q [T, H, Dh] over k, v [T, Hkv, Dh]."""
        block = self._target.layers[layer]
        if block.spec.has_sinks or 0 < block.spec.window < q.shape[0]:
            rows = Rows(0, q.shape[0], exact=False)
            return block.attend_causal(q, k.transpose(0, 1), v.transpose(0, 1), rows)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    def _read_last(self, n: int) -> Tensor:
        """Reads the last token of each of the first ``n`` lanes; logits [n, V]."""
        lanes = self._lanes[:n]
        lengths = [lane.length for lane in lanes]
        positions = torch.tensor(lengths)
        index = torch.arange(n)
        groups = [slice(first, min(first + GROUP, n)) for first in range(0, n, GROUP)]
        longest = [max(lengths[group]) + 1 for group in groups]
        masks: dict[int, list[Tensor]] = {}
        device = self._target.device

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer][index, :, positions] = k
            self._values[layer][index, :, positions] = v
            block = self._target.layers[layer]
            window = block.spec.window
            if window not in masks:
                masks[window] = [
                    _visible(positions[group], rows, window, self.dtype).to(device)
                    for group, rows in zip(groups, longest, strict=True)
                ]
            mixed = [
                _attend(
                    block,
                    q[group],
                    self._keys[layer][group, :, :rows],
                    self._values[layer][group, :, :rows],
                    mask,
                )
                for group, rows, mask in zip(groups, longest, masks[window], strict=True)
            ]
            return torch.cat(mixed)

        hidden = self._run(
            torch.tensor([lane.text.tokens[-1] for lane in lanes]), positions, attend
        )
        for lane in lanes:
            lane.length += 1
        return self._logits(hidden)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Last hidden states [T, D] of tokens [T] at positions [T]."""
        target = self._target
        rotary = target.rotary(positions.to(target.device))
        rows = Rows(0, tokens.shape[0], exact=False)
        hidden = target.embed(tokens.to(target.device))
        if target.config.embedding_scale != 1.0:
            hidden = hidden * target.config.embedding_scale
        for index, layer in enumerate(target.layers):
            x = layer.attn_norm(hidden)
            q = layer.queries(x, rotary[index]).to(self.dtype)
            k, v = layer.keys_values(x, rotary[index])
            mixed = attend(index, q, k.to(self.dtype), v.to(self.dtype))
            hidden = hidden + layer.project_attention(mixed)
            x = getattr(layer, layer.spec.ffn_norm)(hidden)
            hidden = layer.finish(hidden, layer.feed_forward(x, rows))
        return hidden

    def _logits(self, final: Tensor) -> Tensor:
        target = self._target
        return target.softcap(target.lm_head(target.output_norm(final)))  # type: ignore[no-any-return]

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


def check_target(target: Target) -> None:
    """Raises an error unless the target's layers can run in lanes."""
    if target.is_row_invariant:
        raise UsageError("training needs the target on torch kernels; give --kernels torch")
    for layer in target.layers:
        if layer.spec.cache_shape.state or type(layer).forward is not DecoderLayer.forward:
            raise UnsupportedError(
                f"training: {target.config.architecture} has recurrent or gated layers, which are "
                "not supported; dense architectures are"
            )


def pick_dtype(target: Target, n_rows: int = 64) -> torch.dtype:
    """bfloat16 where its matrix products are clearly faster on this machine, else float32."""
    width = target.config.n_embd
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(n_rows, width, dtype=dtype, device=target.device)
        weights = [torch.ones(width, width, dtype=dtype, device=target.device) for _ in range(8)]
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for weight in weights:
                y = F.linear(x, weight)
            y[0, 0].item()
            best = min(best, time.perf_counter() - started)
        seconds[dtype] = best
    return (
        torch.bfloat16 if seconds[torch.bfloat16] * 1.2 < seconds[torch.float32] else torch.float32
    )


def _visible(positions: Tensor, n: int, window: int, dtype: torch.dtype) -> Tensor:
    """Added to scores, [G, 1, 1, N]: 0 for keys that queries at positions [G] see, else -inf."""
    keys, queries = torch.arange(n), positions[:, None]
    seen = keys <= queries
    if window:
        seen &= queries - keys < window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None, None]


def _attend(block: DecoderLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
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
    tokens = p.argmax(dim=-1)
    open_rows = list(range(len(lanes)))
    for _ in range(MAX_DRAWS):
        u = torch.tensor([lanes[i].random.random() for i in open_rows], device=device)
        mine = torch.tensor(open_rows, device=device)
        rows, sums = (p, cumulated) if len(open_rows) == len(lanes) else (p[mine], cumulated[mine])
        drawn = torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)
        drawn = drawn.clamp(max=p.shape[1] - 1)
        above = (rows * (rows > rows.gather(1, drawn))).sum(dim=-1)
        inside = above < top_p[mine]
        tokens[mine[inside]] = drawn[inside, 0]
        open_rows = mine[~inside].tolist()
        if not open_rows:
            break
    return tokens

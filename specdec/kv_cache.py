"""Keys and values of the tokens a model has read, one buffer a layer; states of recurrent layers.

Knows lengths and layouts, nothing about attention. Truncation moves a number; memory is taken in
steps so that a long context costs only what is used. A recurrent layer cannot be cut at any length:
it keeps one state for each row of the last forward, and truncation selects one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CacheError
from specdec.memory import trim_memory

GROWTH = 256
"""Rows by which the buffers grow."""
TRIMMED = 1 << 23
"""Bytes of replaced buffers from which memory is given back to the system."""
SPARE_STATES = 32
"""Dropped states of a layer whose memory is kept, as fresh pages cost more than their numbers."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Heads and widths of one layer's keys and values."""

    n_head_kv: int
    head_dim: int
    head_dim_v: int
    state: tuple[tuple[int, ...], ...] = ()
    """Shapes of what a recurrent layer carries from row to row; empty = not recurrent."""

    def describe(self) -> str:
        """Heads and widths in words, for messages."""
        return f"{self.n_head_kv} key/value heads of {self.head_dim} and {self.head_dim_v}"


State = tuple[Tensor, ...]
"""What a recurrent layer carries, float32; zeros before the first token."""


class KVCache:
    """Keys [Hkv, length, Dh] and values [Hkv, length, Dv] of every layer, preallocated in steps.

    One forward calls `append` once a layer and `advance` once at its end; rows past ``length`` are
    free to be overwritten. Recurrent layers keep the states after each row of the last forward and
    at least the ``n_states`` latest ones, and those at one checkpoint. Raises `CacheError` when a
    length cannot be reached.
    """

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        n_ctx: int,
        *,
        device: torch.device,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
        n_states: int = 1,
    ) -> None:
        self.n_ctx = n_ctx
        self.n_states = n_states
        self.length = 0
        self._keys = [
            torch.empty(s.n_head_kv, 0, s.head_dim, device=device, dtype=dtype_k) for s in shapes
        ]
        self._values = [
            torch.empty(s.n_head_kv, 0, s.head_dim_v, device=device, dtype=dtype_v) for s in shapes
        ]
        self._zeros: dict[int, State] = {
            layer: tuple(torch.zeros(size, device=device) for size in shape.state)
            for layer, shape in enumerate(shapes)
            if shape.state
        }
        self.prepared: dict[tuple[int, ...], Any] = {}
        """What a back end has made of the buffers' addresses; forgotten when one is replaced."""
        self._states: dict[int, dict[int, State]] = {}
        self._spare: dict[int, list[State]] = {}
        self._checkpoint = 0
        self._replaced = 0
        self._reset_states()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k [T, Hkv, Dh] and v [T, Hkv, Dv] behind the committed rows of one layer.

        Returns everything held, ([Hkv, length + T, Dh], [Hkv, length + T, Dv]), in the type of
        ``k`` and ``v``. Raises `CacheError` past ``n_ctx``.
        """
        end = self.length + k.shape[0]
        keys, values = self.reserve(layer, k.shape[0])
        keys[:, self.length : end] = k.transpose(0, 1)
        values[:, self.length : end] = v.transpose(0, 1)
        return keys[:, :end].to(k.dtype), values[:, :end].to(v.dtype)

    def reserve(self, layer: int, n: int) -> tuple[Tensor, Tensor]:
        """The buffers of one layer, with room for ``n`` rows behind the committed ones.

        Contiguous, [Hkv, capacity, Dh] and [Hkv, capacity, Dv]; for a back end that writes them
        itself. Raises `CacheError` past ``n_ctx``.
        """
        end = self.length + n
        if end > self.n_ctx:
            raise CacheError(f"cache: {end} rows do not fit the context of {self.n_ctx}")
        if end > self._keys[layer].shape[1]:
            self._grow(layer, end)
        return self._keys[layer], self._values[layer]

    def make_room(self, rows: int) -> None:
        """Has buffers for ``rows`` rows, up to ``n_ctx``, so that they need not grow on the way."""
        for layer, keys in enumerate(self._keys):
            if layer not in self._states and keys.shape[1] < min(rows, self.n_ctx):
                self._grow(layer, rows)

    def committed(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The committed rows of one layer, ([Hkv, length, Dh], [Hkv, length, Dv])."""
        return (
            self._keys[layer][:, : self.length].to(dtype),
            self._values[layer][:, : self.length].to(dtype),
        )

    def begin_pass(self) -> None:
        """Drops the states before the last ``n_states``; for the start of a forward."""
        for layer, states in self._states.items():
            old = [n for n in states if n <= self.length - self.n_states and n != self._checkpoint]
            for length in old:
                self._drop(layer, length)

    def checkpoint(self) -> None:
        """Keeps the states at this length, too, in place of the checkpoint before."""
        self._checkpoint = self.length

    def state(self, layer: int) -> State:
        """What a layer carries behind the committed rows, if anything; not to be written to."""
        return self._states[layer][self.length] if layer in self._states else ()

    def new_state(self, layer: int) -> State:
        """Memory for a state of a recurrent layer, perhaps that of one that was dropped.

        Its numbers are arbitrary. For a back end that writes states itself.
        """
        spare = self._spare.setdefault(layer, [])
        if spare:
            return spare.pop()
        return tuple(torch.empty_like(part) for part in self._zeros[layer])

    def put_state(self, layer: int, rows: int, state: State) -> None:
        """Keeps the state of a recurrent layer behind ``rows`` further rows."""
        self._states[layer][self.length + rows] = state

    def advance(self, n: int) -> None:
        """Commits the ``n`` rows appended to every layer since the last call."""
        self.length += n

    def reachable(self, length: int) -> int:
        """The greatest length up to ``length`` that `truncate` can reach; at worst 0."""
        length = min(length, self.length)
        for states in self._states.values():
            return max((n for n in states if n <= length), default=0)
        return length

    def truncate(self, length: int) -> None:
        """Forgets all rows from ``length`` on; costs nothing."""
        if not 0 <= length <= self.length:
            raise CacheError(f"cache: cannot truncate {self.length} rows to {length}")
        if self.reachable(length) < length:
            raise CacheError(
                f"cache: the recurrent state behind {length} of {self.length} rows is not kept; "
                "read the tokens again"
            )
        self.length = length
        if length == 0:
            self._reset_states()
        for layer, states in self._states.items():
            for later in [n for n in states if n > length]:
                self._drop(layer, later)

    def _drop(self, layer: int, length: int) -> None:
        state, spare = self._states[layer].pop(length), self._spare.get(layer)
        if spare is not None and len(spare) < SPARE_STATES and state is not self._zeros[layer]:
            spare.append(state)

    def _reset_states(self) -> None:
        self._states = {layer: {0: zeros} for layer, zeros in self._zeros.items()}

    def _grow(self, layer: int, rows: int) -> None:
        self.prepared.clear()
        capacity = min(self.n_ctx, max(-(-rows // GROWTH), 1) * GROWTH)
        for buffers in (self._keys, self._values):
            old = buffers[layer]
            new = old.new_zeros(old.shape[0], capacity, old.shape[2])
            new[:, : self.length] = old[:, : self.length]
            buffers[layer] = new
            self._replaced += old.numel() * old.element_size()
        if self._replaced >= TRIMMED:  # what layers free in turn is too scattered for the next one
            self._replaced = 0
            trim_memory()

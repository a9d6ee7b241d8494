"""Keys and values of the tokens a model has read, one buffer a layer.

Knows lengths and layouts, nothing about attention. Truncation moves a number; memory is taken in
steps so that a long context costs only what is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import CacheError

GROWTH = 256
"""Rows by which the buffers grow."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Heads and widths of one layer's keys and values."""

    n_head_kv: int
    head_dim: int
    head_dim_v: int


class KVCache:
    """Keys [Hkv, length, Dh] and values [Hkv, length, Dv] of every layer, preallocated in steps.

    One forward calls `append` once a layer and `advance` once at its end; rows past ``length`` are
    free to be overwritten. Raises `CacheError` when a length cannot be reached.
    """

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        n_ctx: int,
        *,
        device: torch.device,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
    ) -> None:
        self.n_ctx = n_ctx
        self.length = 0
        self._keys = [
            torch.empty(s.n_head_kv, 0, s.head_dim, device=device, dtype=dtype_k) for s in shapes
        ]
        self._values = [
            torch.empty(s.n_head_kv, 0, s.head_dim_v, device=device, dtype=dtype_v) for s in shapes
        ]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k [T, Hkv, Dh] and v [T, Hkv, Dv] behind the committed rows of one layer.

        Returns everything held, ([Hkv, length + T, Dh], [Hkv, length + T, Dv]), in the type of
        ``k`` and ``v``. Raises `CacheError` past ``n_ctx``.
        """
        end = self.length + k.shape[0]
        if end > self.n_ctx:
            raise CacheError(f"cache: {end} rows do not fit the context of {self.n_ctx}")
        if end > self._keys[layer].shape[1]:
            self._grow(layer, end)
        self._keys[layer][:, self.length : end] = k.transpose(0, 1)
        self._values[layer][:, self.length : end] = v.transpose(0, 1)
        return self._keys[layer][:, :end].to(k.dtype), self._values[layer][:, :end].to(v.dtype)

    def committed(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The committed rows of one layer, ([Hkv, length, Dh], [Hkv, length, Dv])."""
        return (
            self._keys[layer][:, : self.length].to(dtype),
            self._values[layer][:, : self.length].to(dtype),
        )

    def advance(self, n: int) -> None:
        """Commits the ``n`` rows appended to every layer since the last call."""
        self.length += n

    def truncate(self, length: int) -> None:
        """Forgets all rows from ``length`` on; costs nothing."""
        if not 0 <= length <= self.length:
            raise CacheError(f"cache: cannot truncate {self.length} rows to {length}")
        self.length = length

    def _grow(self, layer: int, rows: int) -> None:
        capacity = min(self.n_ctx, max(-(-rows // GROWTH), 1) * GROWTH)
        for buffers in (self._keys, self._values):
            old = buffers[layer]
            new = old.new_zeros(old.shape[0], capacity, old.shape[2])
            new[:, : self.length] = old[:, : self.length]
            buffers[layer] = new

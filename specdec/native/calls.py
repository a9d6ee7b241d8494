"""What the kernels are told about layers and their buffers, made once and used pass after pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from specdec.kv_cache import KVCache
from specdec.native.delta_net import add_states
from specdec.native.library import LayerCall, floats

if TYPE_CHECKING:
    from specdec.native.layer import NativeLayer

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, [rows, n_rot / 2] each."""


def layer_calls(
    layers: Sequence[NativeLayer],
    cache: KVCache,
    first: int,
    n: int,
    rotary: Sequence[Tables],
    offset: int = 0,
    *,
    keeps_every_state: bool = False,
) -> ctypes.Array[LayerCall]:
    """What is said about layers ``first`` ... for ``n`` rows behind the committed ones.

    ``rotary`` are the tables of each layer, whose rows ``offset`` ... are meant. The next call for
    the same layers changes the result. With ``keeps_every_state`` recurrent layers keep their state
    behind every row. Raises `CacheError` if the cache is full or of a type that the kernels do not
    know, ValueError if it, or a table, does not fit a layer.
    """
    key = id(layers[0]), first, len(layers)
    prepared: _PreparedCalls | None = cache.prepared.get(key)
    if prepared is None or prepared.capacity < cache.length + n:
        prepared = _PreparedCalls(layers, cache, first, n)
        cache.prepared[key] = prepared
    prepared.point_to(rotary, offset, n)
    for i in prepared.recurrent:
        call = prepared.calls[i]
        add_states(call, cache, first + i, n, keeps_every_state=keeps_every_state)
    return prepared.calls


class _PreparedCalls:
    """A `LayerCall` for each layer, with the addresses of a cache's buffers."""

    def __init__(self, layers: Sequence[NativeLayer], cache: KVCache, first: int, n: int) -> None:
        calls = [layer.call(cache, first + i, n) for i, layer in enumerate(layers)]
        self.capacity = min(call.capacity for call in calls)
        self.recurrent = [i for i, layer in enumerate(layers) if layer.is_recurrent]
        self.calls = (LayerCall * len(calls))(*calls)
        self._n_rot_max = np.array([2**31 if x.is_recurrent else x.spec.head_dim for x in layers])
        self._layers = layers  # the calls have their addresses, the key one's id
        words = np.frombuffer(memoryview(self.calls).cast("B"), np.int64).reshape(len(calls), -1)
        places = (LayerCall.cos.offset, LayerCall.sin.offset, LayerCall.n_rot.offset)
        self._columns = [words[:, place // words.itemsize] for place in places]

    def point_to(self, rotary: Sequence[Tables], offset: int, n: int) -> None:
        """Puts in the tables of ``n`` rows, which live as long as nothing else is put in."""
        self._rotary = rotary  # a module may make itself longer ones meanwhile
        kinds = {id(tables): tables for tables in rotary}
        found = {kind: _addresses(tables, offset, n) for kind, tables in kinds.items()}
        for i, column in enumerate(self._columns):
            if len(found) == 1:  # most models have one kind of layer
                column.fill(found[id(rotary[0])][i])
            else:
                column[:] = [found[id(tables)][i] for tables in rotary]
        n_rot = self._columns[-1]
        if (n_rot > self._n_rot_max).any():
            raise ValueError(f"rotary tables turn {n_rot.max()} dimensions, heads have fewer")


def _addresses(tables: Tables, offset: int, n: int) -> tuple[int, int, int]:
    """Those of rows ``offset`` ... of cosines and sines, ``n`` at least, and n_rot."""
    cos, sin = tables
    rows, width = cos.shape
    if rows < offset + n or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"expected contiguous rotary tables of {offset + n} rows, got {rows}")
    start = offset * width * cos.itemsize
    shape = (rows, width)
    return floats(cos, shape).data_ptr() + start, floats(sin, shape).data_ptr() + start, 2 * width

"""What the kernels are told about layers and their buffers, made once and used pass after pass."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
) -> LayerCalls:
    """What is said about layers ``first`` ... for ``n`` rows behind the committed ones.

    ``rotary`` are the tables of each layer, whose rows ``offset`` ... are meant. The next call for
    the same layers changes the result. With ``keeps_every_state`` recurrent layers keep their state
    behind every row. Raises `CacheError` if the cache is full or of a type that the kernels do not
    know, ValueError if it, or a table, does not fit a layer.
    """
    key = id(layers[0]), first, len(layers)
    prepared: LayerCalls | None = cache.prepared.get(key)
    if prepared is None or prepared.capacity < cache.length + n:
        prepared = LayerCalls(layers, cache, first, n)
        cache.prepared[key] = prepared
    prepared.point_to(rotary, offset, n)
    for i in prepared.recurrent:
        call = prepared.array[i]
        add_states(call, cache, first + i, n, keeps_every_state=keeps_every_state)
    return prepared


class LayerCalls:
    """A `LayerCall` for each layer, with the addresses of a cache's buffers."""

    def __init__(self, layers: Sequence[NativeLayer], cache: KVCache, first: int, n: int) -> None:
        calls = [layer.call(cache, first + i, n) for i, layer in enumerate(layers)]
        self.capacity = min(call.capacity for call in calls)
        self.recurrent = [i for i, layer in enumerate(layers) if layer.is_recurrent]
        self.array = (LayerCall * len(calls))(*calls)
        self.rotary_start = 0
        """The row of the tables that is the first one's."""
        self._rotary: tuple[Tables, ...] = ()
        self._n_rows = 0
        self._n_rot_max = [2**31 if x.is_recurrent else x.spec.head_dim for x in layers]
        self._layers = layers  # the calls have their addresses, the key one's id

    def point_to(self, rotary: Sequence[Tables], offset: int, n: int) -> None:
        """Puts in tables, rows ``offset`` ... of which are those of ``n`` rows.

        They live as long as nothing else is put in: a module may make itself longer ones meanwhile.
        """
        self.rotary_start = offset
        if len(rotary) == len(self._rotary) and all(map(operator.is_, rotary, self._rotary)):
            if offset + n <= self._n_rows:
                return
        kinds = {id(tables): tables for tables in rotary}
        found = {kind: _addresses(tables, offset + n) for kind, tables in kinds.items()}
        rows = [found[id(tables)] for tables in rotary]
        self._rotary, self._n_rows = (), min(tables[0].shape[0] for tables in kinds.values())
        for call, n_rot_max, (cos, sin, n_rot) in zip(
            self.array, self._n_rot_max, rows, strict=True
        ):
            if n_rot > n_rot_max:
                raise ValueError(f"rotary tables turn {n_rot} dimensions, heads have fewer")
            call.cos, call.sin, call.n_rot = cos, sin, n_rot
        self._rotary = tuple(rotary)


def _addresses(tables: Tables, n_rows: int) -> tuple[int, int, int]:
    """Those of cosines and sines, which have ``n_rows`` rows at least, and n_rot."""
    cos, sin = tables
    rows, width = cos.shape
    if rows < n_rows or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"expected contiguous rotary tables of {n_rows} rows, got {rows}")
    shape = (rows, width)
    return floats(cos, shape).data_ptr(), floats(sin, shape).data_ptr(), 2 * width

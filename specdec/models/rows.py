"""What keeps a row's numbers independent of the rows beside it.

Greedy text must not depend on how many drafted tokens share a pass. Sums and products are rounded
alike wherever they stand, but kernels for other functions take whole vectors of a tensor first and
the rest one by one, with another rounding, and several threads each have such a rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_BLOCK = 8
"""Rows of a pass whose numbers must not depend on how many rows share it (see `Rows.exact`)."""
VECTOR = 8
"""Columns in a multiple of which ``ROW_BLOCK`` rows fill whole vectors of any CPU."""
ONE_THREAD = 32768
"""Elements below which torch runs a function in one thread (its GRAIN_SIZE)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows one pass computes."""

    start: int
    """Position of the first row."""
    count: int
    """Rows that count; the pass may be padded with more."""
    exact: bool
    """Every row's numbers are to be those it would have alone, bit for bit, and recurrent layers
    keep their state behind every row. Torch layers attend row by row over exactly the visible keys
    for that, in passes with a fixed number of rows; for native ones numbers are never others."""


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each element of x [T, N]; up to `ROW_BLOCK` rows give the same bits each.

    Where one call could treat rows differently, each row has a call of its own.
    """
    is_whole = x.shape[-1] % VECTOR == 0 and x.numel() < ONE_THREAD
    if is_whole or not 1 < x.shape[0] <= ROW_BLOCK or x.device.type != "cpu":
        return function(x)
    return torch.stack([function(row) for row in x.unbind()])


def narrow_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] times weight [N, D] transposed, rows rounded alike also when N is tiny.

    Products with two or three columns treat rows differently by their place.
    """
    height = weight.shape[0]
    return F.linear(x, F.pad(weight, (0, 0, 0, -height % VECTOR)))[:, :height]

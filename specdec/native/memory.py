"""Memory for packed weights: few large pieces, in huge pages where the system has them.

A pass streams all weights. With pages of 4 kB a processor spends much of that time on looking up
where the next page is; with pages of 2 MB it need not.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PIECE = 128 << 20
"""Bytes that are asked for at a time; what is not used of them takes no memory."""
ALIGNMENT = 64


class WeightMemory:
    """Hands out memory that lives as long as the tensors in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, n_bytes: int) -> Tensor:
        """Uninitialised memory, uint8 [n_bytes], that starts at a multiple of `ALIGNMENT`."""
        size = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        if size > self._rest.numel():
            self._rest = _map(max(size, PIECE))
        taken, self._rest = self._rest[:n_bytes], self._rest[size:]
        return taken


def _map(n_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)

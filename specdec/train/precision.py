"""Number formats and memory that make a training fast on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator

import torch

SIZE = (512, 512, 1536)
"""Rows, inputs and outputs of the product that is timed."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt`."""


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it beats float32 clearly, which on CPUs depends on their instructions."""
    if device.type != "cpu":
        return torch.bfloat16
    return (
        torch.bfloat16
        if _seconds(torch.bfloat16) < 0.7 * _seconds(torch.float32)
        else (torch.float32)
    )


def _seconds(dtype: torch.dtype) -> float:
    """The best of a few products, so that other programs do not decide."""
    n_rows, n_in, n_out = SIZE
    x, weight = torch.ones(n_rows, n_in, dtype=dtype), torch.ones(n_out, n_in, dtype=dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - start)
    return min(times)


@contextlib.contextmanager
def fast_memory() -> Iterator[None]:
    """Keeps large temporaries instead of giving them back, and treats tiny numbers as zero.

    glibc unmaps every large block at once, which halves the speed of a step; numbers too small for
    a normal float32 cost many times as much as others, and count again when it is over.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library only is slower
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)

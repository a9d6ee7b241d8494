"""What the driver needs of MTP layers, whichever variant they are."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kv_cache import CacheShape, KVCache


class MTPModel(abc.ABC):
    """Reads committed tokens into a cache and predicts one token after another behind them.

    ``cache`` has the layers of `cache_shapes` and is at the length of the committed text.
    """

    taps: tuple[int, ...]
    """What it reads of the target; the last one is the final hidden state h."""
    n_max: int | None
    """The longest draft; None = any."""
    n_embd: int
    """D, the width of h."""
    cache_shapes: Sequence[CacheShape]
    device: torch.device

    @abc.abstractmethod
    def read(self, tokens: Tensor, taps: Tensor, before: Tensor, cache: KVCache) -> None:
        """Appends committed tokens [T] with their taps [T, n_taps, D].

        ``before`` [T, D] are the final states one position earlier, zeros before the first token.
        """

    @abc.abstractmethod
    def step(self, tokens: Tensor, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Logits [V] of the token behind ``tokens``, and the hidden output [D].

        ``tokens`` [s + 1] are the last token of the text and the s drafted ones; ``hidden``
        [s + 1, D] the final state before them and the hidden outputs of the s steps before. The
        caller cuts the cache back after the last step.
        """

"""Which tokens a draft knows: those that the target writes, by how often it does or might."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.tokenizer import Tokenizer

ROUND_TO = 32
LEAST_SHARE = 0.5
"""A vocabulary of at least this share of the target's is not worth a map."""


def pick_vocabulary(
    counts: Tensor, mass: Tensor, n_rows: int, required: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Target tokens of a draft's vocabulary, ascending; () = all of them.

    ``counts`` [V] is how often each token was written, ``mass`` [V] the sum of the target's
    probabilities for it; ties go to the lower id. ``required`` are in it whatever they score.
    """
    n_vocab = len(counts)
    if not n_rows or n_rows >= LEAST_SHARE * n_vocab:
        return ()
    score = counts.double() + mass
    score[list(required)] = torch.inf
    n_rows = max(ROUND_TO, n_rows // ROUND_TO * ROUND_TO)
    best = score.sort(descending=True, stable=True).indices[:n_rows]
    return tuple(best.sort().values.tolist())


def coverage(counts: Tensor, d2t: tuple[int, ...]) -> float:
    """Share of the tokens counted in ``counts`` [V] that a draft with this map can draft."""
    if not d2t:
        return 1.0
    return float(counts[list(d2t)].sum() / counts.sum().clamp(min=1))


def required_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens every draft should know: ends of a turn, single bytes and digits."""
    single = (id for id in range(tokenizer.n_vocab) if len(tokenizer.piece(id)) == 1)
    return tuple(dict.fromkeys((*sorted(tokenizer.end_tokens), *single)))

"""The infill filter: cautious choice between text and end in fill-in-the-middle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec.sampling.candidates import Candidates

_WIDTH = 256
"""Tokens compared with each other; the filter is meant to run behind top_k and top_p."""
_MIN_PROBABILITY = 0.2


def infill(
    candidates: Candidates, end_tokens: frozenset[int], token_bytes: Callable[[int], bytes]
) -> Candidates:
    """End tokens alone if they are likely enough, else the clearly preferred continuations.

    Tokens of which one begins with the other are merged into the likelier; then text below 0.2,
    and below 1 / (1 + texts left) of the rest, is removed. End tokens stay. If no text is left,
    the text ends. Works on the 256 best candidates.
    Source: llama.cpp's `llama_sampler_infill_apply`.
    """
    best = candidates.head(_WIDTH)
    order = best.in_order()
    ids = best.token_ids()[order].tolist()
    weights = best.probabilities()[order].tolist()
    ends = [token in end_tokens for token in ids]
    end_mass = sum(weight for weight, end in zip(weights, ends, strict=True) if end)
    if 3 * end_mass * len(ids) > 1 - end_mass:
        return best.take(np.sort(order[ends]))
    merged = _merge_prefixes([token_bytes(token) for token in ids], weights)
    kept = [i for i, weight in enumerate(merged) if ends[i] or weight >= _MIN_PROBABILITY]
    n_text = sum(not ends[i] for i in kept)
    if n_text == 0 and end_tokens:  # also if the filters before have removed the end tokens
        return _only(ids[kept[0]] if kept else min(end_tokens))
    if n_text == 0:
        return best.head(1)
    floor = sum(merged[i] for i in kept) / (n_text + 1)
    return best.take(np.sort(order[[i for i in kept if ends[i] or merged[i] >= floor]]))


def _merge_prefixes(texts: list[bytes], weights: list[float]) -> list[float]:
    """Weights in which a text and another that begins with it share one entry; the other is 0."""
    merged = list(weights)
    gone = [False] * len(texts)
    for i, prefix in enumerate(texts):
        for j, text in enumerate(texts):
            if gone[i] or not prefix:
                break
            if i == j or gone[j] or not text.startswith(prefix):
                continue
            into, out = (j, i) if merged[j] > merged[i] else (i, j)
            merged[into] += merged[out]
            merged[out] = 0.0
            gone[out] = True
    return merged


def _only(token: int) -> Candidates:
    return Candidates(np.zeros(1, np.float32), np.array([token]))

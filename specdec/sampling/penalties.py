"""Filters that look at the text so far: repetition, presence and frequency, DRY; and logit bias.

The text is the prompt and every accepted token. Nothing is counted ahead: each call reads its
window from the end of the text, so a draft that is not accepted leaves no trace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specdec.sampling.candidates import Candidates, Floats

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""First token of a sequence breaker -> the tokens that may follow; () = breaks by itself."""

_MAX_BREAKER_BYTES = 40
_MAX_BREAKER_TAIL = 20
_LARGEST_EXPONENT = 88.7228391  # ln of the largest float32


def add_bias(candidates: Candidates, bias: Mapping[int, float]) -> Candidates:
    """Logits with ``bias`` added to single tokens; minus infinity bans a token."""
    return _change(candidates, bias, lambda logits, values: logits + values)


def penalties(
    candidates: Candidates,
    window: Sequence[int],
    *,
    repeat: float,
    frequency: float,
    presence: float,
) -> Candidates:
    """Logits lowered for the tokens in ``window``, the last tokens of the text.

    l = l * repeat if l <= 0 else l / repeat (Keskar et al. 2019, arXiv:1909.05858, with the usual
    repair for negative logits); then l -= count * frequency + presence.
    """

    def penalise(logits: Floats, counts: Floats) -> Floats:
        with np.errstate(over="ignore", divide="ignore"):  # the draw refuses what is not finite
            scaled = np.where(logits <= 0, logits * repeat, logits / repeat)
        lowered: Floats = scaled - (counts * frequency + presence)
        return lowered

    return _change(candidates, Counter(window), penalise)


def dry(
    candidates: Candidates,
    window: Sequence[int],
    breakers: Breakers,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
) -> Candidates:
    """Logits lowered for each token that would extend a repetition within ``window``.

    l -= multiplier * base^(length - allowed_length) where the last ``length`` tokens of the window,
    at least ``allowed_length``, have occurred before and were then followed by the token. A
    breaker ends the look-back; tokens that are breakers themselves are exempt.
    Source: llama.cpp's `llama_sampler_dry_apply`, after koboldcpp's DRY.
    """
    lengths = _repeat_lengths(window, breakers, allowed_length)
    largest = int(_LARGEST_EXPONENT / math.log(base)) if base > 1.000001 else 0
    amounts = {
        token: multiplier * base ** min(length - allowed_length, largest)
        for token, length in lengths.items()
        if () not in breakers.get(token, ())
    }
    return _change(candidates, amounts, lambda logits, values: logits - values)


def _repeat_lengths(window: Sequence[int], breakers: Breakers, allowed: int) -> dict[int, int]:
    """Token -> length of the longest repetition, at least ``allowed``, that it would extend."""
    if len(window) <= allowed:
        return {}
    limit = _look_back(window, breakers)
    if limit < allowed:
        return {}
    newest_first = window[::-1]
    lengths: dict[int, int] = {}
    for distance, common in enumerate(_common_prefixes(newest_first)):
        length = min(common, limit)
        if distance > 0 and length >= allowed:
            follower = newest_first[distance - 1]
            lengths[follower] = max(length, lengths.get(follower, length))
    return lengths


def _look_back(window: Sequence[int], breakers: Breakers) -> int:
    """How many tokens stand behind the last sequence breaker; all if there is none."""
    for age in range(len(window)):
        start = len(window) - 1 - age
        tails = [
            len(tail)
            for tail in breakers.get(window[start], ())
            if tuple(window[start + 1 : start + 1 + len(tail)]) == tail
        ]
        if tails:
            return age - max(tails)
    return len(window)


def _common_prefixes(tokens: Sequence[int]) -> list[int]:
    """z[i] = length of the longest common prefix of ``tokens`` and ``tokens[i:]`` (Z-algorithm)."""
    n = len(tokens)
    z = [n] + [0] * (n - 1)
    left = right = 0
    for i in range(1, n):
        length = min(z[i - left], right - i) if i < right else 0
        while i + length < n and tokens[length] == tokens[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z


def find_breakers(
    texts: Sequence[str],
    *,
    n_vocab: int,
    encode: Callable[[str], Sequence[int]],
    token_bytes: Callable[[int], bytes],
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Every way the tokens of a vocabulary can spell one of the sequence breakers ``texts``.

    A token that contains a breaker is one by itself; a token that ends with its beginning is one
    together with the tokens of the rest. Breakers count up to 40 bytes, rests up to 20 tokens;
    empty ones are left out (llama.cpp's `llama_sampler_init_dry`).
    """
    found: dict[int, dict[tuple[int, ...], None]] = {}
    wanted = [text.encode()[:_MAX_BREAKER_BYTES] for text in texts if text]
    tails: dict[bytes, tuple[int, ...]] = {b"": ()}
    for token in range(n_vocab if wanted else 0):
        piece = token_bytes(token)
        for breaker in wanted:
            for rest in _rests(piece, breaker):
                if rest not in tails:
                    tokens = encode(rest.decode(errors="ignore"))
                    tails[rest] = tuple(tokens[:_MAX_BREAKER_TAIL])
                found.setdefault(token, {})[tails[rest]] = None
    return {token: tuple(rests) for token, rests in found.items()}


def _rests(piece: bytes, breaker: bytes) -> list[bytes]:
    """What is missing of ``breaker`` behind ``piece``, for each way in which it begins there."""
    if breaker in piece:
        return [b""]
    longest = min(len(piece), len(breaker) - 1)
    return [breaker[n:] for n in range(longest, 0, -1) if piece.endswith(breaker[:n])]


def _change(
    candidates: Candidates,
    values: Mapping[int, float],
    change: Callable[[Floats, Floats], Floats],
) -> Candidates:
    """Candidates with ``change(logits, values)`` for the tokens named in ``values``."""
    if not values:
        return candidates
    tokens = np.fromiter(values, np.int64, len(values))
    amounts = np.fromiter(values.values(), np.float32, len(values))
    positions, found = candidates.positions_of(tokens)
    logits = candidates.logits.copy()
    logits[positions] = change(logits[positions], amounts[found])
    return candidates.with_logits(logits)

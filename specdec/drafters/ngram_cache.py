"""ngram-cache: counts which token followed the last one to four tokens, in three tables.

*context* counts the text of this request, *dynamic* comes from earlier runs, *static* from a
corpus. Rules, limits and file format are llama.cpp's `common/ngram-cache.cpp`, used the way its
`llama-lookup` does: every token of the text is counted once, with all n-grams before it, and the
dynamic file is written back at the end (`NgramCache.save`). A request starts with an empty context
table, so it does not depend on the requests before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.drafters.ngram import Tokens
from specdec.drafters.selection import DraftContext
from specdec.errors import ModelFileError, UsageError
from specdec.folders import write_whole
from specdec.options import SamplingOptions

Counts = dict[tuple[int, ...], dict[int, int]]
"""N-gram -> next token -> how often. Equal counts: the token seen first wins."""

N_DRAFT = 8
"""Longest draft; fixed in llama.cpp's server."""
N_LONGEST = 4
N_STATIC = 2
UNUSED = -1
"""Fills up n-grams shorter than `N_LONGEST` in a file."""
MAX_COUNT = 2**31 - 1


class Limits(NamedTuple):
    """What the counts after n tokens must reach, by n = 1 ... 4."""

    samples: tuple[int, ...]
    percent: tuple[int, ...]


LAX = Limits((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = Limits((4, 3, 2, 2), (75, 66, 66, 66))


def count(table: Counts, text: Sequence[int], position: int) -> None:
    """Counts ``text[position]`` after each of the n-grams that end before it."""
    token = text[position]
    for n in range(1, min(N_LONGEST, position) + 1):
        after = table.setdefault(tuple(text[position - n : position]), {})
        after[token] = after.get(token, 0) + 1


def uncount(table: Counts, text: Sequence[int], position: int) -> None:
    """Undoes the last `count`; the order of the others stays."""
    token = text[position]
    for n in range(1, min(N_LONGEST, position) + 1):
        ngram = tuple(text[position - n : position])
        after = table[ngram]
        after[token] -= 1
        if not after[token]:
            del after[token]
        if not after:
            del table[ngram]


def merge(table: Counts, other: Counts) -> Counts:
    """A new table with the counts of both."""
    merged = {ngram: dict(after) for ngram, after in table.items()}
    for ngram, after in other.items():
        into = merged.setdefault(ngram, {})
        for token, number in after.items():
            into[token] = into.get(token, 0) + number
    return merged


def find_next(
    table: Counts, limits: Limits, text: Sequence[int], static: Mapping[int, int]
) -> int | None:
    """The token that ``table`` expects after ``text``, trying the longest n-gram first.

    ``static`` weighs the tokens: 100 times its count for those it has, 1 for the others.
    """
    for n in range(min(N_LONGEST, len(text)), 0, -1):
        after = table.get(tuple(text[-n:]))
        if after is None:
            continue
        best = max(after, key=lambda token: after[token] * _weight(static, token))
        total = sum(after.values())
        if total >= limits.samples[n - 1] and 100 * after[best] >= limits.percent[n - 1] * total:
            return best
    return None


def _weight(static: Mapping[int, int], token: int) -> int:
    return 100 * static[token] if token in static else 1


def find_static(static: Mapping[int, int]) -> int | None:
    """The token that the static counts alone are sure of."""
    if not static:
        return None
    best = max(static, key=lambda token: static[token])
    total = sum(static.values())
    enough = total >= LAX.samples[N_STATIC - 1]
    return best if enough and 100 * static[best] >= LAX.percent[N_STATIC - 1] * total else None


class NgramCache:
    """Drafts up to `N_DRAFT` tokens; what requests teach goes to ``dynamic_path`` at `save`."""

    name = "ngram-cache"
    taps: tuple[int, ...] = ()
    n_max = N_DRAFT

    def __init__(self, static: Counts, dynamic: Counts, dynamic_path: Path | None = None) -> None:
        self.static = static
        self.dynamic = dynamic
        self.dynamic_path = dynamic_path
        self.learned: Counts = {}
        """What all requests have added to ``dynamic``, shared by copies of the drafter."""
        self._text: list[int] = []
        self._context: Counts = {}

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        self._text = self._text[:kept]
        self._context = {}
        for position in range(len(self._text)):
            count(self._context, self._text, position)
        return len(self._text)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        start = len(self._text)
        self._text += tokens.tolist()
        for position in range(start, len(self._text)):
            count(self._context, self._text, position)
            if self.dynamic_path is not None:
                count(self.learned, self._text, position)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`; ``last_token`` counts as part of the text."""
        text = [*self._text[-N_LONGEST:], last_token]
        if len(text) < N_STATIC:
            return Draft(end="no match")
        position = len(text) - 1
        count(self._context, text, position)
        length = min(N_DRAFT, room)
        drafted: list[int] = []
        while len(drafted) < length:
            token = self._next(text)
            if token is None:
                break
            drafted.append(token)
            text.append(token)
        uncount(self._context, text, position)
        if len(drafted) < length:
            return Draft(drafted, end="no match")
        return Draft(drafted, end="n_max" if length == N_DRAFT else "room")

    def accept(self, accepted: int) -> None:
        """Learns nothing from it; the text comes by `observe`."""

    def save(self) -> None:
        """Writes dynamic and learned counts to the dynamic file, if there is one and news for it.

        Raises `ModelFileError` when it cannot be written; the old file is then untouched.
        """
        if self.dynamic_path is not None and self.learned:
            save_counts(self.dynamic_path, merge(self.dynamic, self.learned))

    def _next(self, text: Sequence[int]) -> int | None:
        static = self.static.get(tuple(text[-N_STATIC:]), {})
        token = find_next(self._context, LAX, text, static)
        if token is None:
            token = find_next(self.dynamic, STRICT, text, static)
        return find_static(static) if token is None else token


def load_counts(path: Path, n_vocab: int) -> Counts:
    """The table in a lookup cache file; the first of equal records or tokens counts.

    Records until the end of the file, 32-bit integers in native order: four token ids (unused ones
    -1), the number of entries, then as many pairs (token id, count). Raises `ModelFileError`.
    """
    try:
        if path.stat().st_size % 4:
            raise _damaged(path, f"{path.stat().st_size} bytes are no whole number of integers")
        words = np.fromfile(path, dtype=np.int32)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read lookup cache: {error.strerror}") from error
    table: Counts = {}
    position, n_head = 0, N_LONGEST + 1
    while position < len(words):
        head = words[position : position + n_head].tolist()
        position += n_head
        n_entries = head[-1] if len(head) == n_head else 0
        if not 0 < n_entries <= (len(words) - position) // 2:
            raise _damaged(
                path,
                f"record at byte {4 * (position - n_head)} has {n_entries} entries, "
                f"expected 1 to {max(len(words) - position, 0) // 2}",
            )
        entries = words[position : position + 2 * n_entries].reshape(-1, 2)
        position += 2 * n_entries
        _check_entries(path, entries[:, 0], entries[:, 1], n_vocab)
        after = table.setdefault(_read_ngram(path, head[:N_LONGEST], n_vocab), {})
        if not after:
            for token, number in entries.tolist():
                after.setdefault(token, number)
    return table


def save_counts(path: Path, table: Counts) -> None:
    """Writes a lookup cache file under a temporary name first. Raises `ModelFileError`."""
    words: list[int] = []
    for ngram, after in table.items():
        words += [*ngram, *[UNUSED] * (N_LONGEST - len(ngram)), len(after)]
        for token, number in after.items():
            words += (token, min(number, MAX_COUNT))
    try:
        write_whole(path, np.array(words, dtype=np.int32).tobytes())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot write lookup cache: {error.strerror}") from error


def _read_ngram(path: Path, tokens: list[int], n_vocab: int) -> tuple[int, ...]:
    n = tokens.index(UNUSED) if UNUSED in tokens else N_LONGEST
    ngram = tuple(tokens[:n])
    padded = all(token == UNUSED for token in tokens[n:])
    if not (n and padded and all(0 <= token < n_vocab for token in ngram)):
        raise _damaged(path, f"{tokens} is no n-gram of a vocabulary of {n_vocab} tokens")
    return ngram


def _check_entries(path: Path, tokens: Tokens, counts: Tokens, n_vocab: int) -> None:
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        bad = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise _damaged(path, f"token {bad} is not in the vocabulary of {n_vocab} tokens")
    if counts.min() <= 0:
        raise _damaged(path, f"count {int(counts.min())}, expected at least 1")


def _damaged(path: Path, fact: str) -> ModelFileError:
    return ModelFileError(
        f"{path}: not a lookup cache of this model: {fact}; delete it or give another file"
    )


def build(context: DraftContext) -> NgramCache:
    """The drafter of the options, its files read and checked. A dynamic file may be missing.

    Raises `UsageError` if the dynamic file could not be written at the end.
    """
    options = context.spec.ngram_cache
    path = options.dynamic_path
    if path is not None and not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"--lookup-cache-dynamic: cannot write {path}: its folder is not there or not writable"
        )
    n_vocab = context.target.config.n_vocab
    static: Counts = {}
    dynamic: Counts = {}
    if options.static_path is not None:
        static = load_counts(options.static_path, n_vocab)
    if options.dynamic_path is not None and options.dynamic_path.exists():
        dynamic = load_counts(options.dynamic_path, n_vocab)
    return NgramCache(static, dynamic, options.dynamic_path)

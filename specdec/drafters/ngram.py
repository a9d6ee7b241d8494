"""ngram-simple, ngram-map-k and ngram-map-k4v: drafts copied from the text itself.

The newest n tokens are the *key*; the drafters look for an earlier place with the same n tokens and
propose what followed there. The rules are llama.cpp's `common/ngram-map.cpp`, odd corners included
(see the classes), because a user's acceptance depends on them; the searches are vectorised.

llama.cpp fixes the prompt's length when a request begins. Here `begin` comes before the prompt, so
that length is the number of tokens observed at the first `draft` after it: exactly what the
reference loop `speculative-simple` passes, the prompt without its last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.drafters.selection import DraftContext
from specdec.options import SamplingOptions

Tokens = NDArray[np.int32]

INDEX_SIZE = 262144
"""Slots of the index from a key's hash to a position."""
HASH_FACTOR = 2654435761
MAX_COUNT = 16380
"""Where hits and value counts stop growing."""
N_VALUES = 4
"""Values that ngram-map-k4v tells apart per key."""


class History:
    """The observed tokens of one request, as an array that grows."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        self._buffer = np.empty(0, np.int32) if tokens is None else tokens.copy()
        self._length = len(self._buffer)

    @property
    def tokens(self) -> Tokens:
        """All of them, [L] int32; a view that later `extend` calls do not change."""
        return self._buffer[: self._length]

    def extend(self, tokens: Tensor) -> None:
        """Appends tokens [T]."""
        end = self._length + tokens.shape[0]
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = tokens.cpu().numpy()
        self._length = end


def find_matches(history: Tokens, key: Tokens, low: int, high: int) -> NDArray[np.int64]:
    """All positions j in low ... high with ``history[j : j + n] == key``, ascending."""
    n = len(key)
    found = np.flatnonzero(history[low + n - 1 : high + n] == key[-1]) + low
    for offset in range(n - 2, -1, -1):
        if not found.size:
            break
        found = found[history[found + offset] == key[offset]]
    return found


def last_match(history: Tokens, key: Tokens, low: int, high: int) -> int:
    """The highest such position; 0, which is never a match, if there is none."""
    width = 1024
    while high >= low:
        start = max(low, high - width + 1)
        found = find_matches(history, key, start, high)
        if found.size:
            return int(found[-1])
        high, width = start - 1, 4 * width
    return 0


def make_key(history: Tokens, last_token: int, n: int) -> Tokens:
    """The newest n tokens of the text, ``last_token`` included."""
    return np.append(history[len(history) - n + 1 :], np.int32(last_token))


def _copy(history: Tokens, start: int, length: int, room: int) -> Draft:
    end = "room" if room < length else "n_max"
    return Draft(history[start : start + min(length, room)].tolist(), end=end)


class NgramSimple:
    """Copies what followed the most recent occurrence of the key, if it is at least n tokens."""

    name = "ngram-simple"
    taps: tuple[int, ...] = ()

    def __init__(self, size_n: int, size_m: int) -> None:
        self.size_n = size_n
        self.n_max = size_m
        self._history = History()

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        self._history = History(self._history.tokens[:kept])
        return len(self._history.tokens)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self._history.extend(tokens)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`; too short a history is searched for nothing."""
        history, n = self._history.tokens, self.size_n
        length = len(history)
        if length <= n + self.n_max + 1:
            return Draft(end="no match")
        match = last_match(history, make_key(history, last_token, n), 1, length - n - 1)
        if not match:
            return Draft(end="no match")
        available = min(self.n_max, length - (match + n))
        if available < n:
            return Draft(end="n_min")
        return _copy(history, match + n, available, room)

    def accept(self, accepted: int) -> None:
        """Learns nothing from it."""


@dataclass(slots=True)
class Value:
    """One continuation of a key."""

    n_accepted: int
    """Tokens accepted the last time it was drafted; m before that."""
    start: int = 0
    """Position of its first token; 0 = a free slot."""
    count: int = 0


@dataclass(slots=True)
class Record:
    """What is remembered about one key."""

    values: list[Value]
    hits: int = 0
    counted_to: int = 0
    """Position of the key's occurrence up to which values have been counted."""


@dataclass(slots=True)
class MapState:
    """The state of one request."""

    history: History
    index: NDArray[np.int32] = field(default_factory=lambda: np.zeros(INDEX_SIZE, np.int32))
    """Hash of n tokens -> a position; 0 = empty."""
    indexed_to: int = 0
    """The highest indexed position."""
    n_prompt: int | None = None
    """Tokens observed at the first draft."""
    records: dict[bytes, Record] = field(default_factory=dict)
    """Key tokens -> record."""
    drafted: Value | None = None
    """The value whose length limited the last draft."""


class NgramMap:
    """ngram-map-k: finds the key by an index and drafts no more than was accepted the last time.

    As in llama.cpp, a key whose draft failed completely never drafts again, the last n + m
    positions of the prompt are neither searched nor indexed, and `min-hits` plays no part. Nothing
    is remembered from one request to the next.
    """

    name = "ngram-map-k"
    taps: tuple[int, ...] = ()

    def __init__(self, size_n: int, size_m: int) -> None:
        self.size_n = size_n
        self.n_max = size_m
        self._state = MapState(History())

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        self._state = MapState(History(self._state.history.tokens[:kept]))
        return len(self._state.history.tokens)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self._state.history.extend(tokens)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`."""
        state = self._state
        state.drafted = None
        history = state.history.tokens
        if state.n_prompt is None:
            state.n_prompt = len(history)
        if len(history) < 2 * self.size_n + self.n_max:
            return Draft(end="no match")
        key = make_key(history, last_token, self.size_n)
        match = self._find(history, key)
        self._index(history)
        if not match:
            return Draft(end="no match")
        record = state.records.get(key.tobytes())
        if record is None:
            record = Record([Value(self.n_max) for _ in range(N_VALUES)])
            state.records[key.tobytes()] = record
        record.hits = min(record.hits + 1, MAX_COUNT)
        state.drafted = self._choose(record, key, match)
        if state.drafted is None:
            return Draft(end="no match")
        length = min(self.n_max, state.drafted.n_accepted)
        return _copy(history, match + self.size_n, length, room)

    def accept(self, accepted: int) -> None:
        """From now on this key drafts ``accepted`` tokens at most."""
        if self._state.drafted is not None:
            self._state.drafted.n_accepted = accepted

    def _choose(self, record: Record, key: Tokens, match: int) -> Value | None:
        """The value that says how long the draft may be; None = no draft."""
        return record.values[0]

    def _find(self, history: Tokens, key: Tokens) -> int:
        """Position of an earlier occurrence of the key, 0 if none is known."""
        state, end = self._state, self._end(len(history))
        slot = _hash(key) % INDEX_SIZE
        position = int(state.index[slot])
        if 0 < position < end and np.array_equal(history[position : position + len(key)], key):
            return position
        for low, high in self._new_positions(end):
            match = last_match(history, key, low, high)
            if match:
                return match
        return 0

    def _index(self, history: Tokens) -> None:
        """Enters the positions that are new; the first position to claim a slot keeps it."""
        state, end = self._state, self._end(len(history))
        for low, high in self._new_positions(end):
            if high < low:
                continue
            slots = _hashes(history, low, high, self.size_n) % INDEX_SIZE
            free = np.flatnonzero(state.index[slots] == 0)
            # Ascending, so that among equal slots the highest position, written last, remains.
            state.index[slots[free]] = free + low
        state.indexed_to = max(state.indexed_to, end)

    def _end(self, length: int) -> int:
        """The last position that is followed by n + m tokens and one more."""
        return length - self.size_n - self.n_max - 1

    def _new_positions(self, end: int) -> Sequence[tuple[int, int]]:
        """The ranges (lowest, highest) not indexed yet: of the prompt, then of the reply."""
        state = self._state
        assert state.n_prompt is not None
        return (
            (state.indexed_to + 1, self._end(state.n_prompt)),
            (max(state.n_prompt, state.indexed_to) + 1, end),
        )


class NgramMap4V(NgramMap):
    """ngram-map-k4v: counts up to four continuations of a key and drafts only a clear favourite.

    As in llama.cpp, the draft is what followed at the position found, while the favourite only sets
    its length; and that position is counted once more at every look-up.
    """

    name = "ngram-map-k4v"

    def __init__(self, size_n: int, size_m: int, min_hits: int) -> None:
        super().__init__(size_n, size_m)
        self.min_hits = min_hits

    def _choose(self, record: Record, key: Tokens, match: int) -> Value | None:
        if record.hits < self.min_hits:
            return None
        history = self._state.history.tokens
        for position in find_matches(history, key, record.counted_to, match).tolist():
            self._count(record, history, position + self.size_n)
        record.counted_to = match
        best = max(record.values, key=lambda value: value.count)
        others = sum(value.count for value in record.values) - best.count
        return None if others and best.count < 2 * others else best

    def _count(self, record: Record, history: Tokens, start: int) -> None:
        """Counts the value at ``start``: an equal known one, or a new one if a slot is free."""
        text = history[start : start + self.n_max]
        for value in record.values:
            if value.start == 0:
                value.start = start
            known = history[value.start : value.start + self.n_max]
            if np.array_equal(known, text):
                value.count = min(value.count + 1, MAX_COUNT)
                return


def _hash(key: Tokens) -> int:
    value = 0
    for token in key.tolist():
        value = (value * HASH_FACTOR + token) & 0xFFFFFFFF
    return value


def _hashes(history: Tokens, low: int, high: int, n: int) -> NDArray[np.uint32]:
    """`_hash` of the n tokens at each of the positions low ... high."""
    unsigned = history.view(np.uint32)
    values = np.zeros(high - low + 1, np.uint32)
    for offset in range(n):
        values = values * np.uint32(HASH_FACTOR) + unsigned[low + offset : high + offset + 1]
    return values


def build_simple(context: DraftContext) -> NgramSimple:
    """The ngram-simple drafter of the options."""
    options = context.spec.ngram_simple
    return NgramSimple(options.size_n, options.size_m)


def build_map_k(context: DraftContext) -> NgramMap:
    """The ngram-map-k drafter of the options."""
    options = context.spec.ngram_map_k
    return NgramMap(options.size_n, options.size_m)


def build_map_k4v(context: DraftContext) -> NgramMap4V:
    """The ngram-map-k4v drafter of the options."""
    options = context.spec.ngram_map_k4v
    return NgramMap4V(options.size_n, options.size_m, options.min_hits)

"""ngram-mod: one hash table from n tokens to the token that followed, shared by all requests.

The table has no keys: two n-grams with the same hash overwrite each other, and a look-up believes
what it finds. Reference: llama.cpp's `common/ngram-mod.cpp`. Its table adds a prompt when a request
begins; here that is done by the first `draft`, when the prompt has been observed.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.drafters.ngram import History, Tokens, make_key
from specdec.drafters.selection import DraftContext
from specdec.options import NgramModOptions, SamplingOptions

log = logging.getLogger(__name__)

TABLE_SIZE = 4 * 1024 * 1024
HASH_FACTOR = 6364136223846793005
MASK = 2**64 - 1

MAX_FILL = 0.25
"""A fuller table is emptied when a request begins."""
ADD_EVERY = 32
"""Tokens of the reply are added to the table when so many have come together."""
LOW_ACCEPTANCE = 0.25
MAX_LOW = 5
"""So many drafts in a row with a lower acceptance empty the table."""
SHORT_MATCH = 16


class NgramTable:
    """The successor of n tokens, by their hash. Takes its 16 MiB when the first one is added."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.used = 0
        """Slots that are not empty."""
        self._entries: NDArray[np.int32] | None = None  # token + 1; 0 = empty

    def add(self, history: Tokens, low: int, high: int) -> None:
        """Adds the n-grams at positions low ... high - 1; later ones overwrite earlier ones."""
        if high <= low:
            return
        if self._entries is None:
            self._entries = np.zeros(TABLE_SIZE, np.int32)
        values = np.zeros(high - low, np.uint64)
        for offset in range(self.n):
            values = values * np.uint64(HASH_FACTOR) + history[low + offset : high + offset].astype(
                np.uint64
            )
        slots = values % np.uint64(TABLE_SIZE)
        self.used += len(np.unique(slots[self._entries[slots] == 0]))
        self._entries[slots] = history[low + self.n : high + self.n] + 1

    def chain(self, window: Tokens, limit: int) -> list[int]:
        """Up to ``limit`` tokens, each the successor of the n before it."""
        if self._entries is None:
            return []
        text: list[int] = window.tolist()
        value = 0
        for token in text:
            value = (value * HASH_FACTOR + token) & MASK
        oldest_factor = pow(HASH_FACTOR, self.n, 2**64)
        for step in range(limit):
            successor = int(self._entries[value % TABLE_SIZE]) - 1
            if successor < 0:
                break
            text.append(successor)
            value = (value * HASH_FACTOR + successor - text[step] * oldest_factor) & MASK
        return text[self.n :]

    def clear(self) -> None:
        """Forgets everything."""
        self._entries = None
        self.used = 0


class NgramMod:
    """Drafts chains of the table of at least `n_min` tokens.

    As in llama.cpp, a table that got too full is emptied together with the prompt just added, and
    the count of failures goes on from request to request. Copies of a drafter share the table.
    """

    name = "ngram-mod"
    taps: tuple[int, ...] = ()

    def __init__(self, options: NgramModOptions) -> None:
        self.options = options
        self.n_max = options.n_max
        self.table = NgramTable(options.n_match)
        self._n_low = 0
        self._history = History()
        self._added: int | None = None  # n-grams in the table; None before a request's first draft
        self._drafted = 0

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`; the table stays."""
        self._history = History(self._history.tokens[:kept])
        self._added = None
        self._drafted = 0
        return len(self._history.tokens)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """See `Drafter.observe`."""
        self._history.extend(tokens)

    def draft(self, last_token: int, room: int) -> Draft:
        """See `Drafter.draft`; the chain is followed past ``room``, its length decides."""
        history, n = self._history.tokens, self.table.n
        if self._added is None:
            self._add_prompt(history)
        if len(history) < n:
            return Draft(end="no match")
        self._add_reply(history)
        tokens = self.table.chain(make_key(history, last_token, n), self.n_max)
        self._drafted = len(tokens)
        if len(tokens) < min(self.options.n_min, self.n_max):
            return Draft(end="n_min" if tokens else "no match")
        if len(tokens) > room:
            return Draft(tokens[:room], end="room")
        return Draft(tokens, end="n_max" if len(tokens) == self.n_max else "no match")

    def accept(self, accepted: int) -> None:
        """Empties the table after `MAX_LOW` bad drafts in a row; ``room`` does not excuse them."""
        if accepted >= LOW_ACCEPTANCE * self._drafted:
            self._n_low = 0
            return
        self._n_low += 1
        if self._n_low == MAX_LOW:
            log.warning("%s: low acceptance %d times in a row; table emptied", self.name, MAX_LOW)
            self.table.clear()
            self._n_low = 0
            self._added = 0

    def _add_prompt(self, history: Tokens) -> None:
        self._added = max(len(history) - self.table.n, 0)
        self.table.add(history, 0, self._added)
        if self.table.used > MAX_FILL * TABLE_SIZE:
            log.warning("%s: the table is over %.0f %% full; emptied", self.name, MAX_FILL * 100)
            self.table.clear()

    def _add_reply(self, history: Tokens) -> None:
        assert self._added is not None
        if self._added + ADD_EVERY < len(history):
            self.table.add(history, self._added, len(history) - self.table.n)
            self._added = len(history) - self.table.n


def build(context: DraftContext) -> NgramMod:
    """The ngram-mod drafter of the options."""
    options = context.spec.ngram_mod
    if options.n_match < SHORT_MATCH:
        log.warning(
            "--spec-ngram-mod-n-match %d: matches shorter than %d tokens give poor drafts",
            options.n_match,
            SHORT_MATCH,
        )
    return NgramMod(options)

"""SentencePiece tokenization by merging the best-scored pair (llama.cpp's `llm_tokenizer_spm`).

Of all neighbouring symbols whose concatenation is a token, the pair with the highest score is
merged first, the leftmost of equals; what is no token in the end is written as bytes. The
`tokenizers` package ranks pairs instead of results and so breaks ties between two ways to the same
token differently.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence

SPACE = "▁"  # U+2581 stands for a space in the vocabulary
CACHE_SIZE = 1 << 16  # words remembered with their ids

_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_SPACE_INSIDE = re.compile(f"[^{SPACE}]{SPACE}")


class SentencePieceEncoder:
    """Text to ids for a vocabulary with scores; special tokens are not its business."""

    def __init__(
        self, ids_by_text: Mapping[str, int], scores: Sequence[float], unknown_id: int | None
    ) -> None:
        self._ids_by_text = ids_by_text
        self._scores = scores
        self._unknown = [] if unknown_id is None else [unknown_id]
        self._cache: dict[str, list[int]] = {}
        # If no token spans a word boundary, no merge does: words can be done one by one.
        self._spans_words = any(
            _SPACE_INSIDE.search(text) for text in ids_by_text if SPACE in text[1:]
        )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, spaces included as they are (no prefix is added)."""
        escaped = text.replace(" ", SPACE)
        if self._spans_words:
            return self._merge(escaped)
        ids: list[int] = []
        for word in _WORD.findall(escaped):
            known = self._cache.get(word)
            if known is None:
                known = self._merge(word)
                if len(self._cache) >= CACHE_SIZE:
                    self._cache.clear()
                self._cache[word] = known
            ids += known
        return ids

    def _merge(self, text: str) -> list[int]:
        """Merges the characters of `text`; a doubly linked list in two arrays holds the order."""
        symbols = list(text)
        following = [*range(1, len(symbols)), -1]
        previous = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int, int]] = []  # (-score, left, right, merged length)

        def offer(left: int, right: int) -> None:
            if left < 0 or right < 0:
                return
            merged = symbols[left] + symbols[right]
            token = self._ids_by_text.get(merged)
            if token is not None:
                heapq.heappush(queue, (-self._scores[token], left, right, len(merged)))

        for right in range(1, len(symbols)):
            offer(right - 1, right)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            parts = symbols[left], symbols[right]
            if not parts[0] or not parts[1] or len(parts[0]) + len(parts[1]) != length:
                continue  # one of the two has been merged meanwhile
            symbols[left], symbols[right] = parts[0] + parts[1], ""
            following[left] = following[right]
            if following[left] >= 0:
                previous[following[left]] = left
            offer(previous[left], left)
            offer(left, following[left])
        return [token for symbol in symbols if symbol for token in self._ids_of(symbol)]

    def _ids_of(self, symbol: str) -> list[int]:
        token = self._ids_by_text.get(symbol)
        if token is not None:
            return [token]
        ids: list[int] = []
        for byte in symbol.encode("utf-8"):
            byte_token = self._ids_by_text.get(f"<0x{byte:02X}>")
            ids += self._unknown if byte_token is None else [byte_token]
        return ids

"""Stop strings in streamed text: nothing of one is shown, whatever pieces it arrives in."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until a stop string is complete.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit = False
        """Whether a stop string was found; everything after it is dropped."""
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown after ``text`` arrived; up to the first completed stop string."""
        if self.hit:
            return ""
        self._held += text
        found = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            self.hit = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = self._n_open()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def finish(self) -> str:
        """What was held back when the text ends without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _n_open(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0

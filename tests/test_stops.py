"""Stop strings in text that arrives in any pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.stops import StopFilter

SHORT = st.text("ab.", max_size=3)


@given(st.lists(SHORT, max_size=12), st.lists(SHORT, max_size=3))
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    """What is shown is the text up to the stop string that is complete first."""
    text = "".join(pieces)
    found = [(text.index(s) + len(s), text.index(s)) for s in stops if s and s in text]
    expected = text[: min(found)[1]] if found else text
    stop_filter = StopFilter(stops)
    shown = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        assert expected.startswith(shown)
    shown += "" if stop_filter.hit else stop_filter.finish()
    assert shown == expected
    assert stop_filter.hit == bool(found)

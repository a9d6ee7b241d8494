"""A command line through the rows alone, without Typer and without a model."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.options import Options
from specdec_cli.argv import normalise
from specdec_cli.flags import Flag
from specdec_cli.given import Given, collect
from specdec_cli.run import PANELS

FLAGS = [flag for panel in PANELS for flag in panel.flags]
BY_NAME = {name: flag for flag in FLAGS for name in (*flag.names, *flag.off)}


def given(words: str | list[str], environ: Mapping[str, str] | None = None) -> Given:
    """What the rows of `generate` make of words and variables."""
    normal = normalise(words.split() if isinstance(words, str) else words, FLAGS)
    found: dict[Flag, object] = {}
    rest = iter(normal.words)
    for name in rest:
        flag = BY_NAME[name]
        value: object = next(rest) if flag.takes_value else name in flag.names
        if flag.takes_value and flag.appends:
            value = [*found.get(flag, []), value]  # type: ignore[misc]
        found[flag] = value
    ordered = dict(sorted(found.items(), key=lambda item: normal.place(item[0].parameter)))
    return collect(FLAGS, ordered, environ or {}, normal.spelled)


def options(words: str | list[str], environ: Mapping[str, str] | None = None) -> Options:
    """The options they stand for."""
    return given(words, environ).options()

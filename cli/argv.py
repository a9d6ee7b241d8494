"""Words that Typer must never see as they are.

llama.cpp's single-dash names are whole words (``-md``), never clusters, so an unknown one is an
error instead of being split; in long names ``_`` reads as ``-``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from specdec.errors import UsageError, unknown_name
from specdec_cli.flags import Flag

log = logging.getLogger("specdec_cli")

HELP = ("--help", "-h", "--usage")


def normalise(words: Sequence[str], flags: Iterable[Flag]) -> tuple[list[str], Mapping[str, int]]:
    """The words for Typer, and the place of each row's last occurrence by parameter name.

    Raises `UsageError` for an unknown name, a missing value or a word that belongs to no flag.
    """
    flags = list(flags)
    by_name = {name: flag for flag in flags for name in (*flag.names, *flag.off)}
    positional = next((by_name.pop(flag.name) for flag in flags if flag.is_positional), None)
    order: dict[str, int] = {}
    seen: set[str] = set()
    out: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = _split(word)
        if name in HELP:
            return ["--help"], {}
        if positional is not None and not word.startswith("-"):
            order[positional.parameter] = len(out)
            out.append(word)
            continue
        if name not in by_name:
            raise UsageError(_unknown(name, by_name))
        flag = by_name[name]
        _report_repeat(flag, name, seen)
        order[flag.parameter] = len(out)
        out.append(name)
        if not flag.takes_value:
            if equals:
                raise UsageError(f"{name} takes no value, got '{value}'")
            continue
        given = value if equals else next(rest, None)
        if given is None:
            raise UsageError(f'error while handling argument "{name}": expected value for argument')
        out.append(given)
    return out, order


def _split(word: str) -> tuple[str, str, str]:
    """Name, `=` and value of a word; only long names may carry a value."""
    if not word.startswith("--"):
        return word, "", ""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), equals, value


def _unknown(name: str, known: Mapping[str, Flag]) -> str:
    if not name.startswith("-") or name == "-":
        return f"invalid argument: {name}; there are no positional arguments, prompts go to -p"
    message = unknown_name("argument", name, known).split("; known:")[0]
    return f"invalid argument: {message.removeprefix('unknown argument: ')}"


def _report_repeat(flag: Flag, name: str, seen: set[str]) -> None:
    if name in seen and flag.takes_value and not flag.appends:
        log.warning(
            "DEPRECATED: argument '%s' specified multiple times, use comma-separated values "
            "instead (only last value will be used)",
            name,
        )
    seen.add(name)

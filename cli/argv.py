"""Words that Typer must never see as they are.

llama.cpp's single-dash names are whole words (``-md``), never clusters, so an unknown one is an
error instead of being split; in long names ``_`` reads as ``-``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.errors import UsageError, unknown_name
from specdec_cli.flags import Flag
from specdec_cli.flags.removed import ABSENT

log = logging.getLogger("specdec_cli")

HELP = ("--help", "-h", "--usage")


@dataclass(slots=True)
class Words:
    """A command line as Typer shall see it, and what Typer would forget of it."""

    words: list[str] = field(default_factory=list)
    order: dict[str, int] = field(default_factory=dict)
    """Parameter -> place of its last occurrence."""
    spelled: dict[str, str] = field(default_factory=dict)
    """Parameter -> the name that was used last."""
    action: str | None = None
    """The canonical name of a flag that replaces the command."""

    @property
    def is_help(self) -> bool:
        """Whether a help page is asked for."""
        return self.words[-1:] == ["--help"] and not self.order

    def place(self, parameter: str) -> int:
        """Where a parameter was given last; -1 if it was not."""
        return self.order.get(parameter, -1)


def normalise(words: Sequence[str], flags: Iterable[Flag]) -> Words:
    """The words for Typer.

    The first `--help` or action flag ends the reading. Raises `UsageError` for an unknown name, a
    missing value or a word that belongs to no flag.
    """
    flags = list(flags)
    by_name = {name: flag for flag in flags for name in (*flag.names, *flag.off)}
    positional = next((by_name.pop(flag.name) for flag in flags if flag.is_positional), None)
    found = Words()
    seen: set[str] = set()
    rest = iter(words)
    for word in rest:
        name, equals, value = _split(word)
        if name in HELP:
            return Words(["--help"])
        if positional is not None and not word.startswith("-"):
            found.order[positional.parameter] = len(found.words)
            found.words.append(word)
            continue
        if name not in by_name:
            raise UsageError(_unknown(word if word.startswith("-") else name, name, by_name))
        flag = by_name[name]
        if flag.kind == "action":
            return Words(action=flag.name)
        _report_repeat(flag, name, seen)
        found.order[flag.parameter] = len(found.words)
        found.spelled[flag.parameter] = name
        found.words.append(name)
        if flag.takes_value:
            found.words.append(value if equals else _value(flag, name, rest))
        elif equals:
            raise UsageError(f"{name} takes no value, got '{value}'")
    return found


def _split(word: str) -> tuple[str, str, str]:
    """Name, `=` and value of a word; only long names may carry a value."""
    if not word.startswith("--"):
        return word, "", ""
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), equals, value


def _value(flag: Flag, name: str, rest: Iterator[str]) -> str:
    found = [word for _, word in zip(range(flag.n_values), rest, strict=False)]
    if len(found) < flag.n_values:
        raise UsageError(f'error while handling argument "{name}": expected value for argument')
    return " ".join(found)


def _unknown(word: str, name: str, known: Mapping[str, Flag]) -> str:
    if not name.startswith("-") or name == "-":
        return f"invalid argument: {name}; there are no positional arguments, prompts go to -p"
    if name in ABSENT:
        return f"invalid argument: {word}; {ABSENT[name]}"
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

"""From what environment and command line say to layers of options.

Precedence: defaults < what the model file recommends < environment < command line. Appending flags
accumulate over environment and command line, as in llama.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import UsageError
from specdec.options import Options
from specdec_cli.flags import Flag, parse_bool

log = logging.getLogger("specdec_cli")


@dataclass(frozen=True, slots=True)
class Given:
    """What environment and command line say, ready to be laid over the defaults."""

    environment: Mapping[str, Any]
    command_line: Mapping[str, Any]

    def options(self, recommended: Mapping[str, Any] | None = None) -> Options:
        """All choices; ``recommended`` are values that lose against what the user gave."""
        return Options().merge(recommended or {}, self.environment, self.command_line)


def collect(
    flags: Sequence[Flag],
    given: Mapping[Flag, Any],
    environ: Mapping[str, str],
    spelled: Mapping[str, str] | None = None,
) -> Given:
    """The layers of environment and command line.

    ``given``: row -> its words (a list if it appends) or whether a switch is on, in the order of
    the command line. ``spelled``: parameter -> the name that was used. Raises `UsageError` with
    llama.cpp's words for a bad value, a refused or a removed flag.
    """
    environment: dict[str, Any] = {}
    spelled = spelled or {}
    for flag, text in _from_environment(flags, environ):
        _apply(flag, [text], environment, f'environment variable "{flag.env}"', flag.env or "")
        if flag in given and not flag.appends:
            log.warning(
                "warn: %s environment variable is set, but will be overwritten by command line "
                "argument %s",
                flag.env,
                spelled.get(flag.parameter, flag.name),
            )
    command_line = {
        f.path: environment[f.path] for f in flags if f.appends and f.path in environment
    }
    for flag, value in given.items():
        words = value if isinstance(value, list) else [value]
        name = spelled.get(flag.parameter, flag.name)
        _apply(flag, words, command_line, f'argument "{name}"', name)
    return Given(environment, command_line)


def _from_environment(
    flags: Iterable[Flag], environ: Mapping[str, str]
) -> Iterable[tuple[Flag, str]]:
    """Rows whose variable is set, with its text; LLAMA_ARG_NO_X switches X off in any case."""
    for flag in flags:
        if flag.env is None:
            continue
        negative = flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
        if flag.off and negative != flag.env and negative in environ:
            yield flag, "off"
        elif flag.env in environ:
            yield flag, environ[flag.env]


def _apply(
    flag: Flag, words: Sequence[Any], layer: dict[str, Any], where: str, spelled: str
) -> None:
    """Puts what one row says into ``layer``."""
    try:
        if not flag.takes_value:
            _switch(flag, words[-1], layer, spelled)
            return
        values = [flag.convert(word) for word in words]
        if flag.kind != "set":
            _report(flag, spelled)
        elif flag.appends:
            added = [item for value in values for item in value]
            layer[flag.path] = (*(layer.get(flag.path) or ()), *added)
        else:
            layer[flag.path] = values[-1]
    except ValueError as error:
        raise UsageError(f"error while handling {where}: {error}") from None


def _switch(flag: Flag, value: bool | str, layer: dict[str, Any], spelled: str) -> None:
    is_on = parse_bool(value) if isinstance(value, str) else value
    if not is_on and not flag.off:
        return
    if flag.kind == "preset":
        for path, preset in flag.values.items():
            old = layer.get(path)
            layer[path] = (*(old or ()), *preset) if isinstance(preset, tuple) else preset
    elif flag.kind == "set":
        layer[flag.path] = is_on
    else:
        _report(flag, spelled)


def _report(flag: Flag, spelled: str) -> None:
    """Says what a row that sets nothing has to say. Raises ValueError for an error."""
    if flag.kind in ("removed", "refused"):
        raise ValueError(flag.advice)
    if flag.kind == "no-op":
        log.warning("%s has no effect: %s", spelled, flag.advice)
    elif flag.kind == "deprecated":
        log.warning("DEPRECATED: %s %s", spelled, flag.advice)

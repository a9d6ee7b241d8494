"""Rows as a signature that Typer understands."""

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec_cli.argv import Words
from specdec_cli.flags import Flag, Panel
from specdec_cli.given import Given, collect

Command = Callable[[Given], None]


def with_flags(*panels: Panel, words: Words) -> Callable[[Command], Callable[..., None]]:
    """Gives a command that takes one `Given` the flags of the panels.

    Typer is shown those that ``words`` use, which takes a fraction of the time, or all for a help
    page.
    """
    rows = [(flag, panel.title) for panel in panels for flag in panel.flags]
    flags = {flag.parameter: flag for flag, _ in rows}

    def decorate(command: Command) -> Callable[..., None]:
        def run(**values: Any) -> None:
            given = {
                flags[name]: value
                for name, value in sorted(values.items(), key=lambda kv: words.place(kv[0]))
                if value not in (None, [])
            }
            command(collect(list(flags.values()), given, os.environ, words.spelled))

        shown = [row for row in rows if words.is_help or row[0].parameter in words.order]
        parameters = [_parameter(flag, title) for flag, title in shown]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def _parameter(flag: Flag, title: str) -> inspect.Parameter:
    """The Typer parameter of a row: always a string, list or switch with "not given" as default."""
    kind: Any = str | None
    names = list(flag.names)
    if not flag.takes_value:
        kind = bool | None
        if flag.off:
            names = [f"{on}/{off}" for on, off in _pairs(flag.names, flag.off)]
    elif flag.appends:
        kind = list[str] | None
    if flag.is_positional:
        argument = typer.Argument(help=flag.help, metavar=flag.metavar, show_default=False)
        return _keyword(flag, Annotated[list[str] | None, argument])
    option = typer.Option(
        *names,
        help=f"{flag.help} [dim]\\[env: {flag.env}][/dim]" if flag.env else flag.help,
        metavar=metavar(flag),
        show_default=shown_default(flag) or False,
        rich_help_panel=title,
        hidden=flag.kind in ("removed", "deprecated"),
    )
    return _keyword(flag, Annotated[kind, option])


def _keyword(flag: Flag, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(flag.parameter, kind, default=None, annotation=annotation)


def _pairs(on: Sequence[str], off: Sequence[str]) -> list[tuple[str, str]]:
    n = max(len(on), len(off))
    padded = [(*on, *[on[0]] * (n - len(on))), (*off, *[off[0]] * (n - len(off)))]
    return list(zip(*padded, strict=True))


def metavar(flag: Flag) -> str | None:
    """What stands for the value of a row in help and docs; None for switches."""
    if not flag.takes_value:
        return None
    if flag.metavar:
        return flag.metavar
    if typing.get_origin(flag.type) is Literal:
        return "|".join(typing.get_args(flag.type))
    names: Mapping[Any, str] = {int: "N", float: "N", Path: "FILE"}
    return names.get(flag.type, "TEXT")


def shown_default(flag: Flag) -> str | None:
    """The default of a row as help and docs show it; None if there is nothing to show."""
    value = flag.default if flag.kind == "set" else None
    if value is None or value in ((), "", {}):
        return None
    if isinstance(value, tuple):
        return ";".join(repr(one)[1:-1] if isinstance(one, str) else str(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else str(value)

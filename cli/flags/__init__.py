"""Flags as rows: a row binds names to a field of `Options`; type and default stay in `options.py`.

`with_flags` turns rows into a signature for Typer and the values it finds back into layers for
`Options.merge`. Precedence: defaults < what the model file recommends < environment < command line.
Appending flags accumulate over environment and command line, as in llama.cpp.
"""

from __future__ import annotations

import inspect
import logging
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec.errors import UsageError
from specdec.options import Options, leaves

log = logging.getLogger("specdec_cli")

TRUTHY = ("on", "enabled", "true", "1")
FALSY = ("off", "disabled", "false", "0")

Kind = Literal["set", "no-op", "refused", "removed", "preset"]
Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Flag:
    """One row of the option table.

    ``path`` is the dotted leaf of `Options` (empty for rows that set none). ``off`` are the names
    that switch a boolean off. ``parse`` replaces the conversion that the leaf's type implies.
    ``kind``: `no-op` is accepted and reported once, `refused` and `removed` are errors with
    ``advice``, `preset` sets the leaves in ``values``.
    """

    path: str
    names: tuple[str, ...]
    help: str
    env: str | None = None
    off: tuple[str, ...] = ()
    parse: Parse | None = None
    metavar: str | None = None
    kind: Kind = "set"
    is_switch: bool = False
    appends: bool = False
    """Whether occurrences add up."""
    advice: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The canonical spelling."""
        return self.names[0]

    @property
    def parameter(self) -> str:
        """The name of its parameter in the command's signature."""
        return self.name.lstrip("-").replace("-", "_").replace(".", "_")

    @property
    def is_positional(self) -> bool:
        """Whether its values are words without a name."""
        return not self.name.startswith("-")

    @property
    def takes_value(self) -> bool:
        """Whether the word after it is its value."""
        return not (self.is_switch or self.kind == "preset" or self._type is bool)

    @property
    def default(self) -> Any:
        """The default of its leaf; None for rows without one."""
        return leaves()[self.path][1] if self.path else None

    @property
    def _type(self) -> Any:
        return _without_none(leaves()[self.path][0]) if self.path else None

    def convert(self, text: str) -> Any:
        """The value that ``text`` stands for. Raises ValueError with a reason."""
        if self.parse is not None:
            return self.parse(text)
        return convert(text, self._type)


@dataclass(frozen=True, slots=True)
class Panel:
    """A titled group of rows in the help."""

    title: str
    flags: tuple[Flag, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """What environment and command line say, ready to be laid over the defaults."""

    environment: Mapping[str, Any]
    command_line: Mapping[str, Any]

    def options(self, recommended: Mapping[str, Any] | None = None) -> Options:
        """All choices; ``recommended`` are values that lose against what the user gave."""
        return Options().merge(recommended or {}, self.environment, self.command_line)


def convert(text: str, kind: Any) -> Any:
    """``text`` as a value of an option's type; numbers must be whole words.

    Raises ValueError with a reason for people.
    """
    if kind is int:
        if not text.strip().lstrip("+-").isdigit():
            raise ValueError(f"'{text}' is not a whole number")
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"'{text}' is not a number") from None
    if kind is bool:
        return parse_bool(text)
    if kind is Path:
        return Path(text)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ValueError(f"invalid value '{text}', must be one of: {', '.join(choices)}")
        return text
    if typing.get_origin(kind) is tuple:
        return (convert(text, typing.get_args(kind)[0]),)
    return text


def parse_bool(text: str) -> bool:
    """llama.cpp's words for on and off."""
    if text in TRUTHY:
        return True
    if text in FALSY:
        return False
    raise ValueError(f"'{text}' is neither {', '.join(TRUTHY)} nor {', '.join(FALSY)}")


def _without_none(kind: Any) -> Any:
    """``X`` of ``X | None``."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(one for one in typing.get_args(kind) if one is not type(None))
    return kind


def with_flags(*panels: Panel) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Gives a command that takes one `Given` the flags of the panels."""
    rows = [(flag, panel.title) for panel in panels for flag in panel.flags]
    flags = {flag.parameter: flag for flag, _ in rows}

    def decorate(command: Callable[[Given], None]) -> Callable[..., None]:
        def run(ctx: typer.Context, **values: Any) -> None:
            order: Mapping[str, int] = ctx.obj or {}
            given = {
                flags[name]: value
                for name, value in sorted(values.items(), key=lambda kv: order.get(kv[0], -1))
                if value not in (None, [])
            }
            command(collect(list(flags.values()), given, os.environ))

        parameters = [_context_parameter(), *(_parameter(flag, title) for flag, title in rows)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def _context_parameter() -> inspect.Parameter:
    return inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


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
    shown = flag.default if flag.kind == "set" else None
    option = typer.Option(
        *names,
        help=f"{flag.help} [dim]\\[env: {flag.env}][/dim]" if flag.env else flag.help,
        metavar=flag.metavar or _metavar(flag),
        show_default=_show(shown) or False,
        rich_help_panel=title,
        hidden=flag.kind == "removed",
    )
    return _keyword(flag, Annotated[kind, option])


def _keyword(flag: Flag, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(flag.parameter, kind, default=None, annotation=annotation)


def _pairs(on: Sequence[str], off: Sequence[str]) -> list[tuple[str, str]]:
    n = max(len(on), len(off))
    padded = [(*on, *[on[0]] * (n - len(on))), (*off, *[off[0]] * (n - len(off)))]
    return list(zip(*padded, strict=True))


def _metavar(flag: Flag) -> str | None:
    if not flag.takes_value:
        return None
    kind = flag._type
    if typing.get_origin(kind) is Literal:
        return "|".join(typing.get_args(kind))
    return {int: "N", float: "N", Path: "FILE"}.get(kind, "TEXT")


def _show(value: Any) -> str | None:
    if value is None or value in ((), "", {}):
        return None
    if isinstance(value, tuple):
        return ";".join(repr(one)[1:-1] if isinstance(one, str) else str(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def collect(flags: Sequence[Flag], given: Mapping[Flag, Any], environ: Mapping[str, str]) -> Given:
    """The layers of environment and command line.

    ``given``: row -> what Typer found, in the order of the command line. Raises `UsageError` with
    llama.cpp's words for a bad value, a refused or a removed flag.
    """
    environment: dict[str, Any] = {}
    for flag, text in _from_environment(flags, environ):
        where = f'environment variable "{flag.env}"'
        _apply(flag, [text], environment, where, environ.get)
        if flag in given and not flag.appends:
            log.warning(
                "warn: %s environment variable is set, but will be overwritten by command line "
                "argument %s",
                flag.env,
                flag.name,
            )
    command_line = {
        f.path: environment[f.path] for f in flags if f.appends and f.path in environment
    }
    for flag, value in given.items():
        words = value if isinstance(value, list) else [value]
        _apply(flag, words, command_line, f'argument "{flag.name}"', None)
    return Given(environment, command_line)


def _from_environment(
    flags: Iterable[Flag], environ: Mapping[str, str]
) -> Iterable[tuple[Flag, str]]:
    """Rows whose variable is set, with its text; LLAMA_ARG_NO_X switches X off in any case."""
    for flag in flags:
        if flag.env is None:
            continue
        negative = flag.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
        if flag.off and negative in environ:
            yield flag, "off"
        elif flag.env in environ:
            yield flag, environ[flag.env]


def _apply(
    flag: Flag, words: Sequence[Any], layer: dict[str, Any], where: str, environ: Any
) -> None:
    """Puts what one row says into ``layer``."""
    try:
        if flag.kind in ("removed", "refused"):
            raise ValueError(flag.advice)
        if not flag.takes_value:
            _switch(flag, words[-1], layer)
            return
        if flag.kind == "no-op":
            for word in words:
                flag.convert(word)
            log.warning("%s has no effect: %s", flag.name, flag.advice)
            return
        if flag.appends:
            added = [item for word in words for item in flag.convert(word)]
            layer[flag.path] = (*(layer.get(flag.path) or ()), *added)
        else:
            layer[flag.path] = flag.convert(words[-1])
    except ValueError as error:
        raise UsageError(f"error while handling {where}: {error}") from None


def _switch(flag: Flag, value: bool | str, layer: dict[str, Any]) -> None:
    is_on = parse_bool(value) if isinstance(value, str) else value
    if not is_on and not flag.off:
        return
    if flag.kind == "no-op":
        log.warning("%s has no effect: %s", flag.name, flag.advice)
    elif flag.kind == "preset":
        for path, preset in flag.values.items():
            old = layer.get(path)
            layer[path] = (*(old or ()), *preset) if isinstance(preset, tuple) else preset
    else:
        layer[flag.path] = is_on

"""Flags as rows: a row binds names to a field of `Options`; type and default stay in `options/`.

`signature.with_flags` turns rows into a signature for Typer, `given.collect` turns what was found
into layers for `Options.merge`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specdec.options import leaves

TRUTHY = ("on", "enabled", "true", "1")
FALSY = ("off", "disabled", "false", "0")
INT_RANGE = range(-(2**31), 2**31)

Kind = Literal["set", "no-op", "silent", "deprecated", "refused", "removed", "preset", "action"]
Parse = Callable[[str], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Flag:
    """One row of the option table.

    ``path`` is the dotted leaf of `Options` (empty for rows that set none). ``off`` are the names
    that switch a boolean off. ``parse`` replaces the conversion that the leaf's type implies.
    ``kind``: `no-op` is checked and reported once, `silent` is checked and nothing more,
    `deprecated` is reported in llama.cpp's words, `refused` and `removed` are errors with
    ``advice``, `preset` sets the leaves in ``values``, `action` replaces the command.
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
    n_values: int = 1
    """Words that follow it if it takes a value."""
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
        return not (self.is_switch or self.kind in ("preset", "action") or self.type is bool)

    @property
    def default(self) -> Any:
        """The default of its leaf; None for rows without one."""
        return leaves()[self.path][1] if self.path else None

    @property
    def type(self) -> Any:
        """The type of its leaf without None; None for rows without one."""
        return _without_none(leaves()[self.path][0]) if self.path else None

    def convert(self, text: str) -> Any:
        """The value that ``text`` stands for. Raises ValueError with a reason."""
        if self.parse is not None:
            return self.parse(text)
        return convert(text, self.type)


@dataclass(frozen=True, slots=True)
class Panel:
    """A titled group of rows in the help."""

    title: str
    flags: tuple[Flag, ...]


def convert(text: str, kind: Any) -> Any:
    """``text`` as a value of an option's type; numbers must be whole words.

    Raises ValueError with a reason for people.
    """
    if kind is int:
        return parse_int(text)
    if kind is float:
        return parse_float(text)
    if kind is bool:
        return parse_bool(text)
    if kind is Path:
        return parse_path(text)
    if typing.get_origin(kind) is Literal:
        return parse_choice(text, typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return (convert(text, typing.get_args(kind)[0]),)
    return text


def parse_int(text: str) -> int:
    """A whole number of 32 bits."""
    if not text.removeprefix("-").removeprefix("+").isdecimal():
        raise ValueError(f"'{text}' is not a whole number")
    value = int(text)
    if value not in INT_RANGE:
        raise ValueError(f"'{text}' is out of range")
    return value


def parse_float(text: str) -> float:
    """A number; infinities are numbers."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or "_" in text:
        raise ValueError(f"'{text}' is not a number")
    return value


def parse_bool(text: str) -> bool:
    """llama.cpp's words for on and off."""
    if text in TRUTHY:
        return True
    if text in FALSY:
        return False
    raise ValueError(f"'{text}' is neither {', '.join(TRUTHY)} nor {', '.join(FALSY)}")


def parse_path(text: str) -> Path:
    """The name of a file."""
    if not text:
        raise ValueError("expected the name of a file, got nothing")
    return Path(text)


def parse_choice(text: str, choices: tuple[str, ...]) -> str:
    """One of ``choices``."""
    if text not in choices:
        raise ValueError(f"invalid value '{text}', must be one of: {', '.join(choices)}")
    return text


def _without_none(kind: Any) -> Any:
    """``X`` of ``X | None``."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return next(one for one in typing.get_args(kind) if one is not type(None))
    return kind

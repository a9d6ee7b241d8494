"""Checks of values whose rows set no option, and of those with a form of their own."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.options import AUTO
from specdec_cli.flags import Parse, parse_bool, parse_choice, parse_float, parse_int


def integer(low: int | None = None, high: int | None = None) -> Parse:
    """A check for whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        value = parse_int(text)
        if (low is not None and value < low) or (high is not None and value > high):
            limits = f"{'' if low is None else low}..{'' if high is None else high}"
            raise ValueError(f"invalid value: {text}, expected {limits}")
        return value

    return parse


def draft_length(text: str) -> int:
    """A whole number, or auto."""
    if text != "auto" and parse_int(text) < 0:
        raise ValueError(f"'{text}' is neither auto nor a number of tokens")
    return AUTO if text == "auto" else parse_int(text)


def one_of(*choices: str) -> Parse:
    """A check for one of ``choices``."""
    return lambda text: parse_choice(text, choices)


def boolean_or_auto(text: str) -> bool | None:
    """llama.cpp's words for on, off and, as None, auto."""
    return None if text in ("auto", "-1") else parse_bool(text)


def flash_attention(text: str) -> bool | None:
    """A value of `--flash-attn`."""
    try:
        return boolean_or_auto(text)
    except ValueError:
        raise ValueError(f"error: unknown value for --flash-attn: '{text}'") from None


def cpu_mask(text: str) -> str:
    """Hexadecimal digits."""
    if not re.fullmatch(r"(0[xX])?[0-9a-fA-F]+", text):
        raise ValueError(f"invalid cpumask: '{text}', expected hexadecimal digits")
    return text


def cpu_range(text: str) -> str:
    """`lo-hi`, one of which may be left out."""
    if text == "-" or not re.fullmatch(r"\d*-\d*", text):
        raise ValueError(f"invalid range: '{text}', expected lo-hi")
    return text


def buffer_overrides(text: str) -> tuple[str, ...]:
    """`regex=buffer,...`."""
    parts = comma_list(text)
    for part in parts:
        pattern, equals, buffer = part.rpartition("=")
        if not (pattern and equals and buffer):
            raise ValueError(f"invalid value: '{part}', expected regex=buffer")
        _check_pattern(pattern)
    return parts


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"'{pattern}' is not a regular expression: {error}") from None


def numbers(text: str) -> tuple[float, ...]:
    """Numbers joined by commas or slashes."""
    return tuple(parse_float(part) for part in re.split("[,/]", text))


def layer_range(text: str) -> tuple[int, ...]:
    """Two whole numbers."""
    return tuple(parse_int(part) for part in text.split(" "))


def comma_list(text: str) -> tuple[str, ...]:
    """Fields between commas; one in double quotes may contain commas."""
    fields = tuple(next(csv.reader([text]), ()))
    if not fields:
        raise ValueError("expected a comma list, got nothing")
    return fields


def json_object(text: str) -> Mapping[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"'{text}' is not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise ValueError(f"'{text}' is not a JSON object")
    return value


def text_file(name: str) -> str:
    """The text in a file, without one trailing newline."""
    try:
        return Path(name).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read {name}: {reason}") from None

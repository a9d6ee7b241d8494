"""The checks that options share; each raises `UsageError` with the flag in its text."""

from __future__ import annotations

import math
import re

from specdec.errors import UsageError

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Cache types that llama.cpp knows; the first three are real here."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def check_range(flag: str, value: int, low: int, high: int, name: str) -> None:
    require(
        low <= value <= high,
        f"{flag}: {name} must be between {low} and {high} inclusive, got {value}",
    )


def check_finite(flag: str, value: float) -> None:
    require(math.isfinite(value), f"{flag} must be finite, got {value}")


def check_layers(flag: str, value: str) -> None:
    require(
        value in ("auto", "all") or re.fullmatch(r"-?\d+", value) is not None,
        f"{flag} must be a whole number, auto or all, got '{value}'",
    )

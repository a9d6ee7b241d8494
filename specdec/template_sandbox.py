"""The Jinja environment that chat templates of unknown files run in.

A template comes with a model file, so it may be hostile. Jinja's own sandbox refuses attributes
with underscores and mutation; here are the limits that keep a template from running or growing
without end. Apart from them the environment is the one of Hugging Face's `apply_chat_template`.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 300_000  # loop turns and calls of one rendering
MAX_NUMBER = 1_000_000  # widths, counts, exponents
MAX_TEXT = 100_000_000  # characters that one operation may make

_MULTIPLYING = ("replace", "join")  # results as long as the product of what goes in
_FORMATTING = ("format", "format_map")
_WIDE_FIELD = re.compile(r"\d{7}|%[^a-z]*\*")
_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


class RaisedError(TemplateError):
    """What a template says by `raise_exception`."""


class GenerationTag(Extension):
    """`{% generation %}` marks the model's words for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on loops and sizes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters = {name: _guarded(name, call) for name, call in self.filters.items()}
        self.filters.update(tojson=_tojson, counted=_counted, bounded=_bounded)

    def start(self) -> None:
        """Gives the rendering that follows its full number of steps."""
        _steps_left.set([MAX_STEPS])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _through_filter("counted", loop.iter)
        for assignment in template.find_all(nodes.Assign):
            assignment.node = _through_filter("bounded", assignment.node)
        for block in template.find_all(nodes.AssignBlock):
            block.filter = _through_filter("bounded", block.filter)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operation, unless its result would be out of proportion."""
        if operator == "**" and _is_large(left, right):
            raise SecurityError("a power is too large")
        if operator == "*":
            _check_product(left, right)
        if operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The call, unless a method of a text or list would make too much of it."""
        _count_step()
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        if isinstance(method, types.BuiltinMethodType):
            _check_arguments(method.__name__, (method.__self__, *args), kwargs)
        return _bounded(super().call(context, obj, *args, **kwargs))


def _through_filter(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _count_step() -> None:
    steps = _steps_left.get()
    steps[0] -= 1
    if steps[0] < 0:
        raise SecurityError(f"it takes more than {MAX_STEPS} steps")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _count_step()
        yield item


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT:
        raise SecurityError("a value grows without end")
    return value


def _check_format(pattern: Any) -> None:
    if isinstance(pattern, str) and _WIDE_FIELD.search(pattern):
        raise SecurityError("a field is too wide")


def _is_large(*numbers: Any) -> bool:
    return any(not isinstance(number, (int, float)) or abs(number) > 1000 for number in numbers)


def _check_product(*factors: Any) -> None:
    if all(isinstance(factor, int) for factor in factors):
        if sum(factor.bit_length() for factor in factors) > 4096:
            raise SecurityError("a number grows without end")
        return
    sizes = [len(factor) if hasattr(factor, "__len__") else factor for factor in factors]
    if hasattr(factors[0], "__len__") or hasattr(factors[1], "__len__"):
        _check_size(math.prod(size for size in sizes if isinstance(size, int)))


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError("a value grows without end")


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number in (*args[1:], *kwargs.values()):
        if isinstance(number, int) and abs(number) > MAX_NUMBER:
            raise SecurityError(f"{name}: {number} is too large")
    if name in _FORMATTING:
        _check_format(args[0])
    if name in _MULTIPLYING:
        _check_size(math.prod(max(1, len(part)) for part in args if hasattr(part, "__len__")))


def _guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(call, "jinja_pass_arg")

    @wraps(call)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, args[1:] if takes_context else args, kwargs)
        return call(*args, **kwargs)

    return guarded


def _raise_exception(message: str) -> NoReturn:
    raise RaisedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face writes it: no HTML escapes, and the arguments of `json.dumps`."""
    _check_arguments("tojson", (value, indent), {})
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

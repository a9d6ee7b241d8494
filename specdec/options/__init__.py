"""Every choice a user can make, as frozen dataclasses: defaults and checks live here and only here.

`Options` is a tree. A leaf is addressed by its dotted path (``"spec.draft.n_max"``); the command
line, environment variables, model files and server requests all reach it through `Options.merge`.
Names are llama.cpp's. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from specdec.options.checks import CACHE_TYPES
from specdec.options.front import (
    BenchOptions,
    ChatOptions,
    GenerateOptions,
    InspectOptions,
    OutputOptions,
    ReasoningEffort,
    Switch,
    TokenizeOptions,
)
from specdec.options.model import Activations, Kernels, ModelOptions, RopeOptions, RopeScaling
from specdec.options.sampling import DEFAULT_SAMPLERS, RANDOM_SEED, SamplingOptions
from specdec.options.spec import (
    AUTO,
    AUTO_LONGEST,
    DFLASH_TYPES,
    SPEC_TYPES,
    DraftOptions,
    DraftSampling,
    NgramCacheOptions,
    NgramMapK4VOptions,
    NgramMapKOptions,
    NgramModOptions,
    NgramSimpleOptions,
    SpecOptions,
)
from specdec.options.train import EvaluateOptions, TrainOptions

__all__ = [
    "AUTO",
    "AUTO_LONGEST",
    "CACHE_TYPES",
    "DEFAULT_SAMPLERS",
    "DFLASH_TYPES",
    "RANDOM_SEED",
    "SPEC_TYPES",
    "Activations",
    "BenchOptions",
    "ChatOptions",
    "DraftOptions",
    "DraftSampling",
    "EvaluateOptions",
    "GenerateOptions",
    "InspectOptions",
    "Kernels",
    "ModelOptions",
    "NgramCacheOptions",
    "NgramMapK4VOptions",
    "NgramMapKOptions",
    "NgramModOptions",
    "NgramSimpleOptions",
    "Options",
    "OutputOptions",
    "ReasoningEffort",
    "RopeOptions",
    "RopeScaling",
    "SamplingOptions",
    "SpecOptions",
    "Switch",
    "TokenizeOptions",
    "TrainOptions",
    "leaves",
]

_Node = typing.TypeVar("_Node")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a run depends on."""

    model: ModelOptions = field(default_factory=ModelOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    spec: SpecOptions = field(default_factory=SpecOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    generate: GenerateOptions = field(default_factory=GenerateOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    inspect: InspectOptions = field(default_factory=InspectOptions)
    tokenize: TokenizeOptions = field(default_factory=TokenizeOptions)
    bench: BenchOptions = field(default_factory=BenchOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)

    def merge(self, *layers: Mapping[str, Any]) -> Self:
        """A copy with the leaves of ``layers`` (dotted path -> value) set; later layers win.

        Raises `UsageError` from the checks of the changed dataclasses.
        """
        values: dict[str, Any] = {}
        for layer in layers:
            values.update(layer)
        return _replace(self, values)


def _replace(node: _Node, values: Mapping[str, Any]) -> _Node:
    """``node`` with dotted leaves replaced; each dataclass is rebuilt, hence checked, once."""
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    for head, inner in nested.items():
        changes[head] = _replace(getattr(node, head), inner)
    return dataclasses.replace(node, **changes) if changes else node  # type: ignore[type-var]


@functools.cache
def leaves() -> Mapping[str, tuple[Any, Any]]:
    """Dotted path -> (annotated type, default) of every leaf of `Options`."""
    found: dict[str, tuple[Any, Any]] = {}

    def walk(node: Any, prefix: str) -> None:
        hints = typing.get_type_hints(type(node))
        for item in dataclasses.fields(node):
            value = getattr(node, item.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{prefix}{item.name}.")
            else:
                found[f"{prefix}{item.name}"] = (hints[item.name], value)

    walk(Options(), "")
    return found

"""Targets by architecture: one file an architecture, one row in `ARCHITECTURES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.options import RopeOptions
from specdec.registry import Registry

if TYPE_CHECKING:
    import torch

    from specdec.gguf_file import GGUFFile
    from specdec.models.base import Target

ARCHITECTURES = Registry(
    "architecture",
    {
        "llama": "specdec.models.llama:load",
        "qwen2": "specdec.models.qwen2:load",
        "qwen3": "specdec.models.qwen3:load",
        "qwen3moe": "specdec.models.qwen3moe:load",
        "gemma3": "specdec.models.gemma3:load",
    },
)
"""``general.architecture`` -> a function from an open file to a `Target`."""


def load_target(
    file: GGUFFile,
    *,
    rope: RopeOptions | None = None,
    device: torch.device | str = "cpu",
    check_tensors: bool = False,
) -> Target:
    """The model in ``file`` with float32 weights on ``device``.

    Raises `UnsupportedError` for an unknown architecture, `ModelFileError` for a missing, left-over
    or misshapen tensor, and with ``check_tensors`` for one with a value that is not finite.
    """
    from specdec.errors import UnsupportedError, unknown_name
    from specdec.models.loading import check_finite

    if file.architecture not in ARCHITECTURES:
        message = unknown_name("architecture", file.architecture, ARCHITECTURES)
        raise UnsupportedError(f"{file.path}: {message}")
    target: Target = ARCHITECTURES.load(file.architecture)(file, rope or RopeOptions())
    if check_tensors:
        check_finite(target, file)
    return target.to(device).requires_grad_(False).eval()

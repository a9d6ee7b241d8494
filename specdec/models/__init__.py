"""Targets by architecture: one file an architecture, one row in `ARCHITECTURES`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.options import Activations, Kernels, RopeOptions
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
        "hy_v3": "specdec.models.hy_v3:load",
        "glm4moe": "specdec.models.glm4moe:load",
        "mimo2": "specdec.models.mimo2:load",
        "gemma4": "specdec.models.gemma4:load",
        "qwen35": "specdec.models.qwen35:load",
    },
)
"""``general.architecture`` -> a function from an open file to a `Target`."""

MTP_ARCHITECTURES = Registry(
    "architecture with MTP layers",
    {
        "hy_v3": "specdec.models.hy_v3:read_spec",
        "glm4moe": "specdec.models.glm4moe:read_spec",
        "mimo2": "specdec.models.mimo2:read_spec",
        "qwen35": "specdec.models.qwen35:read_spec",
    },
)
"""``general.architecture`` -> a function from file, rope options and block to a `LayerSpec`."""

DRAFT_ARCHITECTURES = ("dflash", "eagle3", "gemma4-assistant")
"""Architectures of files that cannot run on their own."""


def check_architecture(file: GGUFFile) -> None:
    """Raises `UnsupportedError` unless there is a target of the file's architecture, and
    `ModelFileError` for a file without weights.
    """
    from specdec.errors import ModelFileError, UnsupportedError, unknown_name

    name = file.architecture
    if name in DRAFT_ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: is a draft model ({name}), not a target; give it with -md and the "
            "target with -m"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{file.path}: {unknown_name('architecture', name, ARCHITECTURES)}")
    if not file.tensors:
        raise ModelFileError(
            f"{file.path}: holds a vocabulary only, no weights; give a whole model"
        )
    if _holds_mtp_layers_alone(file):
        raise UnsupportedError(
            f"{file.path}: holds MTP layers without the model, not a target; give it with -md and "
            "the target with -m"
        )


def _holds_mtp_layers_alone(file: GGUFFile) -> bool:
    first, last = "blk.0.attn_norm.weight", file.get_int(file.key("block_count"), default=0) - 1
    return first not in file.tensors and f"blk.{last}.nextn.eh_proj.weight" in file.tensors


def load_target(
    file: GGUFFile,
    *,
    rope: RopeOptions | None = None,
    device: torch.device | str = "cpu",
    check_tensors: bool = False,
    kernels: Kernels = "auto",
    activations: Activations = "int8",
) -> Target:
    """The model in ``file`` on ``device``, its weights packed (native kernels) or float32 (torch).

    ``kernels``: "auto" takes native where it can be built and knows the layers; "native" insists.
    ``activations``: what native kernels multiply quantised weights with.

    Raises `UnsupportedError` for an unknown architecture, `ModelFileError` for a missing, left-over
    or misshapen tensor, and with ``check_tensors`` for one with a value that is not finite.
    """
    from specdec.models.loading import check_finite, fill_target

    check_architecture(file)
    target: Target = ARCHITECTURES.load(file.architecture)(file, rope or RopeOptions())
    if target.device.type == "meta":
        fill_target(target, file, kernels=kernels, activations=activations, device=device)
    if check_tensors:
        check_finite(file)
    return target.to(device).requires_grad_(False).eval()

"""The native back end: packed weights, one call a layer, every row computed as if it were alone.

`install` gives a target, built on the meta device, native modules in place of its torch ones. The
kernels are C++ without torch's headers, compiled at first use (`build`), called through ctypes
(`library`) on weights in a layout of their own (`packing`).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from specdec.errors import UnsupportedError
from specdec.memory import trim_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from specdec.gguf_file import GGUFFile
    from specdec.models.base import Target
    from specdec.models.layers import LayerSpec
    from specdec.native.library import Library, Rounding
    from specdec.options import Activations, Kernels

log = logging.getLogger(__name__)

KNOWN_FIELDS = (
    *("has_qk_norm", "has_qkv_bias", "has_output_bias", "has_post_norms", "activation", "window"),
    *("has_sinks", "shares_kv", "value_scale", "has_output_scale", "n_expert", "n_expert_used"),
    *("n_ff_shared", "routing", "expert_bias", "ffn_norm", "has_value_norm"),
    *("n_key_heads", "n_value_heads", "state_size", "conv_kernel"),
)
"""Optional fields of specs that the kernels act on; any other must have its default."""


def install(
    target: Target,
    file: GGUFFile,
    kernels: Kernels,
    activations: Activations,
    device: torch.device | str,
) -> bool:
    """Loads the weights of ``target`` into native modules; False if torch has to do it.

    With ``kernels`` "native" the reason is an `UnsupportedError`, with "auto" it is logged.
    """
    if kernels == "torch" or (kernels == "auto" and str(device) != "cpu"):
        return False
    try:
        _check_supported(target, device)
        _load(target, file, activations)
    except UnsupportedError as error:
        if kernels == "native":
            raise
        log.info("%s; running on torch", error)
        return False
    return True


def find_library(
    kernels: Kernels, device: torch.device | str, *, knows_draft: bool = True
) -> Library | None:
    """The kernels for a draft; None if torch has to run it, see `install`."""
    from specdec.native.library import load_library

    if kernels == "torch" or (kernels == "auto" and str(device) != "cpu"):
        return None
    try:
        if str(device) != "cpu":
            raise UnsupportedError(f"native kernels: need the CPU, not {device}")
        if not knows_draft:
            raise UnsupportedError("native kernels: do not know the layers of this draft")
        return load_library()
    except UnsupportedError as error:
        if kernels == "native":
            raise
        log.info("%s; it runs on torch", error)
        return None


def _check_supported(target: Target, device: torch.device | str) -> None:
    """Raises `UnsupportedError` unless every layer has a native form on this device."""
    if str(device) != "cpu":
        raise UnsupportedError(f"native kernels: need the CPU, not {device}")
    if not all(knows_layer(layer) for layer in target.layers):
        raise UnsupportedError(
            f"native kernels: {target.config.architecture} has layers that they do not know"
        )


def knows(spec: LayerSpec) -> bool:
    """Whether everything that a layer does beyond the plain block has a kernel."""
    return all(
        field.name in KNOWN_FIELDS or getattr(spec, field.name) == field.default
        for field in fields(spec)
        if field.default is not MISSING
    )


def knows_layer(layer: nn.Module) -> bool:
    """Whether the kernels can do everything that a module does."""
    from specdec.models.delta_net import DeltaNetLayer
    from specdec.models.layers import DecoderLayer
    from specdec.models.mimo2 import FusedLayer
    from specdec.models.qwen35 import GatedLayer

    known = (DecoderLayer, FusedLayer, GatedLayer, DeltaNetLayer)
    return isinstance(layer, DecoderLayer) and type(layer) in known and knows(layer.spec)


def _load(target: Target, file: GGUFFile, activations: Activations) -> None:
    from specdec.native import layer as native
    from specdec.native.library import load_library
    from specdec.native.packing import PACKED_TYPES
    from specdec.native.weights import Weights

    library = load_library()
    weights = Weights(file, target.transform)
    config = target.config
    tied = not hasattr(target, "output")
    norm = weights.vector("output_norm.weight")
    output = weights.matrix("token_embd.weight" if tied else "output.weight")
    # The best token depends on small differences of its numbers: eight bits are too few here.
    rounding: Rounding = "int16" if activations == "int8" else "f32"
    embedding = (
        native.PackedEmbedding(library, output)
        if tied
        else native.NativeEmbedding(file, "token_embd.weight")
    )
    target.use_row_invariant(
        layers=[
            native.NativeLayer(
                library, layer.spec, list(layer.state_dict()), f"blk.{i}.", weights, activations
            )
            for i, layer in enumerate(target.layers)
        ],
        run_layers=native.LayerStack(
            library,
            norm,
            config.rms_eps,
            output,
            rounding,
            config.logit_softcap,
            embedding,
            config.embedding_scale,
        ),
        token_embd=embedding,
        output_norm=native.NativeRMSNorm(library, norm, config.rms_eps),
        output=native.NativeLinear(library, output, rounding),
    )
    others = Counter(
        info.ggml_type
        for info in file.tensors.values()
        if len(info.shape) > 1 and info.ggml_type not in PACKED_TYPES
    )
    trim_memory()
    for name, count in others.items():
        log.debug("native kernels: %d tensors of type %s became float32", count, name)

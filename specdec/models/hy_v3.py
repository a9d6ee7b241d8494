"""Hunyuan V3 (`general.architecture` = hy_v3): Qwen3-like blocks, some with routed experts.

Whether a block is dense or a mixture follows from its tensors. May carry MTP layers.
"""

from __future__ import annotations

from dataclasses import replace

from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec
from specdec.models.experts import Routing
from specdec.models.layers import LayerSpec
from specdec.models.loading import build_target, count_layers, read_experts
from specdec.options import RopeOptions


def read_spec(file: GGUFFile, rope: RopeOptions, layer: int) -> LayerSpec:
    """Block ``layer``, of the model itself or for multi-token prediction."""
    spec = replace(read_layer_spec(file, rope, layer), has_qk_norm=True)
    routing = Routing(
        gating="sigmoid",
        is_normalised=file.get_bool(file.key("expert_weights_norm"), default=True),
        scale=file.get_float(file.key("expert_weights_scale"), default=1.0),
    )
    return read_experts(file, spec, layer, routing)


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    specs = [read_spec(file, rope, layer) for layer in range(count_layers(file))]
    return build_target(file, read_config(file), specs)

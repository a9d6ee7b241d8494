"""Qwen2 and Qwen2.5 (`general.architecture` = qwen2): biases on q, k and v."""

from __future__ import annotations

from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec
from specdec.models.loading import build_target, count_layers
from specdec.options import RopeOptions


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    specs = [read_layer_spec(file, rope)] * count_layers(file)
    return build_target(file, read_config(file), specs)

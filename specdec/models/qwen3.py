"""Qwen3 (`general.architecture` = qwen3): q and k are normalised per head."""

from __future__ import annotations

from dataclasses import replace

from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec
from specdec.models.loading import build_target, count_layers
from specdec.options import RopeOptions


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    specs = [replace(read_layer_spec(file, rope), has_qk_norm=True)] * count_layers(file)
    return build_target(file, read_config(file), specs)

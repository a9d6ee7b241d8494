"""Llama, Mistral, SmolLM and their kin (`general.architecture` = llama).

Rotary pairs are interleaved in the file; Llama 3 adds frequency divisors (``rope_freqs``); Mixtral
files carry experts.
"""

from __future__ import annotations

from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec
from specdec.models.loading import build_target, count_layers, rotary_to_halves
from specdec.options import RopeOptions


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    specs = [read_layer_spec(file, rope)] * count_layers(file)
    return build_target(file, read_config(file), specs, transform=rotary_to_halves(specs))

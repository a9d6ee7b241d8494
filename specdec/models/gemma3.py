"""Gemma 3 (`general.architecture` = gemma3).

Five of six layers see a sliding window and have a rotary base of their own; embeddings are scaled
by the square root of the width; branches are normalised before they are added.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec, read_window
from specdec.models.layers import LayerSpec
from specdec.models.loading import build_target, count_layers
from specdec.models.rope import check_rope
from specdec.options import RopeOptions

SLIDING_PERIOD = 6
"""Every sixth layer sees everything."""
N_LAYER_27B = 62
"""The model whose attention scale comes from width / heads instead of the head width."""


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    full = replace(
        read_layer_spec(file, rope), has_qk_norm=True, has_post_norms=True, activation="gelu_tanh"
    )
    n_layer = count_layers(file)
    if n_layer == N_LAYER_27B:
        full = replace(full, attention_scale=1.0 / math.sqrt(full.n_embd / full.n_head))
    sliding = _sliding(file, full)
    specs = [sliding if (i + 1) % SLIDING_PERIOD else full for i in range(n_layer)]
    config = replace(
        read_config(file),
        embedding_scale=math.sqrt(full.n_embd),
        logit_softcap=file.get_float(file.key("final_logit_softcapping"), default=0.0),
    )
    return build_target(file, config, specs)


def _sliding(file: GGUFFile, full: LayerSpec) -> LayerSpec:
    """The layers with a window: their rotary embedding is never scaled."""
    base = file.get_float(file.key("rope.freq_base_swa"), default=10000.0)
    window = read_window(file, default=0)
    if not window:
        return full
    rope = replace(full.rope, freq_base=base, freq_scale=1.0, ext_factor=0.0)
    check_rope(file, rope)
    return replace(full, window=window, rope=rope)

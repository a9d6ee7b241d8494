"""Gemma 4, dense and without per-layer embeddings (`general.architecture` = gemma4).

Sliding and full layers have head widths and rotary embeddings of their own; only full layers use
``rope_freqs``. Values are normalised without a weight, and full layers may have none: their values
are the keys as projected. Embeddings are scaled by the square root of the width.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models.base import Target, read_config, read_layer_spec, read_window
from specdec.models.layers import LayerSpec, RopeSpec
from specdec.models.loading import build_target, count_layers
from specdec.models.rope import check_rope
from specdec.options import RopeOptions


def read_spec(file: GGUFFile, rope: RopeOptions, layer: int) -> LayerSpec:
    """Block ``layer`` of a model or of its assistant."""
    block, key = f"blk.{layer}.", file.key
    spec = replace(
        read_layer_spec(file, rope, layer),
        attention_scale=1.0,
        has_qk_norm=True,
        has_value_norm=True,
        has_post_norms=True,
        has_output_scale=block + "layer_output_scale.weight" in file.tensors,
        shares_kv=block + "attn_v.weight" not in file.tensors,
        activation="gelu_tanh",
    )
    n_block = file.get_int(key("block_count"))
    if not file.get_bools(key("attention.sliding_window_pattern"), length=n_block)[layer]:
        return spec
    head_dim = file.get_int(key("attention.key_length_swa"), default=spec.head_dim)
    n_rot = file.get_int(key("rope.dimension_count_swa"), default=head_dim)
    if n_rot % 2 or not 0 < n_rot <= head_dim:
        raise ModelFileError(
            f"{file.path}: {key('rope.dimension_count_swa')} must be even and at most {head_dim}, "
            f"got {n_rot}"
        )
    base = file.get_float(key("rope.freq_base_swa"), default=10000.0)
    head_dim_v = file.get_int(key("attention.value_length_swa"), default=head_dim)
    file.check_size(key("attention.key_length_swa"), head_dim)
    file.check_size(key("attention.value_length_swa"), head_dim_v)
    sliding = RopeSpec(n_rot, base)
    check_rope(file, sliding)
    return replace(
        spec,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        rope=sliding,
        window=read_window(file),
    )


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``. Raises `UnsupportedError` for what a dense Gemma 4 does not have."""
    for suffix in (
        "embedding_length_per_layer_input",
        "attention.shared_kv_layers",
        "expert_count",
    ):
        value = file.get_int(file.key(suffix), default=0)
        if value:
            raise UnsupportedError(
                f"{file.path}: {file.key(suffix)} is {value}, expected 0; Gemma 4 models with "
                "per-layer embeddings, shared caches or experts are not supported"
            )
    specs = [read_spec(file, rope, layer) for layer in range(count_layers(file))]
    config = replace(
        read_config(file),
        embedding_scale=math.sqrt(specs[0].n_embd),
        logit_softcap=file.get_float(file.key("final_logit_softcapping"), default=0.0),
    )
    return build_target(file, config, specs)

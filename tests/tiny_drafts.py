"""Writes tiny drafts (DFlash family, EAGLE-3) for the targets of `tiny`, with random weights.

Every piece of metadata and every tensor can be replaced or left out, so that faulty files are one
argument away. A new head is one function in `HEADS`; trunks are in `tiny_backbones`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import N_VOCAB, add_vocabulary
from tiny_backbones import BACKBONES, Parts

MASK = 0


def write_dflash(
    path: Path,
    *,
    head: str = "draft-dflash",
    backbone: str = "base",
    seed: int = 0,
    n_embd: int = 32,
    n_layer: int = 2,
    block_size: int = 5,
    target_layers: tuple[int, ...] = (0, 2),
    window: int = 0,
    d2t: tuple[int, ...] = (),
    sizes: Mapping[str, int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    has_vocabulary: bool = True,
    half: bool = False,
) -> Path:
    """A draft with ``head`` on ``backbone``; returns ``path``.

    ``window`` is that of the first layer; ``d2t`` makes a reduced vocabulary with its own output;
    ``sizes`` are those of the backbone's layers. With ``half`` matrices are in float16.
    ``metadata`` and ``tensors`` replace or add entries; None leaves one out.
    """
    parts = BACKBONES[backbone](n_embd, n_layer, len(target_layers), **(sizes or {}))
    parts.metadata |= {
        "dflash.block_size": block_size,
        "dflash.target_layers": list(target_layers),
        "tokenizer.ggml.mask_token_id": MASK,
    }
    if window:
        parts.metadata["dflash.attention.sliding_window"] = window
        slides = [layer == 0 for layer in range(n_layer)]
        parts.metadata["dflash.attention.sliding_window_pattern"] = slides
    if backbone == "mistral-large4":
        parts.shapes["mask_embd.weight"] = (block_size - 1, n_embd)
    HEADS[head](parts, n_embd, len(d2t) or N_VOCAB)
    weights = _weights(parts, seed)
    if d2t:
        weights["d2t"] = np.array(d2t, dtype=np.int64)
        output = np.random.default_rng(seed + 1).standard_normal((len(d2t), n_embd))
        weights["output.weight"] = (output / np.sqrt(n_embd)).astype(np.float32)
    if half:
        for name, weight in weights.items():
            if name.endswith(".weight") and weight.ndim == 2:
                weights[name] = weight.astype(np.float16)
    _write(
        path, parts.metadata | dict(metadata or {}), weights | dict(tensors or {}), has_vocabulary
    )
    return path


def write_eagle3(
    path: Path,
    *,
    seed: int = 0,
    n_embd: int = 32,
    n_embd_target: int = 32,
    target_layers: tuple[int, ...] = (0, 2, 1),
    norm_before_fc: bool = False,
    d2t: tuple[int, ...] = (),
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    has_vocabulary: bool = True,
) -> Path:
    """An EAGLE-3 draft; returns ``path``.

    A width ``n_embd`` that is not the target's brings embeddings and an output of its own; ``d2t``
    makes a reduced vocabulary. ``metadata`` and ``tensors`` replace or add entries; None leaves one
    out.
    """
    head_dim, n_ff, n_features = 8, 2 * n_embd, 3 * n_embd_target
    keys = {
        "context_length": 512,
        "embedding_length": n_embd,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "target_layers": list(target_layers),
        "target_hidden_size": n_embd_target,
        "norm_before_fc": norm_before_fc,
    }
    parts = Parts({f"eagle3.{name}": value for name, value in keys.items()})
    parts.shapes = {
        "fc.weight": (n_embd, n_features),
        "output_norm.weight": (n_embd,),
        "blk.0.attn_norm.weight": (n_embd,),
        "blk.0.attn_norm_2.weight": (n_embd,),
        "blk.0.attn_q.weight": (4 * head_dim, 2 * n_embd),
        "blk.0.attn_k.weight": (2 * head_dim, 2 * n_embd),
        "blk.0.attn_v.weight": (2 * head_dim, 2 * n_embd),
        "blk.0.attn_output.weight": (n_embd, 4 * head_dim),
        "blk.0.ffn_norm.weight": (n_embd,),
        "blk.0.ffn_gate.weight": (n_ff, n_embd),
        "blk.0.ffn_up.weight": (n_ff, n_embd),
        "blk.0.ffn_down.weight": (n_embd, n_ff),
    }
    if norm_before_fc:
        parts.shapes["enc.output_norm.weight"] = (n_features,)
    if n_embd != n_embd_target:
        parts.shapes["token_embd.weight"] = (N_VOCAB, n_embd)
    if d2t or n_embd != n_embd_target:
        parts.shapes["output.weight"] = (len(d2t) or N_VOCAB, n_embd)
    weights = _weights(parts, seed)
    if d2t:
        weights["d2t"] = np.array(d2t, dtype=np.int64)
    everything = parts.metadata | dict(metadata or {}), weights | dict(tensors or {})
    _write(path, *everything, has_vocabulary, "eagle3")
    return path


DSPARK_RANK = 6


def _plain(parts: Parts, n_embd: int, n_rows: int) -> None:
    """No metadata and no tensors of its own."""


def _dflash2(parts: Parts, n_embd: int, n_rows: int) -> None:
    rank, kernel_size, group_size = 4, 2, 8
    parts.metadata |= {
        "dflash.selector_rank": rank,
        "dflash.selector_top_k": min(4, n_rows),
        "dflash.conv_kernel_size": kernel_size,
        "dflash.conv_group_size": group_size,
    }
    parts.shapes |= {
        "selector_predecessor.weight": (N_VOCAB, rank),
        "selector_successor.weight": (N_VOCAB, rank),
        "selector_hidden.weight": (rank, n_embd),
    }
    n_projected = 2 * kernel_size * (n_embd // group_size)
    for layer in range(parts.metadata["dflash.block_count"]):
        for branch in ("attn", "ffn"):
            parts.shapes[f"blk.{layer}.{branch}_conv_base"] = (2, kernel_size, n_embd)
            parts.shapes[f"blk.{layer}.{branch}_conv_proj.weight"] = (n_projected, n_embd)


def _dspark(parts: Parts, n_embd: int, n_rows: int) -> None:
    parts.metadata["dflash.has_confidence_head"] = True
    parts.shapes |= {
        "markov_w1.weight": (N_VOCAB, DSPARK_RANK),
        "markov_w2.weight": (n_rows, DSPARK_RANK),
        "conf_proj.weight": (1, n_embd + DSPARK_RANK),
        "conf_proj.bias": (1,),
    }


def joint_projection(name: str, n_embd: int = 32) -> dict[str, np.ndarray]:
    """The tensors that make the chain of a DSpark draft a gated one, under the name ``name``."""
    random = np.random.default_rng(7)
    weight = random.standard_normal((3 * DSPARK_RANK, n_embd + 2 * DSPARK_RANK)) / 3
    bias = random.standard_normal(3 * DSPARK_RANK)
    return {
        f"{name}.weight": weight.astype(np.float32),
        f"{name}.bias": bias.astype(np.float32),
    }


def _lilicorr(parts: Parts, n_embd: int, n_rows: int) -> None:
    width, n_heads, n_layer, n_candidates, n_ff, n_factor = 24, 2, 2, min(4, n_rows), 20, 8
    parts.metadata |= {
        "lilicorr.hidden_size": width,
        "lilicorr.candidate_topk": n_candidates,
        "lilicorr.num_heads": n_heads,
        "lilicorr.num_layers": n_layer,
        "lilicorr.factor_dim": n_factor,
        "lilicorr.mlp_hidden_size": n_ff,
        "lilicorr.vector_eps": 1e-6,
        "lilicorr.logit_scale": 6.0,
    }
    n_slots, first = parts.metadata["dflash.block_size"] - 1, parts.metadata["dflash.block_count"]
    n_nodes = n_slots * n_candidates
    linear = {
        "lilicorr.token_proj": (width, n_embd),
        "lilicorr.pass_hidden_proj": (width, n_embd),
        "lilicorr.context_proj": (width, n_embd),
        "lilicorr.factor_input_proj": (width, 3 * width),
        "lilicorr.out_head": (n_factor, width),
        "lilicorr.in_head": (n_factor, width),
        "lilicorr.anchor_out_head": (n_factor, width),
        f"blk.{first + n_layer}.ffn_up": (width, 5),
        f"blk.{first + n_layer}.ffn_down": (width, width),
    }
    parts.shapes |= {
        "lilicorr.slot_embedding.weight": (n_slots, width),
        "lilicorr.rank_embedding.weight": (n_candidates, width),
        "lilicorr.attention_bias.bias": (n_heads, n_nodes, n_nodes),
        "lilicorr.output_norm.weight": (width,),
        "lilicorr.anchor_norm.weight": (width,),
        f"blk.{first + n_layer}.ffn_norm.weight": (5,),
        f"blk.{first + n_layer}.ffn_norm.bias": (5,),
    }
    for layer in range(n_layer):
        block = f"blk.{first + layer}"
        parts.shapes |= {
            f"{block}.attn_norm.weight": (width,),
            f"{block}.ffn_norm.weight": (width,),
        }
        linear |= {
            f"lilicorr.layers.{layer}.attn.in_proj": (3 * width, width),
            f"{block}.attn_output": (width, width),
            f"{block}.ffn_up": (n_ff, width),
            f"{block}.ffn_down": (width, n_ff),
        }
    for name, shape in linear.items():
        parts.shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


HEADS: dict[str, Callable[[Parts, int, int], None]] = {
    "draft-dflash": _plain,
    "draft-dspark": _dspark,
    "draft-dflash2": _dflash2,
    "draft-lilicorr": _lilicorr,
}
"""Spec type -> a function that adds a head's metadata and tensor shapes, given the width and the
number of rows of the draft's vocabulary."""


def _weights(parts: Parts, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in parts.shapes.items():
        noise = random.standard_normal(shape)
        if len(shape) == 1:
            noise = 1 + 0.1 * noise
        else:
            noise *= 0.8 / np.sqrt(shape[-1])
        weights[name] = noise.astype(np.float32)
    return weights


def _write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | None],
    has_vocabulary: bool,
    architecture: str = "dflash",
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int64(key, value) if value < 0 else writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    if has_vocabulary:
        add_vocabulary(writer)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Drafts with random weights and real sizes, for heads of which there is no trained draft.

They are as wide as the target's own layers and have the shape of the drafts in `models/`. What they
draft is noise, so they show what a round costs, not what it gains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specdec.drafters.selection import draft_type
from specdec.gguf_file import GGUFFile
from specdec.train.draft_file import fresh_weights, output_rows, write_draft
from specdec.train.shape import default_shape

HEADS = ("draft-dflash", "draft-dspark", "draft-dflash2", "draft-lilicorr", "draft-eagle3")
N_VOCAB = 8192
"""Rows of a draft's own output matrix: the last tokens, as the first ones are control tokens, which
no verifier accepts at random."""
TYPE = "Q4_0"
"""Block type of all matrices that it fits."""
N_BLOCKS = 4096
"""Random blocks of weights that are made; larger matrices repeat them."""


def write_missing(folder: Path, target: GGUFFile, drafts: list[Path]) -> list[Path]:
    """A file in ``folder`` for every head that ``drafts`` have not; raises `UnsupportedError`."""
    present = set()
    for path in drafts:
        with GGUFFile.open(path) as file:
            present.add(draft_type(file))
    missing = {head: folder / f"{head}.gguf" for head in HEADS if head not in present}
    for head, path in missing.items():
        if head == "draft-eagle3":
            write_eagle3(path, target)
        else:
            write_family(path, target, head)
    return list(missing.values())


def write_family(path: Path, target: GGUFFile, head: str) -> None:
    """A DFlash draft of two layers and blocks of eight tokens."""
    n_vocab = target.info("token_embd.weight").shape[0]
    d2t = tuple(range(n_vocab - N_VOCAB, n_vocab)) if n_vocab > N_VOCAB else ()
    shape = default_shape(target, head, d2t=d2t, mask_token=0)
    weights = fresh_weights(shape) | output_rows(target, shape)
    write_draft(path, target, shape, weights, ggml_type=TYPE)


def write_eagle3(path: Path, target: GGUFFile) -> None:
    """An EAGLE-3 draft: one layer, three taps."""
    sizes = _sizes(target)
    n_embd, n_ff, n_layer = sizes["embedding_length"], sizes["feed_forward_length"], _depth(target)
    n_vocab = target.info("token_embd.weight").shape[0]
    n_rows = min(N_VOCAB, n_vocab)
    n_q, n_kv = _attention_widths(sizes)
    keys = sizes | {
        "block_count": 1,
        "target_layers": [min(2, n_layer - 1), n_layer // 2, max(n_layer - 3, 0)],
        "target_hidden_size": n_embd,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (n_embd, 3 * n_embd),
        "output_norm": (n_embd,),
        "output": (n_rows, n_embd),
        "blk.0.attn_norm": (n_embd,),
        "blk.0.attn_norm_2": (n_embd,),
        "blk.0.attn_q": (n_q, 2 * n_embd),
        "blk.0.attn_k": (n_kv, 2 * n_embd),
        "blk.0.attn_v": (n_kv, 2 * n_embd),
        "blk.0.attn_output": (n_embd, n_q),
        "blk.0.ffn_norm": (n_embd,),
        "blk.0.ffn_gate": (n_ff, n_embd),
        "blk.0.ffn_up": (n_ff, n_embd),
        "blk.0.ffn_down": (n_embd, n_ff),
    }
    _write(
        path,
        "eagle3",
        target,
        keys,
        shapes,
        d2t=np.arange(n_vocab - n_rows, n_vocab, dtype=np.int64),
    )


def write_mtp_target(path: Path, target: GGUFFile) -> None:
    """A target of the size of ``target`` with one MTP layer, which llama models cannot have."""
    sizes = _sizes(target)
    n_embd, n_ff, n_layer = sizes["embedding_length"], sizes["feed_forward_length"], _depth(target)
    n_q, n_kv = _attention_widths(sizes)
    head_dim = sizes["attention.key_length"]
    keys = sizes | {
        "block_count": n_layer + 1,
        "nextn_predict_layers": 1,
        "expert_feed_forward_length": n_ff,
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (n_embd,),
        "attn_q": (n_q, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
        "attn_output": (n_embd, n_q),
        "ffn_norm": (n_embd,),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    head = {
        "nextn.eh_proj": (n_embd, 2 * n_embd),
        "nextn.enorm": (n_embd,),
        "nextn.hnorm": (n_embd,),
        "nextn.shared_head_norm": (n_embd,),
    }
    shapes = {
        "token_embd": (target.info("token_embd.weight").shape[0], n_embd),
        "output_norm": (n_embd,),
    }
    for block in range(n_layer + 1):
        parts = layer | head if block == n_layer else layer
        shapes |= {f"blk.{block}.{name}": shape for name, shape in parts.items()}
    _write(path, "hy_v3", target, keys, shapes)


def _sizes(target: GGUFFile) -> dict[str, Any]:
    """The keys that a layer like the target's needs."""
    shape = default_shape(target, "draft-dflash", mask_token=0)
    return {
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "rope.freq_base": shape.freq_base,
    }


def _depth(target: GGUFFile) -> int:
    return target.get_int(target.key("block_count"))


def _attention_widths(sizes: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of a query matrix and of a key or value matrix."""
    head_dim: int = sizes["attention.key_length"]
    return sizes["attention.head_count"] * head_dim, sizes["attention.head_count_kv"] * head_dim


def _write(
    path: Path,
    architecture: str,
    target: GGUFFile,
    keys: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    d2t: np.ndarray[Any, np.dtype[np.int64]] | None = None,
) -> None:
    """``shapes`` are the tensors before `.weight`, rows first; the tokenizer is the target's."""
    writer = gguf.GGUFWriter(path, architecture)
    own = {f"{architecture}.{key}": value for key, value in keys.items()}
    tokenizer = {k: v for k, v in target.metadata.items() if k.startswith("tokenizer.")}
    for key, value in (own | tokenizer).items():
        _add(writer, key, value)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            kind = gguf.GGMLQuantizationType[TYPE if shape[1] % 32 == 0 else "F32"]
            writer.add_tensor(f"{name}.weight", _random(shape, kind), raw_dtype=kind)
    if d2t is not None:
        writer.add_tensor("d2t", d2t)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """A matrix [rows, width] of a block type as bytes, or of float32; its rows repeat."""
    n_rows = min(shape[0], max(1, N_BLOCKS * 32 // shape[1]))
    rows = np.random.default_rng(0).standard_normal((n_rows, shape[1])) / math.sqrt(shape[1])
    data = gguf.quants.quantize(rows.astype(np.float32), kind)
    return np.resize(data, (shape[0], data.shape[1]))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)

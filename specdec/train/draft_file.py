"""Draft files: freshly initialised ones to start from, and trained ones to keep.

A draft under training is read by the same loader as any other, so a new one begins as a file with
float32 weights that do nothing yet.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from specdec.drafters.dflash.lilicorr_config import lilicorr_shapes
from specdec.errors import SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.train.shape import DraftShape

PREFIX = "dflash."
Shapes = dict[str, tuple[int, ...]]
FLOAT32_ONLY = ("conv_base", "slot_embedding.weight", "rank_embedding.weight", "conf_proj.weight")
"""Ends of the names of matrices that llama.cpp adds or multiplies element by element, and of one
that is a single row."""
SMALL = 0.1
"""A draft of at most this share of its target's size may have five bits a weight."""
STANDARD_DEVIATION = 0.02
"""Of the matrices of a fresh draft."""


def draft_metadata(shape: DraftShape) -> dict[str, Any]:
    """The keys of a draft (reference: GGUF notes on the DFlash family), without the tokenizer."""
    keys: dict[str, Any] = {
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "attention.causal": False,
        "rope.freq_base": shape.freq_base,
        "rope.dimension_count": shape.head_dim,
        "block_size": shape.block_size,
        "target_layers": list(shape.target_layers),
    }
    if shape.head == "draft-dspark":
        keys |= {"sample_from_anchor": True, "has_confidence_head": True}
    if shape.head == "draft-dflash2":
        keys |= {
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.n_candidates,
            "conv_kernel_size": shape.kernel_size,
            "conv_group_size": shape.group_size,
        }
    metadata = {PREFIX + key: value for key, value in keys.items()}
    if shape.lilicorr is not None:
        sizes = shape.lilicorr
        metadata |= {
            "lilicorr.hidden_size": sizes.width,
            "lilicorr.candidate_topk": sizes.n_candidates,
            "lilicorr.num_heads": sizes.n_head,
            "lilicorr.num_layers": sizes.n_layer,
            "lilicorr.mlp_hidden_size": sizes.n_ff,
            "lilicorr.factor_dim": sizes.n_factor,
            "lilicorr.vector_eps": sizes.vector_eps,
            "lilicorr.logit_scale": sizes.logit_scale,
        }
    return metadata | {"tokenizer.ggml.mask_token_id": shape.mask_token}


def draft_shapes(shape: DraftShape) -> Shapes:
    """Names and shapes of a draft's tensors, rows first; without `d2t` and `output`."""
    n_embd, n_ff = shape.n_embd, shape.n_ff
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    shapes: Shapes = {
        "fc.weight": (n_embd, len(shape.target_layers) * n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
    }
    for layer in range(shape.n_layer):
        block = {
            "attn_norm": (n_embd,),
            "attn_q": (n_q, n_embd),
            "attn_k": (n_kv, n_embd),
            "attn_v": (n_kv, n_embd),
            "attn_q_norm": (shape.head_dim,),
            "attn_k_norm": (shape.head_dim,),
            "attn_output": (n_embd, n_q),
            "ffn_norm": (n_embd,),
            "ffn_gate": (n_ff, n_embd),
            "ffn_up": (n_ff, n_embd),
            "ffn_down": (n_embd, n_ff),
        }
        shapes |= {f"blk.{layer}.{name}.weight": size for name, size in block.items()}
    return shapes | _HEADS[shape.head](shape)


def _plain(shape: DraftShape) -> Shapes:
    """A plain head has no tensors of its own."""
    return {}


def _dspark(shape: DraftShape) -> Shapes:
    return {
        "markov_w1.weight": (shape.n_vocab, shape.markov_rank),
        "markov_w2.weight": (shape.n_rows, shape.markov_rank),
        "conf_proj.weight": (1, shape.n_embd + shape.markov_rank),
        "conf_proj.bias": (1,),
    }


def _dflash2(shape: DraftShape) -> Shapes:
    n_projected = 2 * shape.kernel_size * (shape.n_embd // shape.group_size)
    shapes: Shapes = {
        "selector_predecessor.weight": (shape.n_vocab, shape.selector_rank),
        "selector_successor.weight": (shape.n_vocab, shape.selector_rank),
        "selector_hidden.weight": (shape.selector_rank, shape.n_embd),
    }
    for layer in range(shape.n_layer):
        for branch in ("attn", "ffn"):
            name = f"blk.{layer}.{branch}_conv"
            shapes[f"{name}_base"] = (2, shape.kernel_size, shape.n_embd)
            shapes[f"{name}_proj.weight"] = (n_projected, shape.n_embd)
    return shapes


def _lilicorr(shape: DraftShape) -> Shapes:
    assert shape.lilicorr is not None
    return lilicorr_shapes(shape.lilicorr, shape.n_embd, shape.block_size, shape.n_layer)


_HEADS: dict[str, Callable[[DraftShape], Shapes]] = {
    "draft-dflash": _plain,
    "draft-dspark": _dspark,
    "draft-dflash2": _dflash2,
    "draft-lilicorr": _lilicorr,
}


def fresh_weights(shape: DraftShape, seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights with which every head starts as plain DFlash.

    Matrices are normal with `STANDARD_DEVIATION`, norms 1, biases 0, convolutions the identity;
    one side of each product that a head adds to the logits is 0, so that it starts without effect.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _fresh(name, size, generator) for name, size in sorted(draft_shapes(shape).items())
    }


def _fresh(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(size)
    if name.endswith("conv_base"):
        base = torch.zeros(size)
        base[:, 0] = 1.0
        return base
    zero = ("bias", "conv_proj.weight", "markov_w2.weight", "selector_successor.weight")
    if name.endswith((*zero, "_embedding.weight", "conf_proj.weight")):
        return torch.zeros(size)
    if name == "selector_hidden.weight":
        return torch.randn(size, generator=generator) / math.sqrt(size[1])
    return torch.randn(size, generator=generator) * STANDARD_DEVIATION


def write_fresh_draft(path: Path, target: GGUFFile, shape: DraftShape, seed: int = 0) -> None:
    """Writes an untrained draft for ``target`` with float32 weights. Raises `SpecdecError`."""
    write_draft(path, target, shape, fresh_weights(shape, seed) | output_rows(target, shape))


def output_rows(target: GGUFFile, shape: DraftShape) -> dict[str, Tensor]:
    """`d2t` and the target's rows of the output matrix for it; nothing without a map."""
    if not shape.d2t:
        return {}
    name = "output.weight" if "output.weight" in target.tensors else "token_embd.weight"
    d2t = torch.tensor(shape.d2t)
    return {"d2t": d2t, "output.weight": target.load(name)[d2t].contiguous()}


def write_draft(
    path: Path,
    target: GGUFFile,
    shape: DraftShape,
    weights: Mapping[str, Tensor],
    *,
    ggml_type: str = "F32",
    name: str = "",
) -> None:
    """Writes a draft with the tokenizer of ``target``; ``path`` appears when it is complete.

    Matrices become ``ggml_type`` (any type that gguf-py can quantise to) where their width allows;
    everything else stays float32. Raises `SpecdecError` if the file cannot be written.
    """
    unfinished = path.with_name(path.name + ".new")
    try:
        _write(unfinished, target, shape, weights, ggml_type, name or path.stem)
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        reason = error.strerror or "no space is left"  # numpy does not say why
        raise SpecdecError(f"{path}: cannot be written: {reason}") from None
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _write(
    path: Path,
    target: GGUFFile,
    shape: DraftShape,
    weights: Mapping[str, Tensor],
    ggml_type: str,
    name: str,
) -> None:
    writer = gguf.GGUFWriter(path, PREFIX[:-1])
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(_file_type(ggml_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in _all_metadata(target, shape):
        _add(writer, key, value)
    for tensor_name, tensor in weights.items():
        if not tensor.is_floating_point():
            writer.add_tensor(tensor_name, tensor.numpy())
            continue
        values = tensor.detach().float().numpy()
        chosen = gguf.GGMLQuantizationType[pick_type(tensor_name, values.shape, ggml_type)]
        data = gguf.quants.quantize(values, chosen)
        writer.add_tensor(tensor_name, data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pick_outtype(wanted: str, weights: Mapping[str, Tensor], target: GGUFFile) -> str:
    """The block type for "auto": Q5_0 where the draft stays small beside its target, else Q4_0."""
    if wanted != "auto":
        return wanted.upper()
    n_values = sum(tensor.numel() for tensor in weights.values())
    return "Q5_0" if n_values * 5.5 / 8 <= SMALL * target.n_bytes else "Q4_0"


def pick_type(name: str, size: tuple[int, ...], ggml_type: str) -> str:
    """The block type of one tensor: ``ggml_type`` for matrices it fits, else float32."""
    if len(size) != 2 or name.endswith(FLOAT32_ONLY):
        return "F32"
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[ggml_type]][0]
    return ggml_type if size[-1] % block == 0 else "F32"


def _file_type(ggml_type: str) -> int:
    names = gguf.LlamaFileType.__members__
    return int(names.get(f"MOSTLY_{ggml_type}", gguf.LlamaFileType.ALL_F32))


def _all_metadata(target: GGUFFile, shape: DraftShape) -> Iterator[tuple[str, Any]]:
    own = draft_metadata(shape)
    yield from own.items()
    for key in target.metadata:
        if (key.startswith("tokenizer.") or key == "general.license") and key not in own:
            yield key, target.metadata[key]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds one piece of metadata in the type that it has in Python."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)

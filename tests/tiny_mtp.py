"""Writes tiny targets with MTP layers, and the Gemma 4 assistant, with random weights.

Widths are those of `tiny`. Metadata and tensors can be replaced or left out, so that faulty files
are one argument away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import N_VOCAB, add_vocabulary

N_EMBD, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF, N_LAYER = 32, 4, 2, 8, 64, 2
FULL_HEAD_DIM = 16
"""Head width of Gemma 4's full layers."""
ASSISTANT_WIDTH = 24

Shapes = dict[str, tuple[int, ...]]


def write_mtp(
    path: Path,
    architecture: str,
    *,
    n_heads: int = 1,
    seed: int = 0,
    sharpness: float = 3.0,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """A target of two layers and ``n_heads`` MTP layers; ``gemma4`` has none. Returns ``path``.

    ``metadata`` (keys without the architecture) and ``tensors`` replace or add entries; None leaves
    one out.
    """
    if architecture == "gemma4":
        n_heads = 0
    n_block = N_LAYER + n_heads
    values = _sizes(N_EMBD, n_block) | {"nextn_predict_layers": n_heads}
    shapes: Shapes = {
        "token_embd.weight": (N_VOCAB, N_EMBD),
        "output_norm.weight": (N_EMBD,),
        "output.weight": (N_VOCAB, N_EMBD),
    }
    for layer in range(n_block):
        block = BLOCKS[architecture](values, layer)
        if layer >= N_LAYER:
            block |= {
                "nextn.eh_proj.weight": (N_EMBD, 2 * N_EMBD),
                "nextn.enorm.weight": (N_EMBD,),
                "nextn.hnorm.weight": (N_EMBD,),
                "nextn.shared_head_norm.weight": (N_EMBD,),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    weights = _weights(shapes, seed)
    weights["output.weight"] *= sharpness / 0.8
    _write(path, architecture, values | dict(metadata or {}), weights | dict(tensors or {}))
    return path


def write_assistant(path: Path, *, seed: int = 1, width_out: int = N_EMBD) -> Path:
    """An assistant of two layers for the ``gemma4`` target; returns ``path``."""
    values = _sizes(ASSISTANT_WIDTH, 2)
    values |= {"nextn_predict_layers": 2, "embedding_length_out": width_out}
    shapes: Shapes = {
        "token_embd.weight": (N_VOCAB, ASSISTANT_WIDTH),
        "output_norm.weight": (ASSISTANT_WIDTH,),
        "nextn.pre_projection.weight": (ASSISTANT_WIDTH, 2 * N_EMBD),
        "nextn.post_projection.weight": (N_EMBD, ASSISTANT_WIDTH),
    }
    for layer in range(2):
        block = _gemma4(values, layer, ASSISTANT_WIDTH)
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            block.pop(f"{name}.weight", None)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    _write(path, "gemma4-assistant", values, _weights(shapes, seed))
    return path


def _sizes(width: int, n_block: int) -> dict[str, Any]:
    return {
        "context_length": 512,
        "embedding_length": width,
        "block_count": n_block,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD_KV,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }


def _attention(width: int, head_dim: int = HEAD_DIM, head_dim_v: int = HEAD_DIM) -> Shapes:
    return {
        "attn_norm.weight": (width,),
        "attn_q.weight": (N_HEAD * head_dim, width),
        "attn_k.weight": (N_HEAD_KV * head_dim, width),
        "attn_v.weight": (N_HEAD_KV * head_dim_v, width),
        "attn_output.weight": (width, N_HEAD * head_dim_v),
    }


def _qk_norms(head_dim: int = HEAD_DIM) -> Shapes:
    return {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}


def _dense(width: int, norm: str = "ffn_norm") -> Shapes:
    return {
        f"{norm}.weight": (width,),
        "ffn_gate.weight": (N_FF, width),
        "ffn_up.weight": (N_FF, width),
        "ffn_down.weight": (width, N_FF),
    }


def _hy_v3(values: dict[str, Any], layer: int) -> Shapes:
    """Layer 1 has experts, one of them shared."""
    values |= {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 12}
    block = _attention(N_EMBD) | _qk_norms() | _dense(N_EMBD)
    if layer != 1:
        return block
    for part in ("gate", "up", "down"):
        shape = block.pop(f"ffn_{part}.weight")
        shape = tuple(12 if size == N_FF else size for size in shape)
        block |= {f"ffn_{part}_exps.weight": (5, *shape), f"ffn_{part}_shexp.weight": shape}
    return block | {"ffn_gate_inp.weight": (5, N_EMBD), "exp_probs_b": (5,)}


def _mimo2(values: dict[str, Any], layer: int) -> Shapes:
    """Narrow values; all layers but the first slide; MTP layers have one matrix for q, k and v."""
    values |= {
        "attention.value_length": 4,
        "attention.value_scale": 0.7,
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [i > 0 for i in range(values["block_count"])],
        "expert_feed_forward_length": 12,
    }
    block = _attention(N_EMBD, head_dim_v=4) | _dense(N_EMBD) | {"attn_sinks.weight": (N_HEAD,)}
    if layer < N_LAYER:
        return block
    height = sum(block.pop(f"attn_{part}.weight")[0] for part in "qkv")
    return block | {"attn_qkv.weight": (height, N_EMBD)}


def _qwen35(values: dict[str, Any], layer: int) -> Shapes:
    """A delta net, then gated attention."""
    n, n_key, n_value, kernel = 8, 2, 4, 4
    values |= {
        "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 2,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": n_value * n,
        "ssm.state_size": n,
        "ssm.time_step_rank": n_value,
        "ssm.group_count": n_key,
    }
    block = _dense(N_EMBD, "post_attention_norm")
    if layer > 0:
        block |= _attention(N_EMBD) | _qk_norms()
        return block | {"attn_q.weight": (2 * N_HEAD * HEAD_DIM, N_EMBD)}
    n_channels = (2 * n_key + n_value) * n
    return block | {
        "attn_norm.weight": (N_EMBD,),
        "attn_qkv.weight": (n_channels, N_EMBD),
        "attn_gate.weight": (n_value * n, N_EMBD),
        "ssm_conv1d.weight": (n_channels, kernel),
        "ssm_dt.bias": (n_value,),
        "ssm_a": (n_value,),
        "ssm_beta.weight": (n_value, N_EMBD),
        "ssm_alpha.weight": (n_value, N_EMBD),
        "ssm_norm.weight": (n,),
        "ssm_out.weight": (N_EMBD, n_value * n),
    }


def _gemma4(values: dict[str, Any], layer: int, width: int = N_EMBD) -> Shapes:
    """A sliding layer, then a full one with wider heads and keys as values."""
    values |= {
        "attention.key_length": FULL_HEAD_DIM,
        "attention.value_length": FULL_HEAD_DIM,
        "attention.key_length_swa": HEAD_DIM,
        "attention.value_length_swa": HEAD_DIM,
        "rope.dimension_count": FULL_HEAD_DIM,
        "rope.dimension_count_swa": HEAD_DIM,
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [True, False],
        "final_logit_softcapping": 15.0,
    }
    head_dim = FULL_HEAD_DIM if layer else HEAD_DIM
    block = _attention(width, head_dim, head_dim) | _qk_norms(head_dim) | _dense(width)
    if layer:
        del block["attn_v.weight"]
    norms = {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    return block | norms | {"layer_output_scale.weight": (1,)}


BLOCKS: dict[str, Callable[[dict[str, Any], int], Shapes]] = {
    "hy_v3": _hy_v3,
    "mimo2": _mimo2,
    "qwen35": _qwen35,
    "gemma4": _gemma4,
}
"""Architecture -> a function that gives a block's tensors and adds its metadata."""


def _weights(shapes: Shapes, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape)
        if name.endswith("ssm_a"):
            noise = -np.exp(noise)
        elif len(shape) == 1:
            noise = 1 + 0.1 * noise
        elif name != "token_embd.weight":
            noise *= 0.8 / np.sqrt(shape[-1])
        weights[name] = noise.astype(np.float32)
    return weights


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | None],
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for suffix, value in metadata.items():
        key = f"{architecture}.{suffix}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    add_vocabulary(writer)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

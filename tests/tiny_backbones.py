"""Metadata and tensor shapes of tiny DFlash trunks, one function a backbone.

``sizes`` replaces the numbers that `SIZES` lists for a backbone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Parts:
    """What goes into a file: metadata by key and tensor shapes by name."""

    metadata: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


SIZES: dict[str, dict[str, int]] = {
    "deepseek4": {
        "n_head": 4,
        "head_dim": 12,
        "n_rot": 8,
        "q_rank": 10,
        "n_groups": 2,
        "rank": 8,
        "n_expert": 4,
        "n_shared": 1,
        "n_ff": 16,
    },
    "mistral-large4": {
        "n_head": 4,
        "rank": 16,
        "n_rot": 6,
        "n_rest": 8,
        "head_dim_v": 10,
        "n_ff": 48,
    },
}
"""What can be changed about a backbone's layers; DeepSeek-V4.1 has those of V4."""


def _trunk(n_embd: int, n_layer: int, n_taps: int, **_: int) -> Parts:
    head_dim, n_ff = n_embd // 4, 2 * n_embd
    parts = Parts()
    for name, value in (
        ("context_length", 512),
        ("embedding_length", n_embd),
        ("block_count", n_layer),
        ("feed_forward_length", n_ff),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.freq_base", 10000.0),
    ):
        parts.metadata[f"dflash.{name}"] = value
    parts.shapes = {
        "fc.weight": (n_embd, n_taps * n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
    }
    for layer in range(n_layer):
        parts.shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (n_embd,),
                "attn_q": (n_embd, n_embd),
                "attn_k": (n_embd // 2, n_embd),
                "attn_v": (n_embd // 2, n_embd),
                "attn_output": (n_embd, n_embd),
                "attn_q_norm": (head_dim,),
                "attn_k_norm": (head_dim,),
                "ffn_norm": (n_embd,),
                "ffn_gate": (n_ff, n_embd),
                "ffn_up": (n_ff, n_embd),
                "ffn_down": (n_embd, n_ff),
            }.items()
        }
    return parts


def _deepseek4(n_embd: int, n_layer: int, n_taps: int, **sizes: int) -> Parts:
    sizes = SIZES["deepseek4"] | sizes
    n_head, head_dim, q_rank = sizes["n_head"], sizes["head_dim"], sizes["q_rank"]
    n_groups, rank, n_expert = sizes["n_groups"], sizes["rank"], sizes["n_expert"]
    n_ff, n_shared, n_streams = sizes["n_ff"], sizes["n_shared"], 4
    parts = Parts()
    for name, value in (
        ("context_length", 512),
        ("embedding_length", n_embd),
        ("block_count", n_layer),
        ("attention.head_count", n_head),
        ("attention.head_count_kv", 1),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("attention.sliding_window", 9),
        ("attention.q_lora_rank", q_rank),
        ("attention.output_group_count", n_groups),
        ("attention.output_lora_rank", rank),
        ("rope.freq_base", 10000.0),
        ("rope.dimension_count", sizes["n_rot"]),
        ("hyper_connection.count", n_streams),
        ("hyper_connection.sinkhorn_iterations", 3),
        ("hyper_connection.epsilon", 1e-6),
        ("expert_count", n_expert),
        ("expert_used_count", 2),
        ("expert_shared_count", n_shared),
        ("expert_feed_forward_length", n_ff),
        ("expert_weights_scale", 1.5),
        ("expert_weights_norm", True),
        ("expert_gating_func", 4),
        ("swiglu_clamp_exp", 2.0),
    ):
        parts.metadata[f"dflash.{name}"] = value
    parts.shapes = {
        "fc.weight": (n_embd, n_taps * n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
        "output_hc_fn.weight": (n_streams, n_streams * n_embd),
        "output_hc_base.weight": (n_streams,),
        "output_hc_scale.weight": (1,),
    }
    n_mix = (2 + n_streams) * n_streams
    for layer in range(n_layer):
        shapes = {
            "attn_norm": (n_embd,),
            "attn_sinks": (n_head,),
            "attn_q_a": (q_rank, n_embd),
            "attn_q_a_norm": (q_rank,),
            "attn_q_b": (n_head * head_dim, q_rank),
            "attn_kv": (head_dim, n_embd),
            "attn_kv_a_norm": (head_dim,),
            "attn_output_a": (n_groups * rank, n_head * head_dim // n_groups),
            "attn_output_b": (n_embd, n_groups * rank),
            "ffn_norm": (n_embd,),
            "ffn_gate_inp": (n_expert, n_embd),
            "ffn_gate_exps": (n_expert, n_ff, n_embd),
            "ffn_up_exps": (n_expert, n_ff, n_embd),
            "ffn_down_exps": (n_expert, n_embd, n_ff),
            "ffn_gate_shexp": (n_ff * n_shared, n_embd),
            "ffn_up_shexp": (n_ff * n_shared, n_embd),
            "ffn_down_shexp": (n_embd, n_ff * n_shared),
        }
        for branch in ("attn", "ffn"):
            shapes[f"hc_{branch}_fn"] = (n_mix, n_streams * n_embd)
            shapes[f"hc_{branch}_base"] = (n_mix,)
            shapes[f"hc_{branch}_scale"] = (3,)
        parts.shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        parts.shapes[f"blk.{layer}.exp_probs_b.bias"] = (n_expert,)
    return parts


def _deepseek41(n_embd: int, n_layer: int, n_taps: int, **sizes: int) -> Parts:
    parts = _deepseek4(n_embd, n_layer, n_taps, **sizes)
    parts.metadata["dflash.hyper_connection.single_pass"] = True
    for name in ("fn", "base", "scale"):
        del parts.shapes[f"output_hc_{name}.weight"]
    return parts


def _mistral_large4(n_embd: int, n_layer: int, n_taps: int, **sizes: int) -> Parts:
    sizes = SIZES["mistral-large4"] | sizes
    n_head, rank, n_rot = sizes["n_head"], sizes["rank"], sizes["n_rot"]
    n_rest, head_dim_v, n_ff = sizes["n_rest"], sizes["head_dim_v"], sizes["n_ff"]
    parts = Parts()
    for name, value in (
        ("context_length", 512),
        ("embedding_length", n_embd),
        ("block_count", n_layer),
        ("feed_forward_length", n_ff),
        ("attention.head_count", n_head),
        ("attention.head_count_kv", 1),
        ("attention.kv_lora_rank", rank),
        ("attention.key_length", rank + n_rot),
        ("attention.value_length", rank),
        ("attention.key_length_mla", n_rest + n_rot),
        ("attention.value_length_mla", head_dim_v),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("attention.sliding_window", 9),
        ("rope.freq_base", 10000.0),
        ("rope.dimension_count", n_rot),
    ):
        parts.metadata[f"dflash.{name}"] = value
    parts.shapes = {
        "fc.weight": (n_embd, n_taps * n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
    }
    for layer in range(n_layer):
        parts.shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (n_embd,),
                "attn_q": (n_head * (n_rest + n_rot), n_embd),
                "attn_kv_a_mqa": (rank + n_rot, n_embd),
                "attn_kv_a_norm": (rank,),
                "attn_k_b": (n_head, rank, n_rest),
                "attn_v_b": (n_head, head_dim_v, rank),
                "attn_output": (n_embd, n_head * head_dim_v),
                "ffn_norm": (n_embd,),
                "ffn_gate": (n_ff, n_embd),
                "ffn_up": (n_ff, n_embd),
                "ffn_down": (n_embd, n_ff),
            }.items()
        }
    return parts


BACKBONES: dict[str, Callable[..., Parts]] = {
    "base": _trunk,
    "deepseek4": _deepseek4,
    "deepseek4.1": _deepseek41,
    "mistral-large4": _mistral_large4,
}
"""Name -> the trunk's metadata and tensor shapes, given width, layers, taps and sizes."""

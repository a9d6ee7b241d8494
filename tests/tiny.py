"""Writes tiny GGUF targets with random float32 weights in milliseconds.

The vocabulary is bytes: ids 0 to 2 are `<unk>`, `<s>`, `<end>`, id 3 + b is the byte b.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_VOCAB = 259
FIRST_BYTE = 3
END = 2
"""The default end token."""


def write_target(
    path: Path,
    *,
    architecture: str = "llama",
    seed: int = 0,
    n_embd: int = 32,
    n_layer: int = 2,
    eos_id: int = END,
    n_ctx: int = 512,
    sharpness: float = 3.0,
    memoryless: bool = False,
    negated: bool = False,
) -> Path:
    """A `llama` or `qwen3` file; returns ``path``.

    ``sharpness`` is roughly the standard deviation of the logits. ``memoryless``: the next token's
    distribution is the same everywhere. ``negated``: the same model with its logits negated.
    """
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, n_embd, n_layer, n_ctx)
    add_vocabulary(writer, eos_id)
    for name, values in _weights(architecture, seed, n_embd, n_layer, sharpness).items():
        if memoryless and name == "token_embd.weight":
            values[:] = values[0]
        if memoryless and name.endswith(("attn_output.weight", "ffn_down.weight")):
            values[:] = 0
        writer.add_tensor(name, -values if negated and name == "output.weight" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, n_embd: int, n_layer: int, n_ctx: int) -> None:
    writer.add_block_count(n_layer)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(n_embd // 4)
    writer.add_value_length(n_embd // 4)
    writer.add_context_length(n_ctx)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)


def add_vocabulary(writer: gguf.GGUFWriter, eos_id: int = END) -> None:
    """The byte vocabulary."""
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos_id)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _weights(
    architecture: str, seed: int, n_embd: int, n_layer: int, sharpness: float
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    head_dim, n_ff = n_embd // 4, 2 * n_embd
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(n_layer):
        block = {
            "attn_norm": (n_embd,),
            "attn_q": (n_embd, n_embd),
            "attn_k": (n_embd // 2, n_embd),
            "attn_v": (n_embd // 2, n_embd),
            "attn_output": (n_embd, n_embd),
            "ffn_norm": (n_embd,),
            "ffn_gate": (n_ff, n_embd),
            "ffn_up": (n_ff, n_embd),
            "ffn_down": (n_embd, n_ff),
        }
        if architecture == "qwen3":
            block |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes |= {"token_embd.weight": (N_VOCAB, n_embd), "output_norm.weight": (n_embd,)}
    shapes["output.weight"] = (N_VOCAB, n_embd)
    weights = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape)
        if len(shape) == 1:
            noise = 1 + 0.1 * noise
        elif name == "output.weight":
            noise *= sharpness / np.sqrt(n_embd)
        elif name != "token_embd.weight":
            noise *= 0.8 / np.sqrt(shape[1])
        weights[name] = noise.astype(np.float32)
    return weights

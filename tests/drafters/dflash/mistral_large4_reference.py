"""A Mistral Large 4 draft trunk in float64 numpy, after llama.cpp's `graph_mistral_large4`.

The whole block at once, heads and positions as axes; nothing is shared with the code under test.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specdec.gguf_file import GGUFFile

Array = NDArray[np.float64]


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class PlainMistralLarge4:
    """Injection, block pass and soft-capped logits."""

    def __init__(self, file: GGUFFile, table: str = "mask_embd") -> None:
        self.file = file
        self.weights = {name: file.load(name).double().numpy() for name in file.tensors}
        self.masks = self.weights[f"{table}.weight"]
        self.n_layer = file.get_int("dflash.block_count")
        self.n_head = file.get_int("dflash.attention.head_count")
        self.n_rot = file.get_int("dflash.rope.dimension_count")
        self.rank = file.get_int("dflash.attention.kv_lora_rank")
        self.head_dim = file.get_int("dflash.attention.key_length_mla")
        self.n_swa = file.get_int("dflash.attention.sliding_window") + 1
        self.is_causal = file.get_bool("dflash.attention.causal", default=False)
        self.cache = [np.zeros((0, self.rank + self.n_rot)) for _ in range(self.n_layer)]

    def observe(self, features: Array) -> None:
        g = self.norm("enc.output_norm", features @ self.weights["fc.weight"].T)
        positions = len(self.cache[0]) + np.arange(len(features))
        for layer in range(self.n_layer):
            keys = self.keys(layer, g, positions)
            self.cache[layer] = np.concatenate([self.cache[layer], keys])

    def block(self, anchor: Array, n_slots: int) -> Array:
        """Hidden states [S, D] of the block that begins with the embedding ``anchor``."""
        start = len(self.cache[0])
        positions = start + np.arange(n_slots)
        x = np.concatenate([anchor[None], self.masks[: n_slots - 1]])
        at = np.arange(start + n_slots)
        seen = (start - at < self.n_swa) & ((at <= start) | (not self.is_causal))
        for layer in range(self.n_layer):
            h = self.norm(f"blk.{layer}.attn_norm", x)
            keys = np.concatenate([self.cache[layer], self.keys(layer, h, positions)])[seen]
            x = x + self.attention(layer, h, keys, positions)
            h = self.norm(f"blk.{layer}.ffn_norm", x)
            gate, up = (h @ self.matrix(layer, f"ffn_{name}").T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.matrix(layer, "ffn_down").T
        return self.norm("output_norm", x)

    def logits(self, hidden: Array, head: Array) -> Array:
        logits = hidden @ head.T
        cap = self.file.get_float("dflash.final_logit_softcapping", default=0.0)
        return np.tanh(logits * (1 / cap)) * cap if cap else logits

    def attention(self, layer: int, h: Array, keys: Array, positions: Array) -> Array:
        q = (h @ self.matrix(layer, "attn_q").T).reshape(len(h), self.n_head, self.head_dim)
        q_nope = q[:, :, : self.head_dim - self.n_rot]
        q_pe = self.rope(q[:, :, self.head_dim - self.n_rot :], positions[:, None])
        k_b, v_b = self.matrix(layer, "attn_k_b"), self.matrix(layer, "attn_v_b")
        absorbed = np.stack([q_nope[:, i] @ k_b[i].T for i in range(self.n_head)], axis=1)
        scores = np.concatenate([absorbed, q_pe], axis=-1) @ keys.T / math.sqrt(self.head_dim)
        latent = softmax(scores) @ keys[:, : self.rank]
        values = [latent[:, i] @ v_b[i].T for i in range(self.n_head)]
        return np.concatenate(values, axis=-1) @ self.matrix(layer, "attn_output").T

    def keys(self, layer: int, x: Array, positions: Array) -> Array:
        both = x @ self.matrix(layer, "attn_kv_a_mqa").T
        latent = self.norm(f"blk.{layer}.attn_kv_a_norm", both[:, : self.rank])
        return np.concatenate([latent, self.rope(both[:, self.rank :], positions)], axis=-1)

    def matrix(self, layer: int, name: str) -> Array:
        return self.weights[f"blk.{layer}.{name}.weight"]

    def norm(self, name: str, x: Array) -> Array:
        eps = self.file.get_float("dflash.attention.layer_norm_rms_epsilon")
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
        return x / scale * self.weights[f"{name}.weight"]

    def rope(self, x: Array, positions: Array) -> Array:
        """ggml's `rope_yarn` in the rotate-half layout."""
        half = self.n_rot // 2
        theta, magnitude = self.frequencies(half)
        turn = magnitude * np.exp(1j * positions[..., None] * theta)
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def frequencies(self, half: int) -> tuple[Array, float]:
        def scaling(name: str, default: float) -> float:
            return self.file.get_float(f"dflash.rope.scaling.{name}", default=default)

        base, n_dims = self.file.get_float("dflash.rope.freq_base"), self.n_rot
        extrapolated = base ** (-np.arange(half) * 2.0 / n_dims)
        factor = scaling("factor", 1.0)
        if self.file.get_str("dflash.rope.scaling.type", default="none") != "yarn":
            return extrapolated / factor, scaling("attn_factor", 1.0)
        n_orig = self.file.get_int("dflash.rope.scaling.original_context_length")

        def corr_dim(beta: float) -> float:
            return n_dims * math.log(n_orig / (beta * 2 * math.pi)) / (2 * math.log(base))

        low = max(0, math.floor(corr_dim(scaling("yarn_beta_fast", 32.0))))
        high = min(n_dims - 1, math.ceil(corr_dim(scaling("yarn_beta_slow", 1.0))))
        ramp = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
        ramp = ramp * scaling("yarn_ext_factor", 1.0)
        theta = extrapolated / factor * (1 - ramp) + extrapolated * ramp
        # llama_context: m(1) / m(log multiplier); what rope_yarn multiplies with cancels out
        log_mul = scaling("yarn_log_multiplier", 0.0)
        divisor = 0.1 * log_mul * math.log(factor) + 1 if log_mul else 1.0
        return theta, (0.1 * math.log(factor) + 1) / divisor * scaling("attn_factor", 1.0)

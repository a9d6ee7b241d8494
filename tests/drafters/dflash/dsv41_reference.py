"""A DeepSeek-V4.1 draft trunk in float64 numpy, after llama.cpp's `graph_dsv41`.

The whole block at once, streams, heads and positions as axes; nothing is shared with the code
under test, nor with the plain DeepSeek-V4.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specdec.gguf_file import GGUFFile

Array = NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class PlainDSV41:
    """Injection and block pass."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.weights = {name: file.load(name).double().numpy() for name in file.tensors}
        self.n_layer = file.get_int("dflash.block_count")
        self.n_head = file.get_int("dflash.attention.head_count")
        self.head_dim = file.get_int("dflash.attention.key_length")
        self.n_rot = file.get_int("dflash.rope.dimension_count")
        self.hc_eps = file.get_float("dflash.hyper_connection.epsilon")
        self.n_swa = file.get_int("dflash.attention.sliding_window") + 1
        self.is_causal = file.get_bool("dflash.attention.causal", default=False)
        self.cache = [np.zeros((0, self.head_dim)) for _ in range(self.n_layer)]

    def observe(self, features: Array) -> None:
        g = self.norm("enc.output_norm", features @ self.weights["fc.weight"].T)
        positions = len(self.cache[0]) + np.arange(len(features))
        for layer in range(self.n_layer):
            self.cache[layer] = np.concatenate([self.cache[layer], self.kv(layer, g, positions)])

    def block(self, embeddings: Array) -> tuple[Array, Array]:
        """Collapsed states and hidden states, [S, D] each, of the block's embeddings."""
        start, n_slots = len(self.cache[0]), len(embeddings)
        positions = start + np.arange(n_slots)
        # the mask row of the first query, for every query
        at = np.arange(start + n_slots)
        seen = (start - at < self.n_swa) & ((at <= start) | (not self.is_causal))
        x = np.repeat(embeddings[:, None], 4, axis=1)  # [S, 4, D]
        pre_prev = None
        for layer in range(self.n_layer):
            residual = x
            pre_attn, post, comb = self.mixes(layer, "attn", x)
            cur = x[:, 0] if pre_prev is None else self.hc_pre(x, pre_prev)
            cur = self.norm(f"blk.{layer}.attn_norm", cur)
            keys = np.concatenate([self.cache[layer], self.kv(layer, cur, positions)])[seen]
            x = self.hc_post(self.attention(layer, cur, keys, positions), residual, post, comb)
            residual = x
            pre_prev, post, comb = self.mixes(layer, "ffn", x)
            cur = self.norm(f"blk.{layer}.ffn_norm", self.hc_pre(x, pre_attn))
            out = np.stack([self.moe(layer, row) for row in cur])
            x = self.hc_post(out, residual, post, comb)
        assert pre_prev is not None
        state = self.hc_pre(x, pre_prev)
        return state, self.norm("output_norm", state)

    def attention(self, layer: int, x: Array, keys: Array, positions: Array) -> Array:
        low = self.norm(f"blk.{layer}.attn_q_a_norm", x @ self.matrix(layer, "attn_q_a").T)
        q = (low @ self.matrix(layer, "attn_q_b").T).reshape(len(x), self.n_head, self.head_dim)
        q = self.rope(q, positions[:, None], 1)
        scores = q @ keys.T / math.sqrt(self.head_dim)  # [S, H, N]
        sinks = np.exp(self.matrix(layer, "attn_sinks"))[:, None]
        weights = np.exp(scores)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + sinks)
        out = self.rope(weights @ keys, positions[:, None], -1)
        n_groups = self.file.get_int("dflash.attention.output_group_count")
        parts = np.split(out.reshape(len(x), -1), n_groups, axis=1)
        o_a = np.split(self.matrix(layer, "attn_output_a"), n_groups, axis=0)
        low = np.concatenate([p @ a.T for p, a in zip(parts, o_a, strict=True)], axis=1)
        return low @ self.matrix(layer, "attn_output_b").T

    def kv(self, layer: int, x: Array, positions: Array) -> Array:
        kv = self.norm(f"blk.{layer}.attn_kv_a_norm", x @ self.matrix(layer, "attn_kv").T)
        return self.rope(kv, positions, 1)

    def mixes(self, layer: int, branch: str, x: Array) -> tuple[Array, Array, Array]:
        """pre [S, 4], post [S, 4] and comb [S, source, destination]."""
        flat = x.reshape(len(x), -1)
        eps = self.file.get_float("dflash.attention.layer_norm_rms_epsilon")
        flat = flat / np.sqrt((flat * flat).mean(axis=-1, keepdims=True) + eps)
        m = flat @ self.matrix(layer, f"hc_{branch}_fn").T
        scale = np.repeat(self.matrix(layer, f"hc_{branch}_scale"), [4, 4, 16])
        m = m * scale + self.matrix(layer, f"hc_{branch}_base")
        comb = np.exp(m[:, 8:]).reshape(-1, 4, 4)
        comb = comb / comb.sum(axis=2, keepdims=True) + self.hc_eps
        for turn in range(self.file.get_int("dflash.hyper_connection.sinkhorn_iterations")):
            if turn:
                comb = comb / (comb.sum(axis=2, keepdims=True) + self.hc_eps)
            comb = comb / (comb.sum(axis=1, keepdims=True) + self.hc_eps)
        return sigmoid(m[:, :4]) + self.hc_eps, 2 * sigmoid(m[:, 4:8]), comb

    def hc_pre(self, x: Array, pre: Array) -> Array:
        return np.einsum("sj,sjd->sd", pre, x)

    def hc_post(self, out: Array, x: Array, post: Array, comb: Array) -> Array:
        return np.einsum("sj,sd->sjd", post, out) + np.einsum("sij,sid->sjd", comb, x)

    def moe(self, layer: int, x: Array) -> Array:
        gate = np.sqrt(np.log(1 + np.exp(self.matrix(layer, "ffn_gate_inp") @ x)))
        ranked = np.argsort(gate + self.weights[f"blk.{layer}.exp_probs_b.bias"])[::-1]
        chosen = ranked[: self.file.get_int("dflash.expert_used_count")]
        scale = self.file.get_float("dflash.expert_weights_scale")
        if self.file.get_bool("dflash.expert_weights_norm"):
            scale = scale / max(gate[chosen].sum(), 6.103515625e-5)
        clamp = self.file.get_floats("dflash.swiglu_clamp_exp", length=self.n_layer)[layer]
        names = ("gate", "up", "down")
        experts = [self.matrix(layer, f"ffn_{name}_exps") for name in names]
        out = self.swiglu(*(self.matrix(layer, f"ffn_{name}_shexp") for name in names), x, clamp)
        for i in chosen:
            w_gate, w_up, w_down = (matrix[i] for matrix in experts)
            out = out + gate[i] * scale * self.swiglu(w_gate, w_up, w_down, x, clamp)
        return out

    def swiglu(self, w_gate: Array, w_up: Array, w_down: Array, x: Array, clamp: float) -> Array:
        gate, up = w_gate @ x, w_up @ x
        if clamp > 1e-6:
            gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
        return w_down @ (gate * sigmoid(gate) * up)

    def rope(self, x: Array, positions: Array, direction: int) -> Array:
        """Neighbouring pairs of the trailing dimensions, turned forth or back."""
        theta = self.file.get_float("dflash.rope.freq_base") ** (
            -np.arange(self.n_rot // 2) * 2.0 / self.n_rot
        )
        angle = direction * positions[..., None] * theta
        out = x.copy()
        even, odd = x[..., -self.n_rot :: 2], x[..., 1 - self.n_rot :: 2]
        out[..., -self.n_rot :: 2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1 - self.n_rot :: 2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    def matrix(self, layer: int, name: str) -> Array:
        return self.weights[f"blk.{layer}.{name}.weight"]

    def norm(self, name: str, x: Array) -> Array:
        eps = self.file.get_float("dflash.attention.layer_norm_rms_epsilon")
        return (
            x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * self.weights[f"{name}.weight"]
        )

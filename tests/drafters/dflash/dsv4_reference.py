"""A DeepSeek-V4 draft trunk in float64 numpy, written for reading, one token at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.gguf_file import GGUFFile

Array = NDArray[np.float64]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class PlainDSV4:
    """Injection and block pass."""

    def __init__(self, file: GGUFFile) -> None:
        self.weights = {name: file.load(name).double().numpy() for name in file.tensors}
        self.file = file
        self.n_layer = file.get_int("dflash.block_count")
        self.n_head = file.get_int("dflash.attention.head_count")
        self.head_dim = file.get_int("dflash.attention.key_length")
        self.n_rot = file.get_int("dflash.rope.dimension_count")
        self.window = file.get_int("dflash.attention.sliding_window")
        self.is_causal = file.get_bool("dflash.attention.causal", default=False)
        self.eps = file.get_float("dflash.attention.layer_norm_rms_epsilon")
        self.hc_eps = file.get_float("dflash.hyper_connection.epsilon")
        self.context: list[list[Array]] = [[] for _ in range(self.n_layer)]

    def observe(self, features: Array) -> None:
        for row in features:
            g = self.rms(self.weights["fc.weight"] @ row) * self.weights["enc.output_norm.weight"]
            for layer in range(self.n_layer):
                self.context[layer].append(self.key(layer, g, len(self.context[layer])))

    def block(self, embeddings: Array) -> tuple[Array, Array]:
        """Collapsed states and hidden states, [S, D] each."""
        start = len(self.context[0])
        x = [np.stack([row] * 4) for row in embeddings]
        for layer in range(self.n_layer):
            mixes = [self.mix(layer, "attn", streams) for streams in x]
            entering = [
                self.normed(layer, "attn_norm", mix[0] @ streams)
                for mix, streams in zip(mixes, x, strict=True)
            ]
            keys = self.context[layer] + [
                self.key(layer, h, start + slot) for slot, h in enumerate(entering)
            ]
            for slot, h in enumerate(entering):
                out = self.attend(layer, h, start + slot, keys)
                x[slot] = self.leave(mixes[slot], out, x[slot])
                mix = self.mix(layer, "ffn", x[slot])
                f = self.experts(layer, self.normed(layer, "ffn_norm", mix[0] @ x[slot]))
                x[slot] = self.leave(mix, f, x[slot])
        states = np.stack([self.collapse(streams) for streams in x])
        norm = self.weights["output_norm.weight"]
        return states, np.stack([self.rms(row) * norm for row in states])

    def matrix(self, layer: int, name: str) -> Array:
        return self.weights[f"blk.{layer}.{name}.weight"]

    def rms(self, x: Array) -> Array:
        return x / np.sqrt(np.mean(x**2) + self.eps)

    def normed(self, layer: int, name: str, x: Array) -> Array:
        return self.rms(x) * self.matrix(layer, name)

    def rope(self, x: Array, position: int) -> Array:
        """The last `n_rot` numbers as complex pairs, turned."""
        base = self.file.get_float("dflash.rope.freq_base")
        rest, turning = x[: len(x) - self.n_rot], x[len(x) - self.n_rot :]
        pairs = turning[0::2] + 1j * turning[1::2]
        frequency = base ** (-2 * np.arange(self.n_rot // 2) / self.n_rot)
        pairs = pairs * np.exp(1j * position * frequency)
        turned = np.stack((pairs.real, pairs.imag), axis=-1).ravel()
        return np.concatenate((rest, turned))

    def key(self, layer: int, x: Array, position: int) -> Array:
        raw = self.matrix(layer, "attn_kv") @ x
        return self.rope(self.normed(layer, "attn_kv_a_norm", raw), position)

    def mix(self, layer: int, branch: str, streams: Array) -> tuple[Array, Array, Array]:
        m = self.matrix(layer, f"hc_{branch}_fn") @ self.rms(streams.ravel())
        base = self.matrix(layer, f"hc_{branch}_base")
        scale = self.matrix(layer, f"hc_{branch}_scale")
        pre = sigmoid(m[:4] * scale[0] + base[:4]) + self.hc_eps
        post = 2 * sigmoid(m[4:8] * scale[1] + base[4:8])
        c = np.exp(m[8:] * scale[2] + base[8:]).reshape(4, 4)
        c = c / c.sum(axis=1, keepdims=True) + self.hc_eps
        c = c / (c.sum(axis=0, keepdims=True) + self.hc_eps)
        for _ in range(self.file.get_int("dflash.hyper_connection.sinkhorn_iterations") - 1):
            c = c / (c.sum(axis=1, keepdims=True) + self.hc_eps)
            c = c / (c.sum(axis=0, keepdims=True) + self.hc_eps)
        return pre, post, c

    def leave(self, mix: tuple[Array, Array, Array], out: Array, streams: Array) -> Array:
        _, post, c = mix
        return np.stack(
            [post[d] * out + sum(c[s, d] * streams[s] for s in range(4)) for d in range(4)]
        )

    def collapse(self, streams: Array) -> Array:
        m = self.weights["output_hc_fn.weight"] @ self.rms(streams.ravel())
        m = m * self.weights["output_hc_scale.weight"] + self.weights["output_hc_base.weight"]
        return (sigmoid(m) + self.hc_eps) @ streams

    def attend(self, layer: int, x: Array, position: int, keys: list[Array]) -> Array:
        low = self.normed(layer, "attn_q_a_norm", self.matrix(layer, "attn_q_a") @ x)
        queries = (self.matrix(layer, "attn_q_b") @ low).reshape(self.n_head, -1)
        heads = []
        for head, query in enumerate(queries):
            q = self.rope(self.rms(query), position)
            seen = [
                key
                for at, key in enumerate(keys)
                if position - at < self.window and not (self.is_causal and at > position)
            ]
            scores = np.array([key @ q for key in seen]) / np.sqrt(self.head_dim)
            sink = self.matrix(layer, "attn_sinks")[head]
            weights = np.exp(scores) / (np.exp(scores).sum() + np.exp(sink))
            mixed = sum(w * key for w, key in zip(weights, seen, strict=True))
            heads.append(self.rope(mixed, -position))
        n_groups = self.file.get_int("dflash.attention.output_group_count")
        output_a = self.matrix(layer, "attn_output_a").reshape(n_groups, -1, 24)
        groups = np.concatenate(heads).reshape(n_groups, -1)
        low = np.concatenate([a @ group for a, group in zip(output_a, groups, strict=True)])
        return self.matrix(layer, "attn_output_b") @ low

    def experts(self, layer: int, x: Array) -> Array:
        w = np.sqrt(np.log1p(np.exp(self.matrix(layer, "ffn_gate_inp") @ x)))
        biased = w + self.weights[f"blk.{layer}.exp_probs_b.bias"]
        chosen = np.argsort(-biased)[: self.file.get_int("dflash.expert_used_count")]
        total = w[chosen].sum() if self.file.get_bool("dflash.expert_weights_norm") else 1.0
        clamps = self.file.get_floats("dflash.swiglu_clamp_exp", length=self.n_layer)
        shared = self.file.get_floats("dflash.swiglu_clamp_shexp", clamps, length=self.n_layer)
        out = self.mlp(layer, "shexp", ..., x, shared[layer])
        for expert in chosen:
            scale = w[expert] / total * self.file.get_float("dflash.expert_weights_scale")
            out = out + scale * self.mlp(layer, "exps", expert, x, clamps[layer])
        return out

    def mlp(self, layer: int, kind: str, expert: object, x: Array, clamp: float) -> Array:
        gate, up, down = (
            self.matrix(layer, f"ffn_{part}_{kind}")[expert] for part in ("gate", "up", "down")
        )
        a, b = gate @ x, up @ x
        if clamp > 1e-6:
            a, b = np.minimum(a, clamp), np.clip(b, -clamp, clamp)
        return down @ (a * sigmoid(a) * b)

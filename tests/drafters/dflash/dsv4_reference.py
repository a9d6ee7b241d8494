"""DeepSeek-V4 backbone, in plain float64 loops, from upstream's text (`graph_dsv4`).

Hyper-connections: a token is `hc` streams. A sub-layer reads a mixture of them ("pre"), and its
output goes back to every stream ("post") while the streams mix among themselves ("comb", made
nearly doubly stochastic). One key per position, which is the value as well, is shared by all heads;
the last dimensions of it are rotated, and the rotation is undone in the output.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from drafters.dflash.dspark_reference import (
    DSparkReference,
    Floats,
    attend,
    sigmoid,
    silu,
    turn_pairs,
)

SMALLEST_SUM = 6.103515625e-5
"""Upstream's floor under the sum of the chosen experts' weights: the least normal half float."""


class Mixes(NamedTuple):
    """Coefficients of one sub-layer: [hc], [hc] and [source, destination]."""

    pre: Floats
    post: Floats
    comb: Floats


class DSV4Reference(DSparkReference):
    normed_heads = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.n_hc = int(self.key("hyper_connection.count"))
        self.n_rounds = int(self.key("hyper_connection.sinkhorn_iterations"))
        self.hc_eps = float(self.key("hyper_connection.epsilon"))
        self.head_dim = int(self.key("attention.key_length"))
        self.n_rot = int(self.key("rope.dimension_count"))
        self.n_groups = int(self.key("attention.output_group_count"))
        self.window = int(self.key("attention.sliding_window"))

    # Keys

    def angles(self, position: int) -> Floats:
        """Plain rotation, whatever scaling the file names."""
        base = float(self.key("rope.freq_base", 10000.0))
        return position * base ** (-2.0 * np.arange(self.n_rot // 2) / self.n_rot)

    def rotate(self, x: Floats, position: int, sign: int = 1) -> Floats:
        still = self.head_dim - self.n_rot
        return np.concatenate(
            [x[:still], turn_pairs(x[still:], sign * self.angles(position))],
        )

    def keep(self, layer: int, g: Floats, position: int) -> Floats:
        key = self.rms(self.weight("attn_kv", layer) @ g, self.weight("attn_kv_a_norm", layer))
        return self.rotate(key, position)

    def sees(self, query: int, start: int, key: int) -> bool:
        """Whether the query at a position of the block at ``start`` sees the key of a position."""
        return query - key < self.window and not (self.is_causal and key > query)

    # Sub-layers

    def attention(self, layer: int, x: Floats, start: int) -> Floats:
        """The normed inputs [T, E] of a block -> [T, E]."""
        block_keys = [self.keep(layer, row, start + i) for i, row in enumerate(x)]
        out = []
        for i, row in enumerate(x):
            position = start + i
            rows = [kept[layer] for kept in self.kept] + block_keys
            keys = [key for at, key in enumerate(rows) if self.sees(position, start, at)]
            low = self.rms(
                self.weight("attn_q_a", layer) @ row, self.weight("attn_q_a_norm", layer)
            )
            queries = (self.weight("attn_q_b", layer) @ low).reshape(self.n_head, self.head_dim)
            heads = []
            for head, query in enumerate(queries):
                query = self.rms(query) if self.normed_heads else query
                sink = float(self.weight("attn_sinks", layer)[head])
                scale = self.head_dim**-0.5
                mixed = attend(self.rotate(query, position), keys, keys, scale, sink)
                heads.append(self.rotate(mixed, position, sign=-1))
            out.append(self.join_heads(layer, np.concatenate(heads)))
        return np.stack(out)

    def join_heads(self, layer: int, heads: Floats) -> Floats:
        """Each group of heads has a projection of its own; a second one joins the groups."""
        wide = self.weight("attn_output_a", layer).reshape(
            self.n_groups, -1, len(heads) // self.n_groups
        )
        parts = [wide[i] @ part for i, part in enumerate(heads.reshape(self.n_groups, -1))]
        return self.weight("attn_output_b", layer) @ np.concatenate(parts)

    def feed_forward(self, layer: int, x: Floats) -> Floats:
        """Chosen experts, weighted, plus the shared expert; [E] -> [E]."""
        scores = np.sqrt(np.log1p(np.exp(self.weight("ffn_gate_inp", layer) @ x)))
        wanted = scores + self.tensors[f"blk.{layer}.exp_probs_b.bias"]
        chosen = np.argsort(-wanted, kind="stable")[: int(self.key("expert_used_count"))]
        weights = scores[chosen]
        if self.key("expert_weights_norm"):
            weights = weights / max(weights.sum(), SMALLEST_SUM)
        weights = weights * float(self.key("expert_weights_scale"))
        clamp = self.per_layer("swiglu_clamp_exp", layer)
        out = np.zeros_like(x)
        for weight, expert in zip(weights, chosen, strict=True):
            out += weight * self.expert(
                x,
                self.weight("ffn_gate_exps", layer)[expert],
                self.weight("ffn_up_exps", layer)[expert],
                self.weight("ffn_down_exps", layer)[expert],
                clamp,
            )
        return out + self.expert(
            x,
            self.weight("ffn_gate_shexp", layer),
            self.weight("ffn_up_shexp", layer),
            self.weight("ffn_down_shexp", layer),
            self.per_layer("swiglu_clamp_shexp", layer, clamp),
        )

    def per_layer(self, name: str, layer: int, default: float | None = None) -> float:
        value = self.key(name, default)
        return float(value[layer] if isinstance(value, list) else value)

    @staticmethod
    def expert(x: Floats, gate: Floats, up: Floats, down: Floats, clamp: float) -> Floats:
        opened, raised = gate @ x, up @ x
        if clamp > 1e-6:
            opened, raised = np.minimum(opened, clamp), np.clip(raised, -clamp, clamp)
        return down @ (silu(opened) * raised)

    # Hyper-connections

    def mixes(self, layer: int, name: str, x: Floats) -> Mixes:
        """The coefficients that the streams [hc, E] ask for; ``name`` is attn or ffn."""
        hc = self.n_hc
        m = self.weight(f"hc_{name}_fn", layer) @ self.rms(x.reshape(-1))
        scale, base = self.weight(f"hc_{name}_scale", layer), self.weight(f"hc_{name}_base", layer)
        pre = sigmoid(m[:hc] * scale[0] + base[:hc]) + self.hc_eps
        post = 2 * sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (m[2 * hc :] * scale[2] + base[2 * hc :]).reshape(hc, hc)
        return Mixes(pre, post, self.sinkhorn(comb))

    def sinkhorn(self, comb: Floats) -> Floats:
        comb = np.exp(comb - comb.max(axis=1, keepdims=True))
        comb = comb / comb.sum(axis=1, keepdims=True) + self.hc_eps
        comb = comb / (comb.sum(axis=0, keepdims=True) + self.hc_eps)
        for _ in range(self.n_rounds - 1):
            comb = comb / (comb.sum(axis=1, keepdims=True) + self.hc_eps)
            comb = comb / (comb.sum(axis=0, keepdims=True) + self.hc_eps)
        return comb

    @staticmethod
    def put_back(y: Floats, x: Floats, mixes: Mixes) -> Floats:
        """A sub-layer's output [E] into the streams [hc, E]."""
        out = np.empty_like(x)
        for to in range(len(x)):
            out[to] = mixes.post[to] * y
            for source in range(len(x)):
                out[to] += mixes.comb[source, to] * x[source]
        return out

    # The block

    def slots(self, block: Floats, start: int) -> tuple[Floats, Floats]:
        streams = [np.stack([row] * self.n_hc) for row in block]
        for layer in range(self.n_layer):
            mixes = [self.mixes(layer, "attn", x) for x in streams]
            inputs = [m.pre @ x for m, x in zip(mixes, streams, strict=True)]
            normed = np.stack([self.rms(x, self.weight("attn_norm", layer)) for x in inputs])
            outputs = self.attention(layer, normed, start)
            streams = [self.put_back(*parts) for parts in zip(outputs, streams, mixes, strict=True)]
            for t, x in enumerate(streams):
                mix = self.mixes(layer, "ffn", x)
                normed_row = self.rms(mix.pre @ x, self.weight("ffn_norm", layer))
                streams[t] = self.put_back(self.feed_forward(layer, normed_row), x, mix)
        ends = np.stack([self.collapse(x) for x in streams])
        return np.stack([self.rms(x, self.weight("output_norm")) for x in ends]), ends

    def collapse(self, x: Floats) -> Floats:
        m = self.weight("output_hc_fn") @ self.rms(x.reshape(-1))
        scale, base = self.weight("output_hc_scale").item(), self.weight("output_hc_base")
        return (sigmoid(m * scale + base) + self.hc_eps) @ x

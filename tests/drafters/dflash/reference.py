"""A plain base-backbone draft in float64 numpy, written for reading, one token at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.gguf_file import GGUFFile

Array = NDArray[np.float64]


class PlainDraft:
    """Injection and block pass of a file without any of the optional features."""

    def __init__(self, file: GGUFFile) -> None:
        self.weights = {name: file.load(name).double().numpy() for name in file.tensors}
        self.n_layer = file.get_int("dflash.block_count")
        self.n_head = file.get_int("dflash.attention.head_count")
        self.n_head_kv = file.get_int("dflash.attention.head_count_kv")
        self.eps = file.get_float("dflash.attention.layer_norm_rms_epsilon")
        self.base = file.get_float("dflash.rope.freq_base")
        self.context: list[list[tuple[Array, Array]]] = [[] for _ in range(self.n_layer)]

    def observe(self, features: Array) -> None:
        for row in features:
            g = self._rms(self.weights["fc.weight"] @ row, "enc.output_norm")
            for layer in range(self.n_layer):
                self.context[layer].append(self._key_value(layer, g, len(self.context[layer])))

    def block(self, embeddings: Array) -> Array:
        """Hidden states [S, D] of a block that begins behind the context."""
        start = len(self.context[0])
        x = embeddings.copy()
        for layer in range(self.n_layer):
            h = [self._rms(row, f"blk.{layer}.attn_norm") for row in x]
            seen = self.context[layer] + [
                self._key_value(layer, row, start + slot) for slot, row in enumerate(h)
            ]
            for slot, row in enumerate(h):
                x[slot] = x[slot] + self._attend(layer, row, start + slot, seen)
                f = self._rms(x[slot], f"blk.{layer}.ffn_norm")
                gate = self._matrix(layer, "ffn_gate") @ f
                f = gate / (1 + np.exp(-gate)) * (self._matrix(layer, "ffn_up") @ f)
                x[slot] = x[slot] + self._matrix(layer, "ffn_down") @ f
        return np.stack([self._rms(row, "output_norm") for row in x])

    def _matrix(self, layer: int, name: str) -> Array:
        return self.weights[f"blk.{layer}.{name}.weight"]

    def _rms(self, x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x**2) + self.eps) * self.weights[f"{name}.weight"]

    def _rope(self, head: Array, position: int) -> Array:
        half = len(head) // 2
        angle = position * self.base ** (-np.arange(half) / half)
        a, b = head[:half], head[half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin))

    def _key_value(self, layer: int, x: Array, position: int) -> tuple[Array, Array]:
        keys = (self._matrix(layer, "attn_k") @ x).reshape(self.n_head_kv, -1)
        values = (self._matrix(layer, "attn_v") @ x).reshape(self.n_head_kv, -1)
        name = f"blk.{layer}.attn_k_norm"
        return np.stack([self._rope(self._rms(k, name), position) for k in keys]), values

    def _attend(
        self, layer: int, x: Array, position: int, seen: list[tuple[Array, Array]]
    ) -> Array:
        heads = []
        queries = (self._matrix(layer, "attn_q") @ x).reshape(self.n_head, -1)
        for head, query in enumerate(queries):
            q = self._rope(self._rms(query, f"blk.{layer}.attn_q_norm"), position)
            kv = head * self.n_head_kv // self.n_head
            scores = np.array([k[kv] @ q for k, _ in seen]) / np.sqrt(len(q))
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            heads.append(sum(w * v[kv] for w, (_, v) in zip(weights, seen, strict=True)))
        return self._matrix(layer, "attn_output") @ np.concatenate(heads)

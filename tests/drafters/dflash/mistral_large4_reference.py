"""Mistral Large 4 backbone, in plain float64 loops, from upstream's text (`graph_mistral_large4`).

Latent attention: of a position only a short latent vector and one rotated part are kept. Upstream
multiplies the query into the latent space; here every head's keys and values are unpacked, which is
the same in exact arithmetic. Slots after the first take their embedding from a table of masks, and
the whole block sees what its first slot sees.

Upstream's text does not say which rotation the file has: `rope_type` is set elsewhere. For the
architecture `dflash` that is rotate-half with one known exception, hyper-connections (DeepSeek-V4),
so rotate-half it is here; files whose converter left neighbouring pairs would need the exception.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from pathlib import Path

import numpy as np
from drafters.dflash.dspark_reference import DSparkReference, Floats, attend, silu, turn_halves


class MistralLarge4Reference(DSparkReference):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.rank = int(self.key("attention.kv_lora_rank"))
        self.n_rot = int(self.key("rope.dimension_count"))
        self.key_dim = int(self.key("attention.key_length_mla"))
        self.window = int(self.key("attention.sliding_window"))

    # Rotation

    def rotate(self, x: Floats, position: int) -> Floats:
        scaling = self.fields.get("dflash.rope.scaling.type", "none")
        if scaling == "yarn":
            return turn_halves(x, position * self.yarn_frequencies(), self.yarn_magnitude())
        factor = float(self.key("rope.scaling.factor")) if scaling == "linear" else 1.0
        return turn_halves(x, position * self.frequencies() / factor)

    def frequencies(self) -> Floats:
        base = float(self.key("rope.freq_base", 10000.0))
        return base ** (-2.0 * np.arange(self.n_rot // 2) / self.n_rot)

    def yarn_frequencies(self) -> Floats:
        """High frequencies stay, low ones are stretched, a ramp lies between."""
        base = float(self.key("rope.freq_base", 10000.0))
        trained = float(
            self.key("rope.scaling.original_context_length", self.key("context_length"))
        )
        bounds = [
            self.n_rot * log(trained / (float(self.key(name, default)) * 2 * pi)) / (2 * log(base))
            for name, default in (
                ("rope.scaling.yarn_beta_fast", 32.0),
                ("rope.scaling.yarn_beta_slow", 1.0),
            )
        ]
        low, high = max(0, floor(bounds[0])), min(self.n_rot - 1, ceil(bounds[1]))
        mixed = []
        for i, plain in enumerate(self.frequencies()):
            stretch = min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            factor = float(self.key("rope.scaling.factor"))
            mixed.append(plain * (1 - stretch) + plain / factor * stretch)
        return np.array(mixed)

    def yarn_magnitude(self) -> float:
        grown = log(float(self.key("rope.scaling.factor")))
        multiplier = float(self.key("rope.scaling.yarn_log_multiplier", 0.0))
        magnitude = (1 + 0.1 * grown) / (1 + 0.1 * multiplier * grown)
        return magnitude * float(self.key("rope.scaling.attn_factor", 1.0))

    # Layers

    def keep(self, layer: int, g: Floats, position: int) -> Floats:
        packed = self.weight("attn_kv_a_mqa", layer) @ g
        latent = self.rms(packed[: self.rank], self.weight("attn_kv_a_norm", layer))
        return np.concatenate([latent, self.rotate(packed[self.rank :], position)])

    def attention(self, layer: int, x: Floats, start: int) -> Floats:
        """The normed inputs [T, E] of a block -> [T, E]."""
        rows = [kept[layer] for kept in self.kept]
        rows += [self.keep(layer, row, start + i) for i, row in enumerate(x)]
        rows = [row for at, row in enumerate(rows) if self.sees(start, at)]
        up_keys, up_values = self.weight("attn_k_b", layer), self.weight("attn_v_b", layer)
        out = []
        for i, row in enumerate(x):
            queries = (self.weight("attn_q", layer) @ row).reshape(self.n_head, self.key_dim)
            heads = []
            for head, query in enumerate(queries):
                still = self.key_dim - self.n_rot
                query = np.concatenate([query[:still], self.rotate(query[still:], start + i)])
                keys = [
                    np.concatenate([kept[: self.rank] @ up_keys[head], kept[self.rank :]])
                    for kept in rows
                ]
                values = [up_values[head] @ kept[: self.rank] for kept in rows]
                heads.append(attend(query, keys, values, self.key_dim**-0.5))
            out.append(self.weight("attn_output", layer) @ np.concatenate(heads))
        return np.stack(out)

    def sees(self, start: int, key: int) -> bool:
        """Whether the block at ``start`` sees the key of a position: what its first slot sees."""
        return start - key < self.window + 1 and not (self.is_causal and key > start)

    def feed_forward(self, layer: int, x: Floats) -> Floats:
        opened = silu(self.weight("ffn_gate", layer) @ x)
        return self.weight("ffn_down", layer) @ (opened * (self.weight("ffn_up", layer) @ x))

    # The block

    def embed(self, tokens: list[int], table: Floats) -> Floats:
        masks = self.named_like("mask")
        assert masks is not None
        return np.stack([table[tokens[0]], *masks[: len(tokens) - 1]])

    def slots(self, block: Floats, start: int) -> tuple[Floats, Floats]:
        x = block
        for layer in range(self.n_layer):
            normed = np.stack([self.rms(row, self.weight("attn_norm", layer)) for row in x])
            x = x + self.attention(layer, normed, start)
            x = np.stack(
                [
                    row + self.feed_forward(layer, self.rms(row, self.weight("ffn_norm", layer)))
                    for row in x
                ]
            )
        hidden = np.stack([self.rms(row, self.weight("output_norm")) for row in x])
        return hidden, hidden

    def base_logits(self, hidden: Floats, output: Floats) -> Floats:
        """Soft-capped, if the file says so, before the Markov head adds its bias."""
        logits = super().base_logits(hidden, output)
        cap = float(self.key("final_logit_softcapping", 0.0))
        return cap * np.tanh(logits / cap) if cap else logits

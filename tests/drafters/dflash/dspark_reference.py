"""What every DSpark draft does around its backbone, in plain float64 loops.

Written from llama.cpp's text alone (`src/models/dspark.cpp`, and `dflash.cpp` for the loader)
without a look at the product: it reads files by itself, too. A backbone's reference is a subclass
in a file of its own, which says what is kept of a position and what a block of slots becomes.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class DSparkReference(abc.ABC):
    """A DSpark draft: encoder, kept rows of the context, output head, Markov chain, confidences."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors: dict[str, Floats] = {
            tensor.name: tensor.data.astype(np.float64) for tensor in reader.tensors
        }
        self.n_layer = int(self.key("block_count"))
        self.n_head = int(self.key("attention.head_count"))
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))
        self.block_size = int(self.key("block_size"))
        self.is_causal = bool(self.key("attention.causal", False))
        self.kept: list[list[Floats]] = []
        """Per position of the context what each layer keeps of it."""

    def key(self, name: str, default: Any = None) -> Any:
        value = self.fields.get(f"dflash.{name}", default)
        assert value is not None, name
        return value

    def weight(self, name: str, layer: int | None = None) -> Floats:
        return self.tensors[f"{name}.weight" if layer is None else f"blk.{layer}.{name}.weight"]

    def rms(self, x: Floats, weight: Floats | None = None) -> Floats:
        scaled = x / np.sqrt(np.mean(x * x) + self.eps)
        return scaled if weight is None else scaled * weight

    def named_like(self, *words: str) -> Floats | None:
        """The tensor outside the layers whose name has all the words; no name was published."""
        found = [
            name
            for name in self.tensors
            if not name.startswith("blk.")
            and all(word in name for word in words)
            and ("bias" in name) == ("bias" in words)
        ]
        assert len(found) < 2, found
        return self.tensors[found[0]] if found else None

    # What a backbone says about itself.

    @abc.abstractmethod
    def keep(self, layer: int, g: Floats, position: int) -> Floats:
        """What ``layer`` keeps of a position whose fused features are ``g``."""

    @abc.abstractmethod
    def slots(self, block: Floats, start: int) -> tuple[Floats, Floats]:
        """The block's embeddings [T, E] -> (input of the output head, of the confidence head)."""

    def embed(self, tokens: list[int], table: Floats) -> Floats:
        return np.stack([table[token] for token in tokens])

    def base_logits(self, hidden: Floats, output: Floats) -> Floats:
        return np.stack([output @ row for row in hidden])

    # The draft as a whole.

    def observe(self, taps: Floats) -> None:
        """Inject the features [T, n_taps, E] of the next positions."""
        for row in taps.astype(np.float64):
            g = self.rms(self.weight("fc") @ row.reshape(-1), self.weight("enc.output_norm"))
            self.kept.append([self.keep(i, g, len(self.kept)) for i in range(self.n_layer)])

    def cut(self, length: int) -> None:
        del self.kept[length:]

    def draft(
        self, last_token: int, n_slots: int, table: Floats, output: Floats
    ) -> tuple[Floats, Floats, list[int]]:
        """Logits [T, V], confidences [T] and tokens of a block of ``n_slots`` slots.

        ``table`` and ``output`` are the target's; the draft's own tensors come first. A reduced
        vocabulary has as many logits as rows.
        """
        table = self.tensors.get("token_embd.weight", table)
        output = self.tensors.get("output.weight", output)
        mask = int(self.fields.get("tokenizer.ggml.mask_token_id", 0))
        block = self.embed([last_token] + [mask] * (n_slots - 1), table)
        hidden, judged = self.slots(block, len(self.kept))
        return self.chain(last_token, self.base_logits(hidden, output), hidden, judged)

    def chain(
        self, last_token: int, logits: Floats, hidden: Floats, judged: Floats
    ) -> tuple[Floats, Floats, list[int]]:
        """The Markov head: each slot's logits are biased by the token of the slot before."""
        w1, w2 = self.weight("markov_w1"), self.weight("markov_w2")
        targets = self.tensors.get("d2t", np.arange(len(w2)))
        joint = self.named_like("joint")
        first = 0 if self.key("sample_from_anchor", True) else 1
        rank = w1.shape[1]
        state = np.zeros(rank)
        previous = last_token
        logits = logits.copy()
        confidences = np.zeros(len(logits))
        tokens = []
        for i in range(first, len(logits)):
            mark = w1[previous]
            if joint is not None:
                bias = self.named_like("joint", "bias")
                assert bias is not None
                z = joint @ np.concatenate([state, mark, hidden[i]]) + bias
                gate = sigmoid(z[:rank])
                state = gate * state + (1 - gate) * np.tanh(z[rank : 2 * rank])
                mark = np.tanh(z[2 * rank :])
            logits[i] += w2 @ mark
            if "conf_proj.weight" in self.tensors:
                judge = self.weight("conf_proj").reshape(-1)
                offset = self.tensors.get("conf_proj.bias", np.zeros(1)).item()
                confidences[i] = sigmoid(judge @ np.concatenate([judged[i], mark]) + offset)
            previous = int(targets[np.argmax(logits[i])])
            tokens.append(previous)
        return logits, confidences, tokens


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def turn_pairs(x: Floats, angles: Floats, magnitude: float = 1.0) -> Floats:
    """Rotate neighbours (0, 1), (2, 3), ... of ``x`` by one angle each."""
    out = np.empty_like(x)
    for i, angle in enumerate(angles):
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = (a * np.cos(angle) - b * np.sin(angle)) * magnitude
        out[2 * i + 1] = (a * np.sin(angle) + b * np.cos(angle)) * magnitude
    return out


def turn_halves(x: Floats, angles: Floats, magnitude: float = 1.0) -> Floats:
    """Rotate (0, n), (1, n + 1), ... of ``x`` by one angle each, n = half its length."""
    half = len(angles)
    out = np.empty_like(x)
    for i, angle in enumerate(angles):
        a, b = x[i], x[half + i]
        out[i] = (a * np.cos(angle) - b * np.sin(angle)) * magnitude
        out[half + i] = (a * np.sin(angle) + b * np.cos(angle)) * magnitude
    return out


def attend(
    query: Floats, keys: list[Floats], values: list[Floats], scale: float, sink: float | None = None
) -> Floats:
    """One query over its visible keys; a sink takes part in the softmax and gives nothing."""
    scores = np.array([scale * float(query @ key) for key in keys])
    top = max(scores.max(), -np.inf if sink is None else sink)
    weights = np.exp(scores - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
    return np.sum([w * v for w, v in zip(weights, values, strict=True)], axis=0) / total

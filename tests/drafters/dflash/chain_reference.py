"""A DSpark chain in float64 numpy, after llama.cpp's `build_dspark_markov_head`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.dflash.names import SPELLINGS

Array = NDArray[np.float64]


class Chain(NamedTuple):
    """What a greedy walk along a block yields."""

    logits: Array
    tokens: list[int]
    confidences: list[float]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def greedy_chain(
    weights: dict[str, Array], base: Array, hidden: Array, state: Array, last: int
) -> Chain:
    """From base logits [S, V], hidden states and confidence inputs [S, D] of a block."""
    joint = next((n for n in SPELLINGS["joint projection"] if f"{n}.weight" in weights), "")
    rank = weights["markov_w1.weight"].shape[1]
    memory = np.zeros(rank)
    ids = weights.get("d2t", np.arange(base.shape[1])).astype(int)
    previous, rows, tokens, confidences = last, [], [], []
    for slot in range(base.shape[0]):
        markov = weights["markov_w1.weight"][previous]
        if joint:
            z = np.concatenate([memory, markov, hidden[slot]])
            z = weights[f"{joint}.weight"] @ z + weights[f"{joint}.bias"]
            gate, candidate = sigmoid(z[:rank]), np.tanh(z[rank : 2 * rank])
            memory = candidate + gate * (memory - candidate)
            markov = np.tanh(z[2 * rank :])
        column = base[slot] + weights["markov_w2.weight"] @ markov
        feature = np.concatenate([state[slot], markov])
        score = weights["conf_proj.weight"][0] @ feature + weights["conf_proj.bias"][0]
        rows.append(column)
        confidences.append(float(sigmoid(score)))
        previous = int(ids[column.argmax()])
        tokens.append(previous)
    return Chain(np.array(rows), tokens, confidences)

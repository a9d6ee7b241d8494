"""Recorded runs of llama.cpp on tiny random EAGLE-3 drafts, and how to replay them.

``data/vectors/eagle3_*.npz`` hold seven rounds over a target: its hidden states, what the encoder
made of them, and for each step of each round the decoder's input, its state and the logits.
Acceptance is forced in rounds 1 to 5; round 3 has no draft. (`eagle3_accepted`: six rounds, none
forced.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from drafters.dflash.trace import N_CTX, path_of, target_of
from torch import Tensor

from specdec.drafters.eagle3 import Eagle3Drafter, load
from specdec.gguf_file import GGUFFile
from specdec.options import DraftOptions, Kernels, SamplingOptions


@dataclass
class Step:
    """What one step of a draft got and gave."""

    token: int
    position: int
    state: Tensor
    logits: Tensor
    prenorm: Tensor


@dataclass
class Recorded:
    """What llama.cpp did in one round, by name, such as `draft_logits`."""

    values: dict[str, np.ndarray]
    steps: list[Step] = field(default_factory=list)
    """What the drafter did in the same round."""

    @property
    def draft(self) -> list[int]:
        return self.values["draft"].tolist()

    def number(self, name: str) -> int:
        return int(self.values[name])

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.values[name])


class Watched(Eagle3Drafter):
    """A drafter that keeps what its steps got and gave."""

    steps: list[Step]

    def step(self, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        position = self._cache.length
        logits, prenorm = super().step(token, state)
        self.steps.append(Step(token, position, state[0], logits, prenorm[0]))
        return logits, prenorm


class Trace:
    """One recording with its draft model, loaded."""

    def __init__(self, name: str, kernels: Kernels = "torch") -> None:
        self.name = name
        with np.load(path_of(name + ".npz")) as recorded:
            self.values = dict(recorded)
        self.file = GGUFFile.open(path_of(name + ".gguf"))
        self.model = load(self.file, target_of(name), kernels=kernels)

    @property
    def rounds(self) -> list[Recorded]:
        count = 1 + max(int(key[1]) for key in self.values if key[0] == "r")
        rounds = []
        for index in range(count):
            prefix = f"r{index}_"
            mine = {k[len(prefix) :]: v for k, v in self.values.items() if k.startswith(prefix)}
            rounds.append(Recorded(mine))
        return rounds

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.values[name])

    def drafter(self, n_max: int = 4) -> Watched:
        """A drafter that has begun."""
        drafter = Watched(self.model, DraftOptions(n_max=n_max), N_CTX)
        drafter.begin(SamplingOptions(temp=0))
        drafter.steps = []
        return drafter

    def taps(self, features: Tensor) -> Tensor:
        """Rows [T, 3 * D] as taps [T, 3, D]."""
        return features.view(features.shape[0], 3, -1)

    def prefill(self, drafter: Watched, pieces: list[int]) -> None:
        """Shows the prompt without its last token, in pieces of these lengths."""
        tokens = self.tensor("prompt_ids").long()[:-1]
        features = self.taps(self.tensor("prefill_features"))
        for ids, rows in zip(tokens.split(pieces), features.split(pieces), strict=True):
            drafter.observe(ids, rows)

    def replay(self, drafter: Watched) -> Iterator[tuple[Recorded, list[int]]]:
        """Yields each recorded round with the tokens that ``drafter`` drafts in it.

        The drafter has seen the prompt. Afterwards it is told how many tokens were accepted.
        """
        for recorded in self.rounds:
            drafter.steps = recorded.steps
            tokens: list[int] = []
            if recorded.draft:
                tokens = drafter.draft(recorded.number("id_last"), len(recorded.draft)).tokens
            yield recorded, tokens
            kept = recorded.number("n_accepted") + 1
            if recorded.draft:
                drafter.accept(kept - 1)
            ids = recorded.tensor("verify_tokens").long()
            drafter.observe(ids[:kept], self.taps(recorded.tensor("verify_features"))[:kept])

    def scattered(self, logits: Tensor) -> Tensor:
        """Logits [VD] by target token, minus infinity elsewhere."""
        vocabulary = self.model.vocabulary
        full = torch.full((vocabulary.n_vocab,), -torch.inf)
        full[vocabulary.to_target(torch.arange(vocabulary.n_rows))] = logits
        return full

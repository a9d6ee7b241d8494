"""Recorded runs of llama.cpp on tiny random drafts, and how to replay them.

``data/vectors/NAME.npz`` holds what llama.cpp computed for the draft ``NAME.gguf`` in seven rounds
over its target: the target's hidden states, tensors of the injection and of the first block, and
for each round logits (every third column), drafted ids, and how many of them were accepted (forced
in rounds 1 to 5, so that all counts occur). A directory with further recordings can be named by the
environment variable SPECDEC_VECTORS; they are then tested, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.head import DraftBlock
from specdec.drafters.dflash.model import DFlashModel, load
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions

DATA = Path(__file__).parents[2] / "data" / "vectors"
N_CTX = 512
TARGETS = {
    "dft_plain_llama": "tgt_llama",
    "dft_swa_all": "tgt_llama",
    "dft2_softcap": "tgt_llama",
    "dft_plain_qwen3moe": "tgt_qwen3moe",
    "dft_q8_on_q4km": "tgt_llama256.q4_k_m",
    "dspark_noconf": "tgt_llama",
    "dspark_accepted": "tgt_markovian",
    "lilicorr_proj": "tgt_llama",
    "eagle3_plain": "tgt_llama",
    "eagle3_opts": "tgt_llama",
    "eagle3_accepted": "tgt_markovian",
    "eagle3_final": "mtp_mimo2",
}
"""Targets of the recordings that are not on `tgt_qwen3`."""


def names(*prefixes: str) -> list[str]:
    """The recordings whose names begin with one of ``prefixes``, here and in SPECDEC_VECTORS."""
    found = {path.stem for folder in _folders() for path in folder.glob("*.npz")}
    return sorted(name for name in found if name.startswith(prefixes))


def _folders() -> list[Path]:
    more = os.environ.get("SPECDEC_VECTORS")
    return [DATA, *([Path(more)] if more else [])]


def path_of(name: str) -> Path:
    """The file of that name among the recordings."""
    return next(path for folder in _folders() if (path := folder / name).exists())


@functools.cache
def target_of(name: str) -> Target:
    """The target of a recording, with real weights."""
    with GGUFFile.open(path_of(TARGETS.get(name, "tgt_qwen3") + ".gguf")) as file:
        return load_target(file, activations="f32")


@dataclass
class Round:
    """What llama.cpp did in one round."""

    values: dict[str, np.ndarray]
    """The arrays of the round by name, such as `draft_logits`."""

    @property
    def last_token(self) -> int:
        return int(self.values["block_tokens"][0])

    @property
    def draft(self) -> list[int]:
        return self.values["draft"].tolist()

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.values[name])


class Trace:
    """One recording with its draft model, loaded."""

    def __init__(self, name: str) -> None:
        self.name = name
        with np.load(path_of(name + ".npz")) as recorded:
            self.values = dict(recorded)
        self.file = GGUFFile.open(path_of(name + ".gguf"))
        self.model: DFlashModel = load(self.file, target_of(name))

    @property
    def rounds(self) -> list[Round]:
        count = 1 + max(int(key[1:].split("_")[0]) for key in self.values if key[0] == "r")
        rounds = []
        for index in range(count):
            prefix = f"r{index}_"
            mine = {k[len(prefix) :]: v for k, v in self.values.items() if k.startswith(prefix)}
            rounds.append(Round(mine))
        return rounds

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.values[name])

    def drafter(self, n_max: int | None = None) -> DFlashDrafter:
        """A drafter that has begun; by default its drafts are as long as the block allows."""
        options = DraftOptions(n_max=self.model.head.n_max if n_max is None else n_max)
        drafter = DFlashDrafter(self.model, options, N_CTX)
        drafter.begin(SamplingOptions(temp=0))
        return drafter

    def observe(self, drafter: DFlashDrafter, features: Tensor, piece: int = N_CTX) -> None:
        """Shows rows [T, n_taps * D] of the target's taps, ``piece`` at a time."""
        taps = features.view(features.shape[0], len(drafter.taps), -1)
        for rows in taps.split(piece):
            drafter.observe(torch.zeros(rows.shape[0], dtype=torch.int64), rows)

    def replay(
        self, drafter: DFlashDrafter, look: Callable[[Round, DraftBlock], None] | None = None
    ) -> Iterator[tuple[Round, list[int]]]:
        """Yields each recorded round with the tokens that ``drafter`` drafts in it.

        Before each draft ``look`` is given the trunk's answer to the same block. Afterwards the
        drafter is told the recorded number of accepted tokens and their taps.
        """
        self.observe(drafter, self.tensor("prefill_features"))
        for recorded in self.rounds:
            room = len(recorded.draft)
            if look is not None:
                look(recorded, drafter.run(recorded.last_token, room))
            tokens = drafter.draft(recorded.last_token, room).tokens
            yield recorded, tokens
            n_accepted = int(recorded.values["n_accepted"])
            drafter.accept(n_accepted)
            self.observe(drafter, recorded.tensor("verify_features")[: n_accepted + 1])

    def scattered(self, logits: Tensor, columns: int) -> Tensor:
        """Logits [T, VD] by target token, minus infinity elsewhere, as many columns as recorded."""
        vocabulary = self.model.vocabulary
        full = torch.full((logits.shape[0], vocabulary.n_vocab), -torch.inf)
        full[:, vocabulary.to_target(torch.arange(vocabulary.n_rows))] = logits
        return full[:, :: vocabulary.n_vocab // columns]


def by_id(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """A recorded lattice, ids [K, C] and scores [K, C, C], in ascending order of candidates.

    The predecessors of the first step stay in order: they all are the last token.
    """
    ordered, order = ids.long().sort(dim=-1)
    scores = scores.gather(2, order[:, None].expand_as(scores))
    before = order[:-1, :, None].expand_as(scores[1:])
    return ordered, torch.cat((scores[:1], scores[1:].gather(1, before)))

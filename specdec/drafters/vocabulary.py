"""The two ends of a draft: token embeddings and output matrix, its own or the target's.

A draft with a reduced vocabulary scores VD < V tokens; row r of its output stands for target token
``d2t[r]``. Scores stay in these rows and only chosen rows are mapped, so that nothing of size V is
made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specdec.models.layers import new_embedding

if TYPE_CHECKING:
    from specdec.gguf_file import GGUFFile
    from specdec.models.base import Target


class DraftVocabulary(nn.Module):
    """Embeds target token ids and scores the rows of the draft's vocabulary."""

    d2t: Tensor | None

    def __init__(self, file: GGUFFile, n_embd: int, target: Target, softcap: float = 0.0) -> None:
        """The modules for a draft of width ``n_embd``, built on the meta device.

        ``softcap`` bounds the scores, c * tanh(x / c); 0 = not at all.
        """
        super().__init__()
        self.softcap = softcap
        self.n_vocab = target.config.n_vocab
        self.n_rows = self.n_vocab
        """VD, the number of rows that are scored."""
        # Bound methods, because a module would become part of this one.
        self._target_embed, self._target_head = target.embed, target.lm_head
        self._target_device = target.device
        if "token_embd.weight" in file.tensors:
            self.token_embd = new_embedding(self.n_vocab, n_embd)
        if "d2t" in file.tensors:
            self.n_rows = file.tensors["d2t"].shape[0]
            self.register_buffer("d2t", torch.empty(self.n_rows, dtype=torch.int64))
        else:
            self.d2t = None
        self.output: nn.Module | None = None
        if "output.weight" in file.tensors:
            self.output = nn.Linear(n_embd, self.n_rows, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [T, D] of target token ids [T] int64, without a scale."""
        if hasattr(self, "token_embd"):
            return self.token_embd(tokens)  # type: ignore[no-any-return]
        return self._target_embed(tokens.to(self._target_device)).to(tokens.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [T, VD] float32 of hidden states [T, D]."""
        if self.output is not None:
            logits = self.output(hidden).float()
        else:
            logits = self._target_head(hidden.to(self._target_device)).to(hidden.device)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def to_target(self, rows: Tensor) -> Tensor:
        """Target token ids of vocabulary rows, int64 of the same shape."""
        return rows if self.d2t is None else self.d2t[rows]

"""Stand-ins with a known answer: a scripted target, a scripted drafter, a verifier that obeys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.kv_cache import CacheShape, KVCache
from specdec.models.base import TargetOutput
from specdec.options import SamplingOptions
from specdec.sampling.head import Best

Script = Callable[[list[int]], int]
"""Text so far -> the token that follows."""


class ScriptedTarget:
    """A target whose next token is a function of the whole text before it.

    Its cache really holds the tokens, so a wrong rollback changes the answer. Logits are 1 at the
    scripted token and 0 elsewhere; taps are the token ids times ten plus the tap.
    """

    device = torch.device("cpu")

    def __init__(self, script: Script, n_vocab: int = 32) -> None:
        self.script = script
        self.n_vocab = n_vocab

    def new_cache(self, n_ctx: int) -> KVCache:
        return KVCache([CacheShape(1, 1, 1)], n_ctx, device=self.device)

    def __call__(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        taps: Sequence[int] = (),
        logit_rows: int | None = None,
    ) -> TargetOutput:
        column = tokens.float().view(-1, 1, 1)
        held, _ = cache.append(0, column, column)
        text = [int(value) for value in held.flatten()]
        logits = torch.zeros(len(tokens), self.n_vocab)
        for row in range(len(tokens)):
            logits[row, self.script(text[: cache.length + row + 1])] = 1.0
        cache.advance(len(tokens))
        wanted = len(tokens) if logit_rows is None else logit_rows
        hidden = tokens[:, None, None] * 10.0 + torch.tensor(taps).view(1, -1, 1)
        return TargetOutput(logits[len(tokens) - wanted :], hidden if taps else None)


class ScriptedDrafter:
    """Drafts what ``script(observed tokens, last token, room)`` says and records all calls."""

    name = "scripted"
    n_max = 1024

    def __init__(
        self,
        script: Callable[[list[int], int, int], list[int]],
        taps: tuple[int, ...] = (),
    ) -> None:
        self.script = script
        self.taps = taps
        self.observed: list[int] = []
        self.hidden: list[Tensor] = []
        self.calls: list[str] = []

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        self.observed = self.observed[:kept]
        return len(self.observed)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        self.observed += tokens.tolist()
        if hidden is not None:
            self.hidden.append(hidden)
        self.calls.append("observe")

    def draft(self, last_token: int, room: int) -> Draft:
        tokens = self.script(list(self.observed), last_token, room)
        self.calls.append("draft" if tokens else "empty")
        return Draft(tokens)

    def accept(self, accepted: int) -> None:
        self.calls.append(f"accept {accepted}")


class ForcedVerifier:
    """Accepts exactly as many draft tokens as the test says, then emits the target's best token."""

    def __init__(self, accepted: Sequence[int]) -> None:
        self.accepted = list(accepted)

    def verify(self, draft: Draft, logits: Tensor, best: Best | None = None) -> list[int]:
        n = min(self.accepted.pop(0) if self.accepted else 0, len(draft.tokens))
        return [*draft.tokens[:n], int(logits[n].argmax())]

"""SamplerChain: from a row of the target's logits to the next token.

Order: logit bias, the filters as the user listed them, an adaptive last step if there is one, the
draw. Rows are evaluated in text order and only emitted tokens are accepted, so nothing is ever
taken back.

One random stream per purpose, all from the request's seed (`stream_seed`), so that switching one
sampler on does not move the numbers of another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.options import RANDOM_SEED
from specdec.sampling.adaptive import Adaptive
from specdec.sampling.candidates import Candidates
from specdec.sampling.penalties import add_bias

STREAMS = {
    "draw": 0,  # the last draw of the chain, whichever sampler makes it
    "xtc": 0xC2B2AE35,
    "verifier": 0x9E3779B9,  # llama.cpp's
    "draft": 0x85EBCA6B,  # llama.cpp's
    "synthetic": 0x27D4EB2F,
}
"""Purpose of a random stream -> what its seed is the seed of the request XOR-ed with."""


def best_tokens(logits: Tensor) -> list[int]:
    """The token with the largest logit in each row of [T, V], the first one of equals.

    numpy is several times as fast as torch here, and starts no threads that have to be waited for
    where cores are busy.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1).tolist()
    return logits.numpy().argmax(axis=-1).tolist()  # type: ignore[no-any-return]


def stream_seed(seed: int, purpose: str) -> int:
    """The seed, 32 bits, of one purpose's generator; ``purpose`` is a key of `STREAMS`."""
    return (seed ^ STREAMS[purpose]) & 0xFFFFFFFF


@dataclass(slots=True)
class SamplerState:
    """What filters may look at besides the logits."""

    text: list[int] = field(default_factory=list)
    """Prompt and accepted tokens."""
    xtc: torch.Generator = field(default_factory=torch.Generator)
    """The coin of the xtc filter."""


Filter = Callable[[Candidates, SamplerState], Candidates]


class SamplerChain:
    """The sampler of one request at a time; `begin` makes it ready for the next.

    ``greedy``: the argmax of the raw logits is what `sample` returns, and nothing is drawn.
    ``stateful``: a sampler learns from the tokens `sample` drew, so drafts must be verified by
    matching. ``seed``: the seed in use; drawn anew by each `begin` if it is to be random.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        *,
        seed: int = RANDOM_SEED,
        bias: Mapping[int, float] | None = None,
        adaptive: Adaptive | None = None,
        greedy: bool = False,
    ) -> None:
        self.greedy = greedy
        self.stateful = adaptive is not None
        self._filters = tuple(filters)
        self._requested_seed = seed
        self._bias = dict(bias or {})
        self._adaptive = adaptive
        self._state = SamplerState()
        self._generator = torch.Generator()
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """Starts a request: the text is ``prompt``, all random streams start again."""
        self.seed = self._requested_seed
        if self.seed == RANDOM_SEED:
            self.seed = secrets.randbelow(RANDOM_SEED)
        self._generator.manual_seed(stream_seed(self.seed, "draw"))
        self._state.xtc.manual_seed(stream_seed(self.seed, "xtc"))
        self._state.text = list(prompt)
        if self._adaptive is not None:
            self._adaptive.begin()

    def distribution(self, logits: Tensor) -> Tensor:
        """Probabilities of the next token after the whole chain, float32 [V], on V's device.

        Does not draw and does not learn; but xtc tosses its coin, so ask once per position.
        """
        after = self._after_adaptive(self._filtered(logits))
        probabilities = np.zeros(len(logits), np.float32)
        probabilities[after.token_ids()] = after.probabilities()
        return torch.from_numpy(probabilities).to(logits.device)

    def sample(self, logits: Tensor) -> int:
        """The next token for logits [V]; takes one number from the chain's generator."""
        if self.greedy:
            return best_tokens(logits[None])[0]
        before = self._filtered(logits)
        after = self._after_adaptive(before)
        token = after.draw(float(torch.rand((), dtype=torch.float64, generator=self._generator)))
        if self._adaptive is not None:
            self._adaptive.update(before, after, token)
        return token

    def accept(self, token: int) -> None:
        """Appends ``token`` to the text that penalties look at."""
        self._state.text.append(token)

    def _filtered(self, logits: Tensor) -> Candidates:
        candidates = Candidates(logits.float().cpu().numpy())
        if self._bias:
            candidates = add_bias(candidates, self._bias)
        with np.errstate(over="ignore", divide="ignore"):  # the draw refuses what is not finite
            for apply in self._filters:
                candidates = apply(candidates, self._state)
        return candidates

    def _after_adaptive(self, candidates: Candidates) -> Candidates:
        return candidates if self._adaptive is None else self._adaptive.apply(candidates)

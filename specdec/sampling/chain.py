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
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.options import RANDOM_SEED
from specdec.sampling.adaptive import Adaptive
from specdec.sampling.candidates import Candidates, Floats
from specdec.sampling.head import Best, HeadSampler
from specdec.sampling.penalties import add_bias

STREAMS = {
    "draw": 0,  # the last draw of the chain, whichever sampler makes it
    "xtc": 0xC2B2AE35,
    "verifier": 0x9E3779B9,  # llama.cpp's
    "draft": 0x85EBCA6B,  # llama.cpp's
    "synthetic": 0x27D4EB2F,
}
"""Purpose of a random stream -> what its seed is the seed of the request XOR-ed with."""


def best_tokens(logits: Tensor, best: Best | None = None) -> list[int]:
    """The token with the largest logit in each row of [T, V], the first one of equals.

    ``best`` of these logits, if known, spares looking for them; not so if one is not finite.
    numpy is several times as fast as torch here, and starts no threads that have to be waited for
    where cores are busy.
    """
    if best is not None and min(tokens := best.tokens(), default=0) >= 0:
        return tokens
    if not logits.is_cpu:
        return logits.argmax(dim=-1).tolist()
    return logits.numpy().argmax(axis=-1).tolist()  # type: ignore[no-any-return]


def host_rows(logits: Tensor) -> Floats:
    """Logits [T, V] of any type, on any device, as numpy's float32; no copy if they are that."""
    if logits.is_cpu and logits.dtype == torch.float32:
        return logits.numpy()
    return logits.float().cpu().numpy()


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
    ``head``: the whole chain, if the few best logits of a row are enough for it, else None.
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
        head: HeadSampler | None = None,
    ) -> None:
        self.greedy = greedy
        self.head = head
        self.stateful = adaptive is not None
        self._filters = tuple(filters)
        self._requested_seed = seed
        self._bias = dict(bias or {})
        self._adaptive = adaptive
        self._state = SamplerState()
        self._generator = torch.Generator()
        self._uniforms: list[float] = []
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """Starts a request: the text is ``prompt``, all random streams start again."""
        self.seed = self._requested_seed
        if self.seed == RANDOM_SEED:
            self.seed = secrets.randbelow(RANDOM_SEED)
        self._generator.manual_seed(stream_seed(self.seed, "draw"))
        self._uniforms = []
        self._state.xtc.manual_seed(stream_seed(self.seed, "xtc"))
        self._state.text = list(prompt)
        if self._adaptive is not None:
            self._adaptive.begin()

    def distribution(self, logits: npt.ArrayLike) -> Tensor:
        """Probabilities of the next token after the whole chain for logits [V]; float32 [V].

        Does not draw and does not learn; but xtc tosses its coin, so ask once per position.
        """
        row = np.asarray(logits, np.float32)
        after = self._after_adaptive(self._filtered(row))
        probabilities = np.zeros(len(row), np.float32)
        probabilities[after.token_ids()] = after.probabilities()
        return torch.from_numpy(probabilities)

    def sample(self, logits: npt.ArrayLike) -> int:
        """The next token for logits [V]; takes one number from the chain's generator."""
        row = np.asarray(logits, np.float32)
        if self.greedy:
            return int(row.argmax())
        before = self._filtered(row)
        after = self._after_adaptive(before)
        token = after.draw(self._uniform())
        if self._adaptive is not None:
            self._adaptive.update(before, after, token)
        return token

    def sample_head(self, ids: Sequence[int], logits: Sequence[float]) -> int:
        """What `sample` returns, but for rounding, from the ``head.n`` best tokens of the row."""
        assert self.head is not None
        return self.head.draw(ids, logits, self._uniform())

    def accept(self, token: int) -> None:
        """Appends ``token`` to the text that penalties look at."""
        self._state.text.append(token)

    def _uniform(self) -> float:
        """The next number of the stream; numbers are made in advance, one alone takes as long."""
        if not self._uniforms:
            numbers = torch.rand(64, dtype=torch.float64, generator=self._generator)
            self._uniforms = numbers.tolist()[::-1]
        return self._uniforms.pop()

    def _filtered(self, logits: Floats) -> Candidates:
        candidates = Candidates(logits)
        if self._bias:
            candidates = add_bias(candidates, self._bias)
        for apply in self._filters:
            candidates = apply(candidates, self._state)
        return candidates

    def _after_adaptive(self, candidates: Candidates) -> Candidates:
        return candidates if self._adaptive is None else self._adaptive.apply(candidates)

"""From a draft and the target's logits to the tokens that are emitted.

Three ways, chosen round by round: synthetic acceptance (benchmarks), rejection sampling (the draft
was sampled and has its q), matching (everything else). p is always the target's distribution after
its whole sampler chain, q the draft's. Rejection sampling: Leviathan et al., arXiv 2211.17192,
appendix A.1; Chen et al., arXiv 2302.01318, algorithm 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.errors import UsageError
from specdec.options import SpecOptions
from specdec.sampling.candidates import Floats
from specdec.sampling.chain import SamplerChain, best_tokens, host_rows, stream_seed
from specdec.sampling.head import Best


class Verifier:
    """Verifies drafts for one request; made after `SamplerChain.begin`, whose seed it derives from.

    ``rates`` are unconditional acceptance probabilities per position for synthetic acceptance.
    """

    def __init__(
        self,
        chain: SamplerChain,
        end_tokens: frozenset[int],
        *,
        rates: Sequence[float] | None = None,
    ) -> None:
        self.chain = chain
        self.end_tokens = end_tokens
        self.rates = rates
        purpose = "verifier" if rates is None else "synthetic"
        self._generator = torch.Generator().manual_seed(stream_seed(chain.seed, purpose))

    def verify(self, draft: Draft, logits: Tensor, best: Best | None = None) -> list[int]:
        """1 to K+1 emitted tokens from logits [K+1, V]; all but the last are draft tokens.

        ``best`` of these logits, if known, spares looking for them. Every emitted token has been
        accepted by the chain.
        """
        if self.rates is not None:
            return self._synthetic(draft, host_rows(logits), self.rates)
        if draft.q is not None and not self.chain.greedy and not self.chain.stateful:
            return self._rejection(draft, host_rows(logits))
        return self._matching(draft, logits, best)

    def _matching(self, draft: Draft, logits: Tensor, best: Best | None) -> list[int]:
        """The target's own samples, as long as the draft agrees with them."""
        emitted: list[int] = []
        samples = self._samples(logits, best)
        for row, (token, drafted) in enumerate(zip(samples, [*draft.tokens, None], strict=True)):
            self.chain.accept(token)
            emitted.append(token)
            more_drafted = row + 1 < len(draft.tokens)
            if token != drafted or (token in self.end_tokens and more_drafted):
                break
        return emitted

    def _samples(self, logits: Tensor, best: Best | None) -> Iterable[int]:
        """A token for each row, drawn one by one, each after the one before is accepted."""
        chain = self.chain
        if chain.greedy:
            return best_tokens(logits, best)
        if best is None or chain.head is None:
            return map(chain.sample, host_rows(logits))
        return self._samples_of_heads(logits, best, chain.head.n)

    def _samples_of_heads(self, logits: Tensor, best: Best, n: int) -> Iterator[int]:
        """The same from the ``n`` best of each row, where they are known."""
        for row in range(logits.shape[0]):
            head = best.head(row, n)
            if head is None:
                yield self.chain.sample(host_rows(logits[row]))
            else:
                yield self.chain.sample_head(*head)

    def _rejection(self, draft: Draft, logits: Floats) -> list[int]:
        """Accepts d with probability min(1, p(d) / q(d)), else draws from max(0, p - q)."""
        assert draft.q is not None
        emitted: list[int] = []
        for row, token in enumerate(draft.tokens):
            p = self.chain.distribution(logits[row])
            ids, q = draft.q.ids[row].cpu(), draft.q.probs[row].to(p)
            p_token = float(p[token])
            q_token = float(q[ids == token].sum())
            accepted = q_token > 0 and (p_token >= q_token or self._uniform() < p_token / q_token)
            emitted.append(token if accepted else self._residual(p, ids, q))
            self.chain.accept(emitted[-1])
            if not accepted or token in self.end_tokens:
                return emitted
        emitted.append(self.chain.sample(logits[len(draft.tokens)]))
        self.chain.accept(emitted[-1])
        return emitted

    def _residual(self, p: Tensor, ids: Tensor, q: Tensor) -> int:
        """A token from max(0, p - q), or from p where rounding leaves nothing of it."""
        rest = p.index_add(0, ids, -q).clamp(min=0)
        weights = rest if float(rest.sum()) > 0 else p
        return int(torch.multinomial(weights.double(), 1, generator=self._generator))

    def _synthetic(self, draft: Draft, logits: Floats, rates: Sequence[float]) -> list[int]:
        """Accepts by dice; the output is not the target's and only good for measuring."""
        emitted: list[int] = []
        before = 1.0
        for row, token in enumerate(draft.tokens):
            own = self.chain.sample(logits[row])
            rate = rates[row] if row < len(rates) else 0.0
            chance = rate / before if before > 0 else 0.0
            before = rate
            accepted = token not in self.end_tokens and self._uniform() < chance
            emitted.append(token if accepted else own)
            self.chain.accept(emitted[-1])
            if not accepted:
                return emitted
        emitted.append(self.chain.sample(logits[len(draft.tokens)]))
        self.chain.accept(emitted[-1])
        return emitted

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def synthetic_rates(options: SpecOptions, n_max: int) -> tuple[float, ...] | None:
    """Acceptance probability per position from `--spec-synth-len` or `--spec-synth-rates`.

    ``n_max`` is the largest effective draft length over the enabled drafters. None when neither
    option is given. Raises `UsageError` with llama.cpp's words.
    """
    if options.synth_len is None and options.synth_rates is None:
        return None
    if n_max < 1:
        raise UsageError(
            "--spec-synth-len: synthetic acceptance requires at least one speculative token"
        )
    if options.synth_rates is not None:
        return _checked_rates(options.synth_rates, n_max)
    length = options.synth_len
    assert length is not None
    if not 1 <= length <= n_max + 1:
        raise UsageError(
            f"--spec-synth-len: synthetic acceptance length must be finite and within "
            f"[1, {n_max + 1}], got {length:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(32):
        middle = (low + high) / 2
        below = sum(middle**i for i in range(1, n_max + 1)) < length - 1
        low, high = (middle, high) if below else (low, middle)
    return tuple(high**i for i in range(1, n_max + 1))


def _checked_rates(rates: Sequence[float], n_max: int) -> tuple[float, ...]:
    name = "--spec-synth-rates: synthetic acceptance rates"
    if len(rates) != n_max:
        raise UsageError(f"{name} must contain {n_max} values, got {len(rates)}")
    if not all(0.0 <= rate <= 1.0 for rate in rates):
        raise UsageError(f"{name} must be finite and within [0, 1]")
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise UsageError(f"{name} must be monotonically non-increasing")
    return tuple(rates)

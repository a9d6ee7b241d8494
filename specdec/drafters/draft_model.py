"""draft-simple: a second, smaller causal model with the same vocabulary.

Its cache follows the target's. Rows that drafting computed for accepted tokens are kept, so each
token is run once.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from specdec.drafters.base import Draft, DraftSampler, Pick, as_candidates
from specdec.drafters.selection import DraftContext
from specdec.kv_cache import KVCache
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions

log = logging.getLogger(__name__)


class DraftModel:
    """Drafts token by token with ``model`` over a context of ``n_ctx`` tokens.

    ``n_vocab`` is the target's vocabulary; the two may differ a little in size.
    """

    name = "draft-simple"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        options: DraftOptions,
        n_ctx: int,
        n_vocab: int,
        *,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.options = options
        self.n_max = options.n_max
        self.n_ctx = n_ctx
        self.n_vocab = min(n_vocab, model.config.n_vocab)
        self._dtypes = (dtype_k, dtype_v)
        self._warned = False
        self._observed = 0
        self._cache = self._new_cache()
        self._sampler = DraftSampler(options, SamplingOptions())

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        kept = self._cache.reachable(kept)
        if kept:
            self._cache.truncate(kept)
        else:
            self._cache = self._new_cache()
        self._observed = kept
        self._sampler = DraftSampler(self.options, sampling)
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Runs the tokens that drafting has not run already."""
        self._observed += tokens.shape[0]
        missing = tokens[tokens.shape[0] - (self._observed - self._cache.length) :]
        if missing.shape[0]:
            # Tokens that only the target knows keep their place; what the draft makes of them only
            # costs acceptance.
            known = missing.clamp(max=self.model.config.n_vocab - 1)
            self.model(known.to(self.model.device), self._cache, logit_rows=0)

    def draft(self, last_token: int, room: int) -> Draft:
        """Up to `n_max` tokens; ends before the first one whose confidence is below `p_min`.

        Drafts shorter than `n_min` are dropped if they are greedy. A drawn draft stands: its length
        depends on what was drawn, and to drop it for that would favour the other tokens.
        """
        known = last_token < self.model.config.n_vocab
        length = self._longest(room) if known else 0
        picks: list[Pick] = []
        end = "n_max" if length == self.options.n_max else "room"
        token = last_token
        while len(picks) < length:
            logits = self.model(torch.tensor([token], device=self.model.device), self._cache).logits
            pick = self._sampler.pick(logits[0, : self.n_vocab])
            if pick.confidence < self.options.p_min:
                end = "p_min"
                break
            picks.append(pick)
            token = pick.token
        n_min = 1 if self._sampler.samples else self.options.n_min
        if len(picks) < max(n_min, 1):
            self._cache.truncate(self._observed)
            return Draft(end="n_min" if picks else end)
        return Draft([pick.token for pick in picks], as_candidates(picks), end)

    def accept(self, accepted: int) -> None:
        """Keeps the rows of the last token and of the accepted tokens, as far as they were run."""
        self._cache.truncate(min(self._cache.length, self._observed + 1 + accepted))

    def _new_cache(self) -> KVCache:
        dtype_k, dtype_v = self._dtypes
        n_states = self.n_max + 2  # a whole draft is undone step by step
        return self.model.new_cache(self.n_ctx, dtype_k=dtype_k, dtype_v=dtype_v, n_states=n_states)

    def _longest(self, room: int) -> int:
        """The draft length that fits the room and the context the draft was trained for."""
        length = min(self.options.n_max, room)
        n_train = self.model.config.n_ctx_train
        if not n_train or self._observed + length <= n_train:
            return length
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: the draft model was trained for a context of %d tokens; no drafts past it",
                self.name,
                n_train,
            )
        return max(n_train - self._observed, 0)


def build(context: DraftContext) -> DraftModel:
    """The drafter for the draft file of ``context``."""
    assert context.draft_file is not None
    model = load_target(
        context.draft_file,
        device=context.device,
        kernels=context.kernels,
        activations=context.activations,
    )
    return DraftModel(
        model,
        context.draft_options(),
        context.n_ctx,
        context.target.config.n_vocab,
        dtype_k=context.dtype_k,
        dtype_v=context.dtype_v,
    )

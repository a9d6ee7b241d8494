"""The driver of all variants behind the four verbs.

The pair at position P is (token P, h of P - 1), so after `observe` the cache holds a pair for every
committed token, and the newest h waits for the last token. Pairs written while drafting carry the
head's own outputs; they are cut off again, and `observe` writes the target's rows instead.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafters.base import Draft, DraftSampler, Pick, as_candidates
from specdec.drafters.mtp.model import MTPModel
from specdec.kv_cache import CacheShape, KVCache
from specdec.options import DraftOptions, SamplingOptions

log = logging.getLogger(__name__)


class MTPDrafter:
    """Drafts with the MTP layers of ``model`` over a context of ``n_ctx`` tokens."""

    name = "draft-mtp"

    def __init__(
        self,
        model: MTPModel,
        options: DraftOptions,
        n_ctx: int,
        *,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.taps = model.taps
        self.options = self._clamped(options)
        self.n_max = self.options.n_max
        self.n_ctx = n_ctx
        self._dtypes = (dtype_k, dtype_v)
        self._cache, self._final = self._new_caches()
        self._sampler = DraftSampler(self.options, SamplingOptions())

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        if kept:
            self._cache.truncate(kept)
            self._final.truncate(kept)
        else:
            self._cache, self._final = self._new_caches()
        self._sampler = DraftSampler(self.options, sampling)
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Reads T committed tokens with their taps [T, n_taps, D]."""
        assert hidden is not None
        device = self.model.device
        hidden = hidden.to(device)
        final = hidden[:, -1]
        before = torch.cat((self._waiting()[None], final[:-1]))
        self.model.read(tokens.to(device), hidden, before, self._cache)
        self._final.append(0, final[:, None], final[:, None, :0])
        self._final.advance(final.shape[0])

    def draft(self, last_token: int, room: int) -> Draft:
        """Up to `n_max` tokens; ends before the first one whose confidence is below `p_min`.

        Drafts shorter than `n_min` are dropped if they are greedy and it is not for lack of room. A
        drawn draft stands: to drop it for what was drawn would favour the other tokens.
        """
        length = min(self.n_max, room)
        end = "n_max" if length == self.n_max else "room"
        tokens, hidden, picks = [last_token], [self._waiting()], list[Pick]()
        committed = self._cache.length
        while len(picks) < length:
            so_far = torch.tensor(tokens, device=self.model.device)
            logits, output = self.model.step(so_far, torch.stack(hidden), self._cache)
            pick = self._sampler.pick(logits)
            if pick.confidence < self.options.p_min:
                end = "p_min"
                break
            picks.append(pick)
            tokens.append(pick.token)
            hidden.append(output)
        self._cache.truncate(committed)
        is_short = end != "room" and len(picks) < self.options.n_min
        if is_short and not self._sampler.samples:
            return Draft(end="n_min")
        return Draft([pick.token for pick in picks], as_candidates(picks), end)

    def accept(self, accepted: int) -> None:
        """Nothing: a draft leaves no trace, and accepted tokens are observed like all others."""

    def _waiting(self) -> Tensor:
        """The final state [D] of the newest observed token, zeros before the first."""
        held, _ = self._final.committed(0, torch.float32)
        if held.shape[1]:
            return held[0, -1]
        return torch.zeros(self.model.n_embd, device=self.model.device)

    def _new_caches(self) -> tuple[KVCache, KVCache]:
        """Keys and values of the pairs, and the final states, which a kept prefix needs."""
        (dtype_k, dtype_v), device = self._dtypes, self.model.device
        shapes = self.model.cache_shapes
        pairs = KVCache(shapes, self.n_ctx, device=device, dtype_k=dtype_k, dtype_v=dtype_v)
        return pairs, KVCache([CacheShape(1, self.model.n_embd, 0)], self.n_ctx, device=device)

    def _clamped(self, options: DraftOptions) -> DraftOptions:
        """The options as far as the number of heads allows, with a warning if it does not."""
        longest = self.model.n_max
        if longest is None or max(options.n_max, options.n_min) <= longest:
            return options
        log.warning(
            "%s: requested draft size (n_max=%d, n_min=%d) exceeds the number of MTP heads %d "
            "-- clamping to %d",
            self.name,
            options.n_max,
            options.n_min,
            longest,
            longest,
        )
        return replace(
            options, n_max=min(options.n_max, longest), n_min=min(options.n_min, longest)
        )

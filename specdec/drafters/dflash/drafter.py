"""The driver of the whole family: cache, trunk and one head behind the four verbs.

Committed tokens are *injected*: their fused target features become keys and values at the target's
positions. A draft is one pass over ``[last token, mask, ...]``, which leaves nothing behind, so
`accept` has nothing to undo.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from specdec.drafters.base import Draft, DraftSampler, as_candidates
from specdec.drafters.dflash.head import DraftBlock
from specdec.drafters.dflash.model import DFlashModel
from specdec.kv_cache import CacheShape, KVCache
from specdec.options import DraftOptions, SamplingOptions

log = logging.getLogger(__name__)


class DFlashDrafter:
    """Drafts blocks with ``model`` over a context of ``n_ctx`` tokens."""

    def __init__(
        self,
        model: DFlashModel,
        options: DraftOptions,
        n_ctx: int,
        *,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.name = model.head.name
        self.taps = model.config.target_layers
        self.options = self._clamped(options)
        self.n_max = self.options.n_max
        self.n_ctx = n_ctx
        self._dtypes = (dtype_k, dtype_v)
        self._warned = False
        self._cache, self._anchors = self._new_caches()
        self._sampler = DraftSampler(self.options, SamplingOptions())

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        if kept:
            self._cache.truncate(kept)
            self._anchors.truncate(kept if self.model.head.needs_anchor else 0)
        else:
            self._cache, self._anchors = self._new_caches()
        self._sampler = DraftSampler(self.options, sampling)
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Injects the taps [T, n_taps, D] of T committed tokens."""
        assert hidden is not None
        trunk, head = self.model.trunk, self.model.head
        fused = trunk.fuse(hidden.to(self.model.device))
        trunk.inject(fused, self._cache)
        if head.needs_anchor:
            self._anchors.append(0, fused[:, None], fused[:, None, :0])
            self._anchors.advance(fused.shape[0])

    def draft(self, last_token: int, room: int) -> Draft:
        """One block pass; ends before the first token less likely than `p_min`.

        Drafts shorter than `n_min` are dropped if they are greedy. A drawn draft stands: its length
        depends on what was drawn, and to drop it for that would favour the other tokens.
        """
        length = self._longest(room)
        if length < 1:
            return Draft(end="n_max" if self.n_max < 1 else "room")
        picks = self.model.head.propose(self.run(last_token, length), length, self._sampler)
        end = "p_min" if len(picks) < length else "n_max" if length == self.n_max else "room"
        if len(picks) < min(self.options.n_min, length) and not (picks and self._sampler.samples):
            return Draft(end="n_min")
        return Draft([pick.token for pick in picks], as_candidates(picks), end)

    def run(self, last_token: int, n_draft: int) -> DraftBlock:
        """The trunk's answer to the block that yields ``n_draft`` tokens."""
        model = self.model
        n_masks = model.head.block_len(n_draft) - 1
        tokens = [last_token] + [model.config.mask_token] * n_masks
        embeddings = model.vocabulary.embed(torch.tensor(tokens, device=model.device))
        output = model.trunk(embeddings, self._cache)
        return DraftBlock(output.hidden, output.state, last_token, self._anchor())

    def accept(self, accepted: int) -> None:
        """Nothing: a block leaves no trace, and accepted tokens are observed like all others."""

    def _anchor(self) -> Tensor | None:
        if not self.model.head.needs_anchor:
            return None
        held, _ = self._anchors.committed(0, torch.float32)
        if held.shape[1]:
            return held[0, -1]
        return torch.zeros(self.model.config.n_embd, device=self.model.device)

    def _new_caches(self) -> tuple[KVCache, KVCache]:
        """The context's keys and values, and the fused features that a head may ask for."""
        (dtype_k, dtype_v), device = self._dtypes, self.model.device
        shapes = self.model.trunk.cache_shapes
        n_rows = self.n_ctx + self.model.config.block_size  # native trunks put the block behind
        context = KVCache(shapes, n_rows, device=device, dtype_k=dtype_k, dtype_v=dtype_v)
        features = [CacheShape(1, self.model.config.n_embd, 0)]
        return context, KVCache(features, self.n_ctx, device=device)

    def _clamped(self, options: DraftOptions) -> DraftOptions:
        """The options as far as head and block allow them, with a warning if they do not."""
        head, block_size = self.model.head, self.model.config.block_size
        if options.sampling == "probabilistic" and not head.can_sample:
            log.warning(
                "%s has no draft distribution; its drafts stay greedy and are verified by matching",
                head.name,
            )
            options = replace(options, sampling="greedy")
        if max(options.n_max, options.n_min) <= head.n_max:
            return options
        log.warning(
            "%s: requested draft size (n_max=%d, n_min=%d) exceeds the trained block size %d "
            "-- clamping to %d",
            head.name,
            options.n_max,
            options.n_min,
            block_size,
            head.n_max,
        )
        return replace(
            options,
            n_max=min(options.n_max, head.n_max),
            n_min=min(options.n_min, head.n_max),
        )

    def _longest(self, room: int) -> int:
        """The draft length whose block fits the room and the context the draft was trained for."""
        length = min(self.n_max, room)
        left = self.model.config.n_ctx_train - self._cache.length
        if not length or self.model.head.block_len(length) <= left:
            return length
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: the draft model was trained for a context of %d tokens; no drafts past it",
                self.name,
                self.model.config.n_ctx_train,
            )
        while length and self.model.head.block_len(length) > left:
            length -= 1
        return length

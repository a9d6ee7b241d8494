"""The target: a model whose distribution is served.

Knows how to run tokens through blocks, where to tap the residual stream, and how to load weights by
name. Knows nothing about drafters: it is asked for *taps*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache
from specdec.models.layers import (
    DecoderLayer,
    LayerSpec,
    RotaryEmbedding,
    SoftCap,
    new_embedding,
)
from specdec.models.rope import read_rope
from specdec.models.rows import ROW_BLOCK, Rows
from specdec.options import RopeOptions

if TYPE_CHECKING:
    from specdec.sampling.head import Best

Transform = Callable[[str, Tensor], Tensor]
"""Rearranges the rows of a tensor by name, once, at load; may be given rows of packed bytes."""


class RunLayers(Protocol):
    """Runs rows through all layers of a target."""

    def __call__(
        self,
        layers: Sequence[Any],
        tokens: Tensor,
        cache: KVCache,
        rotary: Sequence[tuple[Tensor, Tensor]],
        rows: Rows,
        *,
        n_logits: int,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Best] | None]:
        """Hidden states [T, D], taps [T, n_taps, D], and logits [n_logits, V] of the last rows.

        ``layers`` are the target's, with the ``rotary`` tables of each from position 0 on. The rows
        of ``tokens`` [T] are appended to the cache. Taps are what the residual stream is at
        ``taps``, but for -1, which the caller fills in; None without any. With logits come the best
        of them; None stands for logits that are left to the caller.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the file says about the model as a whole."""

    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    """c in c * tanh(logits / c); 0 = none."""
    final_tap: int = -1
    """The tap that MTP layers read: the final state after (-1) or before (n_layer) its norm."""


@dataclass(slots=True)
class TargetOutput:
    """What one forward gives."""

    logits: Tensor
    """[R, V] float32, the last R rows asked for."""
    hidden: Tensor | None
    """[T, n_taps, D] in the order of ``taps``; None if none were asked for."""
    best: Best | None = None
    """The best tokens of each row of logits, where native kernels have found them on their way."""


class Target(nn.Module):
    """A decoder-only transformer with a cache, built from `LayerSpec` data."""

    def __init__(self, config: ModelConfig, specs: Sequence[LayerSpec], *, tied: bool) -> None:
        super().__init__()
        self.config = config
        self.token_embd = new_embedding(config.n_vocab, config.n_embd)
        self.blk = nn.ModuleList(spec.new_layer() for spec in specs)
        self.output_norm = nn.RMSNorm(config.n_embd, eps=config.rms_eps)
        if not tied:
            self.output = nn.Linear(config.n_embd, config.n_vocab, bias=False)
        self.softcap: nn.Module = SoftCap(config.logit_softcap)
        self.transform: Transform | None = None
        self.is_row_invariant = False
        self._layers: list[DecoderLayer] = list(self.blk)  # type: ignore[arg-type]
        self._run_layers: RunLayers = self._run_one_by_one
        kinds = list(dict.fromkeys(spec.rope for spec in specs))
        self._rotary = [RotaryEmbedding(kind) for kind in kinds]
        self._rotary_of = [kinds.index(spec.rope) for spec in specs]

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The blocks in order."""
        return self._layers

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.output_norm.weight.device

    @property
    def n_taps(self) -> int:
        """Number of points that can be tapped: every layer's input and the last layer's output."""
        return self.config.n_layer + 1

    def use_row_invariant(
        self,
        *,
        layers: Sequence[nn.Module],
        run_layers: RunLayers,
        token_embd: nn.Module,
        output_norm: nn.Module,
        output: nn.Module,
    ) -> None:
        """Runs on other modules, with the same signatures, that compute every row as if alone.

        Passes are then never split or padded: any number of rows gives the same numbers.
        ``run_layers`` makes the logits, too.
        """
        self.blk = nn.ModuleList(layers)
        self._layers = list(layers)  # type: ignore[arg-type]
        self._run_layers = run_layers
        self.token_embd, self.output_norm = token_embd, output_norm  # type: ignore[assignment]
        self.output = output  # type: ignore[assignment]
        self.is_row_invariant = True

    def new_cache(
        self,
        n_ctx: int,
        *,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
        n_states: int = 1,
    ) -> KVCache:
        """An empty cache for ``n_ctx`` tokens; memory is taken as it fills.

        ``n_states``: see `KVCache`; it matters for recurrent layers only.
        """
        return KVCache(
            [self.cache_shape(layer) for layer in range(len(self._layers))],
            n_ctx,
            device=self.device,
            dtype_k=dtype_k,
            dtype_v=dtype_v,
            n_states=n_states,
        )

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache,
        *,
        taps: Sequence[int] = (),
        logit_rows: int | None = None,
    ) -> TargetOutput:
        """Runs tokens [T] int64 at positions ``cache.length`` ... and commits them to the cache.

        ``taps``: k in 0 ... n_layer is the residual stream entering layer k (n_layer: after the
        last layer, before the output norm), -1 the same after the output norm. ``logit_rows``:
        None = all, 1 = the last, 0 = none. When all logits are wanted (verification, single steps)
        rows are computed in blocks of `ROW_BLOCK`, so that a row's numbers do not depend on how
        many rows share the pass.
        """
        cache.begin_pass()
        n = tokens.shape[0]
        n_logits = n if logit_rows is None else min(logit_rows, n)
        is_exact = logit_rows is None or n <= ROW_BLOCK
        if is_exact and not self.is_row_invariant:
            return self._exact(tokens, cache, taps, n_logits)
        rows = Rows(cache.length, n, exact=is_exact)
        final, tapped, found = self._run(tokens, cache, taps, rows, n_logits)
        if found is None:
            return TargetOutput(self._logits(final, n_logits), tapped)
        logits, best = found
        return TargetOutput(logits, tapped, best)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding table, [T] -> [T, D], without the architecture's scale."""
        return self.token_embd(tokens)  # type: ignore[no-any-return]

    def cache_shape(self, layer: int) -> CacheShape:
        """What ``layer`` keeps of the tokens it has read."""
        return self._layers[layer].spec.cache_shape

    def keys_values(self, layer: int, hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """What ``layer`` keeps of its input rows [T, D] at positions ``start`` ...

        Keys [T, Hkv, Dh] and values [T, Hkv, Dv], as in the cache after a pass over these rows.
        """
        positions = torch.arange(start, start + hidden.shape[0], device=hidden.device)
        rotary = self._rotary[self._rotary_of[layer]](positions)
        block = self._layers[layer]
        return block.keys_values(block.attn_norm(hidden), rotary)

    def rotary(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(cos, sin) of positions [T] int64 for every layer, each [T, n_rot / 2] float32."""
        tables = [module(positions) for module in self._rotary]
        return [tables[kind] for kind in self._rotary_of]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The output matrix alone (no norm, no soft cap), [T, D] -> [T, V] float32."""
        if hasattr(self, "output"):
            return self.output(hidden).float()  # type: ignore[no-any-return]
        return F.linear(hidden, self.token_embd.weight).float()

    def _logits(self, final: Tensor, n_logits: int) -> Tensor:
        """Logits [n_logits, V] of the last of the rows [T, D], in blocks of `ROW_BLOCK` rows."""
        if not n_logits:
            return final.new_empty(0, self.config.n_vocab)
        blocks = torch.split(self.output_norm(final[-n_logits:]), ROW_BLOCK)
        return torch.cat([self._block_logits(block) for block in blocks])

    def _block_logits(self, normed: Tensor) -> Tensor:
        count = normed.shape[0]
        logits: Tensor = self.softcap(self.lm_head(F.pad(normed, (0, 0, 0, ROW_BLOCK - count))))
        return logits[:count]

    def _exact(
        self, tokens: Tensor, cache: KVCache, taps: Sequence[int], n_logits: int
    ) -> TargetOutput:
        """Blocks of `ROW_BLOCK` rows, the last one padded, one after the other."""
        blocks: list[Tensor] = []
        tapped: list[Tensor] = []
        for part in torch.split(tokens, ROW_BLOCK):
            count = part.shape[0]
            padded = F.pad(part, (0, ROW_BLOCK - count))
            rows = Rows(cache.length, count, exact=True)
            final, taken, _ = self._run(padded, cache, taps, rows, 0)
            blocks.append(final[:count])
            if taken is not None:
                tapped.append(taken[:count])
        hidden = torch.cat(tapped) if tapped else None
        return TargetOutput(self._logits(torch.cat(blocks), n_logits), hidden)

    def _run(
        self, tokens: Tensor, cache: KVCache, taps: Sequence[int], rows: Rows, n_logits: int
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Best] | None]:
        """(last hidden state [T, D], taps [T, n_taps, D] if any, logits as in `RunLayers`).

        Commits ``rows.count`` rows.
        """
        n = tokens.shape[0]
        tables = [kind.tables(rows.start + n, tokens.device) for kind in self._rotary]
        rotary = [tables[kind] for kind in self._rotary_of]
        hidden, tapped, logits = self._run_layers(
            self._layers, tokens, cache, rotary, rows, n_logits=n_logits, taps=taps
        )
        if -1 in taps:
            _store(tapped, taps, -1, self.output_norm(hidden))
        cache.advance(rows.count)
        return hidden, tapped, logits

    def _run_one_by_one(
        self,
        layers: Sequence[DecoderLayer],
        tokens: Tensor,
        cache: KVCache,
        rotary: Sequence[tuple[Tensor, Tensor]],
        rows: Rows,
        *,
        n_logits: int,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None, None]:
        hidden = self.embed(tokens) * self.config.embedding_scale
        n, end = tokens.shape[0], rows.start + tokens.shape[0]
        tapped = hidden.new_empty(n, len(taps), hidden.shape[1]) if taps else None
        parts = {
            id(pair): (pair[0][rows.start : end], pair[1][rows.start : end]) for pair in rotary
        }
        for index, (layer, pair) in enumerate(zip(layers, rotary, strict=True)):
            _store(tapped, taps, index, hidden)
            hidden = layer(hidden, cache, index, parts[id(pair)], rows)
        _store(tapped, taps, len(layers), hidden)
        return hidden, tapped, None


def _store(tapped: Tensor | None, taps: Sequence[int], layer: int, hidden: Tensor) -> None:
    for slot, tap in enumerate(taps):
        if tap == layer and tapped is not None:
            tapped[:, slot] = hidden


def read_layer_spec(file: GGUFFile, options: RopeOptions, layer: int = 0) -> LayerSpec:
    """A block of the kind that most architectures share, from metadata and the block's tensors.

    Keys that may hold one number a layer are read for ``layer``. Raises `ModelFileError` for
    missing or impossible sizes.
    """
    key = file.key
    n_embd = file.get_int(key("embedding_length"))
    n_head = read_per_layer(file, "attention.head_count", layer)
    n_head_kv = read_per_layer(file, "attention.head_count_kv", layer, default=n_head)
    if min(n_embd, n_head, n_head_kv) < 1 or n_head % n_head_kv:
        raise ModelFileError(
            f"{file.path}: {n_head} attention heads over {n_head_kv} key/value heads and width "
            f"{n_embd} do not divide; the file is damaged"
        )
    head_dim = file.get_int(key("attention.key_length"), default=n_embd // n_head)
    n_expert, n_used = read_expert_counts(file)
    n_ff = read_per_layer(file, "feed_forward_length", layer)
    if n_expert:
        n_ff = file.get_int(key("expert_feed_forward_length"), default=n_ff)
    head_dim_v = file.get_int(key("attention.value_length"), default=head_dim)
    file.check_size(key("embedding_length"), n_embd)
    file.check_size(key("attention.head_count"), n_head)
    file.check_size(key("attention.key_length"), head_dim)
    file.check_size(key("attention.value_length"), head_dim_v)
    name = "expert_feed_forward_length" if n_expert else "feed_forward_length"
    file.check_size(key(name), n_ff)
    scale = file.get_float(key("attention.scale"), default=0.0)
    n_rot = file.get_int(key("rope.dimension_count"), default=head_dim)
    if n_rot % 2 or not 0 < n_rot <= head_dim:
        raise ModelFileError(
            f"{file.path}: {key('rope.dimension_count')} must be even and at most {head_dim}, "
            f"got {n_rot}"
        )
    return LayerSpec(
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        n_ff=n_ff,
        rms_eps=file.get_float(key("attention.layer_norm_rms_epsilon")),
        rope=read_rope(file, n_rot, options),
        attention_scale=scale or 1.0 / math.sqrt(head_dim),
        has_qkv_bias=f"blk.{layer}.attn_q.bias" in file.tensors,
        has_output_bias=f"blk.{layer}.attn_output.bias" in file.tensors,
        n_expert=n_expert,
        n_expert_used=n_used,
    )


def read_expert_counts(file: GGUFFile) -> tuple[int, int]:
    """How many experts a routed layer has, and how many of them a row uses; zeros without any.

    Raises `ModelFileError` for impossible counts.
    """
    n_expert = file.get_int(file.key("expert_count"), default=0)
    n_used = file.get_int(file.key("expert_used_count"), default=0)
    if n_expert and not 0 < n_used <= n_expert:
        raise ModelFileError(
            f"{file.path}: {file.key('expert_used_count')} must be 1 to {n_expert}, got {n_used}"
        )
    return n_expert, n_used


def read_per_layer(file: GGUFFile, suffix: str, layer: int, default: int | None = None) -> int:
    """The integer at a key that holds one number for all blocks or one for each of them."""
    key = file.key(suffix)
    if default is not None and key not in file.metadata:
        return default
    if isinstance(file.metadata.get(key), np.ndarray):
        return file.get_ints(key, length=file.get_int(file.key("block_count")))[layer]
    return file.get_int(key)


def read_window(file: GGUFFile, default: int | None = None) -> int:
    """`attention.sliding_window`: keys that a query sees, itself included; 0 = all.

    Raises `ModelFileError` for a negative one.
    """
    key = file.key("attention.sliding_window")
    if default is not None and key not in file.metadata:
        return default
    window = file.get_int(key)
    if window < 0:
        raise ModelFileError(f"{file.path}: {key} is {window}, expected 0 or above")
    return window


def count_mtp_layers(file: GGUFFile) -> int:
    """`nextn_predict_layers`: how many of the last blocks predict tokens further ahead.

    Raises `ModelFileError` unless some blocks are left for the model itself.
    """
    n_mtp = file.get_int(file.key("nextn_predict_layers"), default=0)
    if not 0 <= n_mtp < max(file.get_int(file.key("block_count")), 1):
        raise ModelFileError(
            f"{file.path}: {file.key('nextn_predict_layers')} is {n_mtp}, expected fewer than "
            f"{file.key('block_count')}"
        )
    return n_mtp


def read_config(file: GGUFFile) -> ModelConfig:
    """The facts about the whole model; the vocabulary is the height of the embedding table."""
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: tensor token_embd.weight is missing; no model weights")
    return ModelConfig(
        architecture=file.architecture,
        n_layer=file.get_int(file.key("block_count")) - count_mtp_layers(file),
        n_embd=file.get_int(file.key("embedding_length")),
        n_vocab=file.tensors["token_embd.weight"].shape[0],
        n_ctx_train=file.get_int(file.key("context_length"), default=0),
        rms_eps=file.get_float(file.key("attention.layer_norm_rms_epsilon")),
    )

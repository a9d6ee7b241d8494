"""Passes of a target over the rows of several texts at once.

All but the attention is row-wise, so the target's own layers do it, on the rows of all texts
together: matrix products want many rows. The caller attends, text by text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.errors import UnsupportedError, UsageError
from specdec.models.base import Target
from specdec.models.layers import DecoderLayer, causal_mask
from specdec.models.rows import Rows

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, Dh], k [T, Hkv, Dh], v [T, Hkv, Dv]) -> mixed values [T, H * Dv]."""


def check_target(target: Target) -> None:
    """Raises `UnsupportedError` for a target with recurrent or gated layers, and `UsageError` for
    one on native kernels.
    """
    if target.is_row_invariant:
        raise UsageError("training needs the target on torch kernels; give --kernels torch")
    for layer in target.layers:
        if layer.spec.cache_shape.state or type(layer).forward is not DecoderLayer.forward:
            raise UnsupportedError(
                f"training: {target.config.architecture} has recurrent or gated layers, which are "
                "not supported; dense architectures are"
            )


def run_rows(
    target: Target,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Last hidden states [T, D] and taps [T, n_taps, D] of tokens [T] at positions [T].

    Taps are layer inputs 0 ... n_layer - 1, or n_layer for what these return. All in the type of
    the weights.
    """
    tokens, positions = tokens.to(target.device), positions.to(target.device)
    rotary = target.rotary(positions)
    rows = Rows(0, tokens.shape[0], exact=False)
    hidden = target.embed(tokens)
    if target.config.embedding_scale != 1.0:
        hidden = hidden * target.config.embedding_scale
    tapped = hidden.new_empty(tokens.shape[0], len(taps), hidden.shape[1])
    for index, layer in enumerate(target.layers):
        for slot, tap in enumerate(taps):
            if tap == index:
                tapped[:, slot] = hidden
        x = layer.attn_norm(hidden)
        q = layer.queries(x, rotary[index]).to(hidden.dtype)
        k, v = layer.keys_values(x, rotary[index])
        mixed = attend(index, q, k.to(hidden.dtype), v.to(hidden.dtype))
        hidden = hidden + layer.project_attention(mixed)
        x = getattr(layer, layer.spec.ffn_norm)(hidden)
        hidden = layer.finish(hidden, layer.feed_forward(x, rows))
    for slot, tap in enumerate(taps):
        if tap == len(target.layers):
            tapped[:, slot] = hidden
    return hidden, tapped


def attend_text(block: DecoderLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [T, H * Dv] of one text's last rows q [T, H, Dh] over all its rows.

    ``k`` [Hkv, N, Dh] and ``v`` [Hkv, N, Dv] are in order of position.
    """
    n_rows, n_keys, window = q.shape[0], k.shape[1], block.spec.window
    start = n_keys - n_rows
    if block.spec.has_sinks:
        return block.attend_causal(q, k, v, Rows(start, n_rows, exact=False))
    is_simple = start == 0 and (not window or n_keys <= window)
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=None if is_simple else causal_mask(start, n_rows, window, q.device),
        is_causal=is_simple,
        scale=1.0,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).flatten(1)


def read_texts(
    target: Target, texts: Sequence[Sequence[int]], taps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`run_rows` of whole texts, their rows one below the other."""
    counts = [len(text) for text in texts]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = target.layers[layer]
        parts = zip(*(torch.split(x, counts) for x in (q, k, v)), strict=True)
        mixed = [
            attend_text(block, query, key.transpose(0, 1), value.transpose(0, 1))
            for query, key, value in parts
        ]
        return torch.cat(mixed)

    tokens = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(count) for count in counts])
    return run_rows(target, tokens, positions, attend, taps)

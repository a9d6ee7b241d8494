"""Mixture of experts: which experts a row uses, with what weights, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from specdec.models.layers import Rows

MIN_WEIGHT_SUM = 6.103515625e-5
"""Smallest sum that weights are divided by: float16's smallest normal number, as in llama.cpp."""
VECTOR = 8
"""Elements that ``ROW_BLOCK`` rows must have a multiple of each, to fill vectors of the CPU."""


@dataclass(frozen=True, slots=True)
class Routing:
    """From router scores to expert weights."""

    gating: Literal["softmax", "sigmoid"] = "softmax"
    is_normalised: bool = True
    """The weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights (`expert_weights_scale`)."""


SOFTMAX = Routing()
"""Softmax over all experts, the weights of the chosen ones normalised."""


def route(scores: Tensor, n_used: int, routing: Routing, bias: Tensor | None = None) -> Tensor:
    """Expert weights [T, X] of router scores [T, X]; exactly ``n_used`` a row are not zero.

    ``bias`` [X] takes part in the choice, not in the weights.
    """
    scores = scores.float()
    softmax = routing.gating == "softmax"
    probs = scores.softmax(dim=-1) if softmax else by_element(torch.sigmoid, scores)
    chosen = (probs if bias is None else probs + bias).topk(n_used, dim=-1).indices
    top = probs.gather(1, chosen)
    if routing.is_normalised:
        top = top / top.sum(dim=-1, keepdim=True).clamp(min=MIN_WEIGHT_SUM)
    return torch.zeros_like(probs).scatter(1, chosen, top * routing.scale)


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each element of x [T, N], the same bits wherever it stands.

    Kernels take whole vectors first and what is left one by one, with another rounding; here rows
    are padded so that nothing is left.
    """
    width = x.shape[-1]
    return function(F.pad(x, (0, -width % VECTOR)))[..., :width]


def narrow_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] times weight [N, D] transposed, rows rounded alike also when N is tiny.

    Products with two or three columns treat rows differently by their place.
    """
    height = weight.shape[0]
    return F.linear(x, F.pad(weight, (0, 0, 0, -height % VECTOR)))[:, :height]


def mix_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, X], zero where an expert is not used
    run: Callable[[Tensor, int], Tensor],
    rows: Rows,
) -> Tensor:
    """Weighted sum [T, D] of each row's experts.

    In an exact pass every chosen expert reads all rows, so that each product keeps its shape.
    """
    used = weights != 0
    weights = weights.to(x.dtype)
    out = torch.zeros_like(x)
    for expert in used[: rows.count].any(dim=0).nonzero().flatten().tolist():
        if rows.exact:
            out = out + weights[:, expert : expert + 1] * run(x, expert)
            continue
        mine = used[:, expert].nonzero().squeeze(1)
        out.index_add_(0, mine, weights[mine, expert, None] * run(x[mine], expert))
    return out

"""Mixture of experts: which experts a row uses, with what weights, and their weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.models.rows import Rows, by_element

MIN_WEIGHT_SUM = 6.103515625e-5
"""Smallest sum that weights are divided by: float16's smallest normal number, as in llama.cpp."""


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

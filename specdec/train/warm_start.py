"""Where the weights of a new draft come from: the target's own last layers, or a trained trunk."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters.dflash.model import DFlashModel
from specdec.drafters.dflash.trunk import Trunk
from specdec.models.base import Target


@torch.no_grad()
def start_from_target(model: DFlashModel, target: Target) -> None:
    """Gives the trunk the target's last layers where their shapes agree.

    The features become the last tap as the last layer would read it, so that keys and values mean
    something from the first step. ``target`` must be on torch kernels.
    """
    assert isinstance(model.trunk, Trunk)
    trunk, n_embd = model.trunk, model.config.n_embd
    own = dict(trunk.named_parameters())
    theirs = dict(target.named_parameters())
    offset = target.config.n_layer - model.config.n_layer
    for name, parameter in own.items():
        part = name.split(".")
        source = name
        if part[0] == "blk":
            source = ".".join(("blk", str(int(part[1]) + offset), *part[2:]))
        _copy(parameter, theirs.get(source))
    last = f"blk.{target.config.n_layer - 1}.attn_norm.weight"
    _copy(own["enc.output_norm.weight"], theirs.get(last))
    own["fc.weight"][:, -n_embd:] += torch.eye(n_embd)


def _copy(parameter: Tensor, source: Tensor | None) -> None:
    if source is not None and source.shape == parameter.shape:
        parameter.copy_(source)


@torch.no_grad()
def start_from_trunk(model: DFlashModel, trained: dict[str, Tensor]) -> None:
    """Gives the trunk the weights of another head's, by name."""
    for name, parameter in model.trunk.named_parameters():  # type: ignore[attr-defined]
        _copy(parameter, trained.get(name))

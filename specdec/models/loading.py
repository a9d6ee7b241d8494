"""From a file's tensors to a module's parameters, by name: none missing, none left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.models.base import ModelConfig, Target
from specdec.models.layers import LayerSpec, interleaved_to_halves

Transform = Callable[[str, Tensor], Tensor]
"""Changes the layout of a tensor by name, once, at load."""


def load_weights(
    module: nn.Module,
    file: GGUFFile,
    *,
    ignored: Sequence[str] = (),
    transform: Transform | None = None,
) -> None:
    """Fills ``module``, built on the meta device, with the tensors of the same names.

    All names and shapes are compared before the first weight is read. Raises `ModelFileError`.
    """
    load_modules([module], file, ignored=ignored, transform=transform)


def load_modules(
    modules: Sequence[nn.Module],
    file: GGUFFile,
    *,
    ignored: Sequence[str] = (),
    transform: Transform | None = None,
) -> None:
    """`load_weights` for several modules that share the tensors of one file among them."""
    wanted = {name: value for module in modules for name, value in module.state_dict().items()}
    for name, parameter in wanted.items():
        if name not in file.tensors:
            raise ModelFileError(f"{file.path}: tensor {name} is missing; the file is incomplete")
        found = tuple(file.tensors[name].shape)
        if found != tuple(parameter.shape):
            raise ModelFileError(
                f"{file.path}: tensor {name}: shape {list(found)}, expected "
                f"{list(parameter.shape)} from the metadata"
            )
    left_over = [name for name in file.tensors if name not in wanted and name not in ignored]
    if left_over:
        raise ModelFileError(
            f"{file.path}: {len(left_over)} tensors are not part of a {file.architecture} model, "
            f"first {left_over[0]}; the file has features that are not supported"
        )
    weights = {}
    for name in wanted:
        tensor = file.load(name)
        weights[name] = transform(name, tensor) if transform else tensor
    for module in modules:
        mine = {name: weights[name] for name in module.state_dict()}
        module.load_state_dict(mine, assign=True)


def check_finite(module: nn.Module, file: GGUFFile) -> None:
    """Raises `ModelFileError` for the first weight with a value that is not finite."""
    for name, tensor in module.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise ModelFileError(
                f"{file.path}: tensor {name} has values that are not finite; the file is damaged"
            )


def build_target(
    file: GGUFFile,
    config: ModelConfig,
    specs: Sequence[LayerSpec],
    *,
    transform: Transform | None = None,
) -> Target:
    """A loaded target whose output matrix is the embedding table if the file has no other."""
    last = f"blk.{len(specs) - 1}.attn_norm.weight"
    if last not in file.tensors:
        raise ModelFileError(f"{file.path}: tensor {last} is missing; the file is incomplete")
    with torch.device("meta"):
        target = Target(config, specs, tied="output.weight" not in file.tensors)
    load_weights(target, file, ignored=("rope_freqs.weight",), transform=transform)
    return target


def count_layers(file: GGUFFile) -> int:
    """``block_count``, checked against the tensors so that a wild value costs nothing."""
    n_layer = file.get_int(file.key("block_count"))
    if not 0 < n_layer <= len(file.tensors):
        raise ModelFileError(
            f"{file.path}: {file.key('block_count')} is {n_layer}, but the file has "
            f"{len(file.tensors)} tensors"
        )
    return n_layer


def rotary_to_halves(specs: Sequence[LayerSpec]) -> Transform:
    """Rearranges q and k of files that interleave rotary pairs (llama.cpp's "norm" rope)."""

    def transform(name: str, tensor: Tensor) -> Tensor:
        part = name.split(".")
        if part[0] != "blk" or part[2] not in ("attn_q", "attn_k"):
            return tensor
        spec = specs[int(part[1])]
        n_head = spec.n_head if part[2] == "attn_q" else spec.n_head_kv
        return interleaved_to_halves(tensor, n_head, spec.rope.n_rot)

    return transform

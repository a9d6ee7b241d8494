"""From a file's tensors to a module's parameters, by name: none missing, none left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from specdec import native
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.models.base import ModelConfig, Target, Transform, count_mtp_layers, read_per_layer
from specdec.models.experts import Routing
from specdec.models.layers import LayerSpec, interleaved_to_halves
from specdec.options import Activations, Kernels


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
    check_names(modules, file, ignored=ignored)
    weights = {}
    for module in modules:
        for name in module.state_dict():
            if name not in weights:
                tensor = file.load(name)
                weights[name] = transform(name, tensor) if transform else tensor
    for module in modules:
        mine = {name: weights[name] for name in module.state_dict()}
        module.load_state_dict(mine, assign=True)


def check_names(
    modules: Sequence[nn.Module], file: GGUFFile, *, ignored: Sequence[str] = ()
) -> None:
    """Raises `ModelFileError` unless the file has the modules' tensors, in their shapes, alone."""
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


def check_finite(file: GGUFFile) -> None:
    """Raises `ModelFileError` for the first tensor with a value that is not finite."""
    for name in file.tensors:
        if not torch.isfinite(file.load(name)).all():
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
    """A target whose output matrix is the embedding table if the file has no other.

    Every name and shape is checked; the weights are still to be loaded (`fill_target`), by the back
    end that will run them. Blocks for multi-token prediction behind the ``specs`` are left alone.
    """
    last = f"blk.{len(specs) - 1}.attn_norm.weight"
    if last not in file.tensors:
        raise ModelFileError(f"{file.path}: tensor {last} is missing; the file is incomplete")
    try:
        with torch.device("meta"):
            target = Target(config, specs, tied="output.weight" not in file.tensors)
    except (RuntimeError, TypeError) as error:  # sizes below zero, or that no tensor can have
        reason = str(error).splitlines()[0]
        raise ModelFileError(f"{file.path}: the metadata has impossible sizes: {reason}") from None
    check_names([target], file, ignored=_other_tensors(file))
    target.transform = transform
    return target


def fill_target(
    target: Target,
    file: GGUFFile,
    *,
    kernels: Kernels,
    activations: Activations,
    device: torch.device | str,
) -> None:
    """Loads the weights of a target from `build_target`, packed if it runs on native kernels."""
    if not native.install(target, file, kernels, activations, device):
        load_weights(target, file, ignored=_other_tensors(file), transform=target.transform)


def _other_tensors(file: GGUFFile) -> list[str]:
    """Names of tensors that are no parameters of the target."""
    return ["rope_freqs.weight", *mtp_tensors(file)]


def mtp_tensors(file: GGUFFile) -> list[str]:
    """Names of the tensors of the last `nextn_predict_layers` blocks."""
    end = file.get_int(file.key("block_count"))
    first = end - count_mtp_layers(file)
    return [name for name in file.tensors if first <= block_of(name) < end]


def block_of(name: str) -> int:
    """The block that a tensor belongs to by its name, ``blk.N.``; -1 if to none."""
    part = name.split(".", 2)
    return int(part[1]) if part[0] == "blk" and part[1:2] and part[1].isdecimal() else -1


def count_layers(file: GGUFFile) -> int:
    """Blocks of the model itself, checked against the tensors so that a wild value costs nothing.

    That is ``block_count`` without the blocks for multi-token prediction.
    """
    n_layer = file.get_int(file.key("block_count"))
    if not 0 < n_layer <= len(file.tensors):
        raise ModelFileError(
            f"{file.path}: {file.key('block_count')} is {n_layer}, but the file has "
            f"{len(file.tensors)} tensors"
        )
    return n_layer - count_mtp_layers(file)


def read_experts(file: GGUFFile, spec: LayerSpec, layer: int, routing: Routing) -> LayerSpec:
    """``spec`` with the feed-forward branch that the tensors of block ``layer`` make up.

    Dense without a router (`ffn_gate_inp`). Raises `ModelFileError` without experts to choose from.
    """
    block = f"blk.{layer}."
    if block + "ffn_gate_inp.weight" not in file.tensors:
        n_ff = read_per_layer(file, "feed_forward_length", layer)
        return replace(spec, n_expert=0, n_ff=n_ff)
    if not spec.n_expert:
        raise ModelFileError(
            f"{file.path}: {file.key('expert_count')} is 0, but block {layer} has a router"
        )
    names: tuple[Literal["exp_probs_b", "exp_probs_b.bias"], ...]
    names = ("exp_probs_b", "exp_probs_b.bias")
    shared = file.tensors.get(block + "ffn_gate_shexp.weight")
    return replace(
        spec,
        n_ff=file.get_int(file.key("expert_feed_forward_length")),
        n_ff_shared=shared.shape[0] if shared else 0,
        routing=routing,
        expert_bias=next((name for name in names if block + name in file.tensors), ""),
    )


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

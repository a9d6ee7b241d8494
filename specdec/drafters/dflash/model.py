"""A loaded draft: trunk, head and vocabulary of one file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.drafters.dflash import BACKBONES, HEADS, backbone_of, head_of
from specdec.drafters.dflash.config import DraftConfig, read_config
from specdec.drafters.dflash.head import DraftHead
from specdec.drafters.dflash.native_trunk import pack_draft
from specdec.drafters.dflash.trunk import Backbone
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile
from specdec.models.base import Target
from specdec.models.loading import check_names, load_modules
from specdec.options import Activations, Kernels

IGNORED = ("rope_freqs.weight",)
"""Tensors that are read with the metadata."""


@dataclass(frozen=True, slots=True)
class DFlashModel:
    """The parts of a draft, each with the weights that are its own."""

    config: DraftConfig
    trunk: Backbone
    head: DraftHead
    vocabulary: DraftVocabulary
    device: torch.device


def load(
    file: GGUFFile,
    target: Target,
    device: torch.device | str = "cpu",
    *,
    trainable: bool = False,
    kernels: Kernels = "torch",
    activations: Activations = "int8",
) -> DFlashModel:
    """The draft in ``file`` on ``device``, with float32 weights or packed ones (native kernels).

    ``kernels``: see `specdec.models.load_target`; trainable weights are torch's.

    Raises `UnsupportedError` for a head or backbone that is not there, `ModelFileError` for a
    missing, left-over or misshapen tensor.
    """
    config = read_config(file, target.config.n_vocab)
    head_class, trunk_class = HEADS.load(head_of(file)), BACKBONES.load(backbone_of(file))
    with torch.device("meta"):
        trunk = trunk_class(file, config)
        vocabulary = DraftVocabulary(file, config.n_embd, target, config.logit_softcap)
        head = head_class(file, config, vocabulary)
    modules: list[nn.Module] = [trunk, vocabulary, head]
    scales = _scales(file)
    ignored = (*IGNORED, *scales)
    check_names(modules, file, ignored=ignored)
    if not trainable and not scales:
        packed = pack_draft(trunk, vocabulary, head, file, kernels, activations, device)
        if packed is not None:
            trunk, modules = packed, [packed, vocabulary, head]
            ignored = (*ignored, *file.tensors)
    load_modules(modules, file, ignored=ignored, transform=_Rescale(file, scales))
    for module in modules:
        module.to(device).requires_grad_(trainable).train(trainable)
    return DFlashModel(config, trunk, head, vocabulary, torch.device(device))


def _scales(file: GGUFFile) -> list[str]:
    """Names of the factors {1} that accompany matrices (``fc.scale`` belongs to ``fc.weight``)."""
    return [
        name
        for name, info in file.tensors.items()
        if name.endswith(".scale")
        and tuple(info.shape) == (1,)
        and name.removesuffix("scale") + "weight" in file.tensors
    ]


class _Rescale:
    """Multiplies matrices by their factors, once, at load."""

    def __init__(self, file: GGUFFile, scales: list[str]) -> None:
        self._file = file
        self._scales = frozenset(scales)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        scale = name.removesuffix("weight") + "scale"
        return tensor * self._file.load(scale) if scale in self._scales else tensor

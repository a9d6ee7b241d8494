"""The DFlash family: a small transformer that reads the target's hidden states and drafts a block.

One trunk turns a block of mask tokens into hidden states, one of several heads turns those into
tokens. A file does not name its head or its backbone; both follow from tensors and keys, tested in
the order of the tables here. References: DFlash (arXiv 2602.06036), llama.cpp's
`src/models/dflash.cpp`. Imports no torch, so that files can be recognised cheaply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.drafters.dflash.names import is_single_pass
from specdec.registry import Registry

if TYPE_CHECKING:
    from specdec.drafters.dflash.drafter import DFlashDrafter
    from specdec.drafters.selection import DraftContext
    from specdec.gguf_file import GGUFFile

HEADS = Registry(
    "DFlash head",
    {
        "draft-dspark": "specdec.drafters.dflash.dspark:DSparkHead",
        "draft-dflash2": "specdec.drafters.dflash.dflash2:DFlash2Head",
        "draft-lilicorr": "specdec.drafters.dflash.lilicorr:LiliCorrHead",
        "draft-dflash": "specdec.drafters.dflash.dflash:DFlashHead",
    },
)
"""Spec type -> a `DraftHead`, in the order in which files are tested."""

BACKBONES = Registry(
    "DFlash backbone",
    {
        "deepseek4.1": "specdec.drafters.dflash.dsv41:DSV41Trunk",
        "deepseek4": "specdec.drafters.dflash.dsv4:DSV4Trunk",
        "mistral-large4": "specdec.drafters.dflash.mistral_large4:MistralLarge4Trunk",
        "base": "specdec.drafters.dflash.trunk:Trunk",
    },
)
"""Name -> a `Backbone`."""


def head_of(file: GGUFFile) -> str:
    """The spec type of the head in a file of architecture ``dflash``."""
    if "markov_w1.weight" in file.tensors:
        return "draft-dspark"
    if "selector_hidden.weight" in file.tensors:
        return "draft-dflash2"
    return "draft-lilicorr" if "lilicorr.hidden_size" in file.metadata else "draft-dflash"


def backbone_of(file: GGUFFile) -> str:
    """The name of the transformer in a file of architecture ``dflash``."""
    if file.get_int(file.key("hyper_connection.count"), default=0) > 0:
        return "deepseek4.1" if is_single_pass(file) else "deepseek4"
    has_latent = file.key("attention.kv_lora_rank") in file.metadata
    return "mistral-large4" if has_latent else "base"


def build(context: DraftContext) -> DFlashDrafter:
    """The drafter for the draft file of ``context``, whichever head it has."""
    from specdec.drafters.dflash.drafter import DFlashDrafter
    from specdec.drafters.dflash.model import load

    assert context.draft_file is not None
    model = load(
        context.draft_file,
        context.target,
        context.device,
        kernels=context.kernels,
        activations=context.activations,
    )
    return DFlashDrafter(
        model,
        context.draft_options(model.head.n_max),
        context.n_ctx,
        dtype_k=context.dtype_k,
        dtype_v=context.dtype_v,
    )

"""Whether an EAGLE-3 draft is sound and fits its target, before any weights are read.

Reads metadata, tensor names and shapes, and the table `d2t`. Where llama.cpp has a text for a
fault, the message has its words. Imports no torch.
"""

from __future__ import annotations

from specdec.drafters.compatibility import (
    check_ends,
    check_shape,
    check_token_list,
    target_depth,
    target_vocabulary,
)
from specdec.errors import MismatchError, ModelFileError
from specdec.gguf_file import GGUFFile

N_TAPS = 3
"""Hidden states of the target that the encoder reads."""


def check_eagle3(target: GGUFFile, draft: GGUFFile) -> None:
    """Raises unless ``draft`` is a sound EAGLE-3 draft for ``target``.

    `MismatchError` where the two disagree, `ModelFileError` where the draft contradicts itself.
    """
    _check_target_layers(target, draft)
    _check_decoder(draft)
    _check_encoder(target, draft)
    check_token_list(target, draft)
    check_ends(draft, target_vocabulary(target))
    _check_borrowed(target, draft)


def _check_target_layers(target: GGUFFile, draft: GGUFFile) -> None:
    """Three layer inputs, 0 to the number of layers (after the last one), in any order."""
    key = draft.key("target_layers")
    if key not in draft.metadata:
        raise ModelFileError(
            f"{draft.path}: EAGLE3 model requires 'extract_layers' in GGUF metadata ({key})"
        )
    layers = draft.get_ints(key)
    if len(layers) != N_TAPS:
        raise ModelFileError(
            f"{draft.path}: draft model is not eagle3 (expected {N_TAPS} extract layers, got "
            f"{len(layers)})"
        )
    depth = target_depth(target)
    if not all(0 <= layer <= depth for layer in layers):
        raise MismatchError(
            f"{draft.path}: {key} is {layers}, expected layers from 0 to {depth}, as the target "
            f"has {depth} layers; use a draft made for this target"
        )


def _check_decoder(draft: GGUFFile) -> None:
    n_layer = draft.get_int(draft.key("block_count"))
    if n_layer != 1:
        raise ModelFileError(
            f"{draft.path}: {draft.key('block_count')} is {n_layer}, expected 1: an EAGLE-3 draft "
            "has one decoder layer"
        )


def _check_encoder(target: GGUFFile, draft: GGUFFile) -> None:
    """The taps are as wide as the target, and the norm before `fc` is there if and only if used."""
    width = draft.get_int(draft.key("target_hidden_size"))
    expected = target.get_int(target.key("embedding_length"))
    if width != expected:
        raise MismatchError(
            f"{draft.path}: {draft.key('target_hidden_size')} is {width}, but the target's hidden "
            f"states are {expected} wide; use a draft made for this target"
        )
    n_embd, n_features = draft.get_int(draft.key("embedding_length")), N_TAPS * width
    check_shape(draft, "fc.weight", (n_embd, n_features), f"{N_TAPS} layers of width {width}")
    key, norm = draft.key("norm_before_fc"), "enc.output_norm.weight"
    if draft.get_bool(key, default=False):
        check_shape(draft, norm, (n_features,), f"{N_TAPS} layers of width {width}")
    elif norm in draft.tensors:
        raise ModelFileError(
            f"{draft.path}: tensor {norm} is there, but {key} is not set; convert the draft again"
        )


def _check_borrowed(target: GGUFFile, draft: GGUFFile) -> None:
    """What the draft takes from the target has the target's width."""
    width = draft.get_int(draft.key("embedding_length"))
    expected = target.get_int(target.key("embedding_length"))
    for name in ("token_embd.weight", "output.weight"):
        if name not in draft.tensors and width != expected:
            raise MismatchError(
                f"{draft.path}: hidden width {width} ({draft.key('embedding_length')}) does not "
                f"match the target's {expected}, whose {name} it needs; use a draft made for this "
                "target"
            )

"""Whether MTP layers are sound and fit their target, before any weights are read.

Where llama.cpp has a text for a fault, the message has its words. Imports no torch.
"""

from __future__ import annotations

from specdec.drafters.compatibility import check_token_list, target_depth, target_vocabulary
from specdec.errors import MismatchError, ModelFileError, UnsupportedError, unknown_name
from specdec.gguf_file import GGUFFile
from specdec.models import MTP_ARCHITECTURES

ASSISTANT_TARGETS = {"gemma4-assistant": "gemma4"}
"""Architecture of a head without keys and values -> that of its target."""
CHAINED = ("hy_v3", "mimo2")
"""Architectures that may have several heads."""


def check_mtp(target: GGUFFile, draft: GGUFFile | None) -> None:
    """Raises unless the MTP layers in ``draft``, or in ``target`` without one, fit ``target``.

    `MismatchError` where the two disagree, `ModelFileError` where a file contradicts itself,
    `UnsupportedError` for an architecture whose MTP layers cannot be run.
    """
    if draft is not None and draft.architecture in ASSISTANT_TARGETS:
        _check_assistant(target, draft)
    else:
        _check_heads(draft or target)
    if draft is not None:
        _check_pair(target, draft)


def _check_heads(file: GGUFFile) -> None:
    """The layers are there, of a known architecture, and as many as it may have."""
    name = file.architecture
    if name not in MTP_ARCHITECTURES:
        message = unknown_name("architecture with MTP layers", name, MTP_ARCHITECTURES)
        raise UnsupportedError(f"{file.path}: {message}")
    n_heads = file.get_int(file.key("nextn_predict_layers"), default=0)
    if n_heads < 1:
        raise ModelFileError(
            f"{file.path}: {file.key('nextn_predict_layers')} is {n_heads}, expected the number of "
            "MTP layers; convert the model again"
        )
    if n_heads > 1 and name not in CHAINED:
        raise UnsupportedError(
            f"{file.path}: {name.upper()} MTP currently only supports a single MTP block, found "
            f"{n_heads} ({file.key('nextn_predict_layers')})"
        )
    end = file.get_int(file.key("block_count"))
    for block in range(max(end - n_heads, 0), end):
        tensor = f"blk.{block}.nextn.eh_proj.weight"
        if tensor not in file.tensors:
            raise ModelFileError(
                f"{file.path}: MTP block missing nextn.eh_proj (tensor {tensor}); "
                "the file is incomplete"
            )


def _check_pair(target: GGUFFile, draft: GGUFFile) -> None:
    """A separate file has the target's architecture, hidden width and vocabulary."""
    expected = ASSISTANT_TARGETS.get(draft.architecture, draft.architecture)
    if target.architecture != expected:
        raise MismatchError(
            f"{draft.path}: holds MTP layers for {expected}, but the target is a "
            f"{target.architecture} model; use a draft made for this target"
        )
    is_assistant = draft.architecture in ASSISTANT_TARGETS
    key = draft.key("embedding_length_out" if is_assistant else "embedding_length")
    width = draft.get_int(key)
    n_embd = target.get_int(target.key("embedding_length"))
    if width != n_embd:
        raise MismatchError(
            f"{draft.path}: hidden width {width} ({key}) does not match the target's {n_embd}; "
            "use a draft made for this target"
        )
    ours, theirs = target_vocabulary(target), target_vocabulary(draft)
    if ours != theirs:
        raise MismatchError(
            f"{draft.path}: tensor token_embd.weight: {theirs} tokens, the target has {ours}; "
            "use a draft made for this target"
        )
    if not is_assistant and target_depth(draft) != target_depth(target):
        raise MismatchError(
            f"{draft.path}: holds MTP layers for a model of {target_depth(draft)} layers "
            f"({draft.key('block_count')} less {draft.key('nextn_predict_layers')}), the target "
            f"has {target_depth(target)}; use a draft made for this target"
        )
    check_token_list(target, draft)


def _check_assistant(target: GGUFFile, draft: GGUFFile) -> None:
    """All of its layers are one model run, so there are as many heads as blocks."""
    n_layer = draft.get_int(draft.key("block_count"))
    n_heads = draft.get_int(draft.key("nextn_predict_layers"), default=n_layer)
    if n_heads != n_layer or n_layer < 1:
        raise ModelFileError(
            f"{draft.path}: {draft.key('nextn_predict_layers')} is {n_heads}, expected "
            f"{n_layer} as {draft.key('block_count')}; convert the draft again"
        )
    if n_layer > len(draft.tensors):
        raise ModelFileError(
            f"{draft.path}: {draft.key('block_count')} is {n_layer}, but the file has "
            f"{len(draft.tensors)} tensors"
        )
    if target_depth(target) < 2:
        raise MismatchError(f"{draft.path}: reads two layers of the target, which has fewer")

"""Whether a draft of the DFlash family is sound and fits its target, before any weights are read.

Reads metadata, tensor names and shapes, and the table `d2t`. Where llama.cpp has a text for a
fault, the message has its words. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec.drafters.compatibility import (
    check_ends,
    check_shape,
    check_token_list,
    target_depth,
    target_vocabulary,
)
from specdec.drafters.dflash import backbone_of, head_of
from specdec.drafters.dflash.config import read_block_size, read_mask_token
from specdec.drafters.dflash.dsv4_config import check_dsv4
from specdec.drafters.dflash.lilicorr_config import lilicorr_shapes, read_lilicorr_sizes
from specdec.drafters.dflash.mistral_large4_config import check_mistral_large4
from specdec.drafters.dflash.names import joint_projection
from specdec.errors import MismatchError, ModelFileError, UnsupportedError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.options import DraftOptions


def check_draft(target: GGUFFile, draft: GGUFFile, options: DraftOptions) -> None:
    """Raises unless ``draft`` is a sound draft for ``target``.

    `MismatchError` where the two disagree, `ModelFileError` where the draft contradicts itself,
    `UnsupportedError` for parts that are not there, `UsageError` for options that this draft cannot
    obey.
    """
    _check_pairing(draft)
    _check_width(target, draft)
    _check_target_layers(target, draft)
    n_vocab = target_vocabulary(target)
    read_block_size(draft)
    read_mask_token(draft, n_vocab)
    check_token_list(target, draft)
    check_ends(draft, n_vocab)
    _BACKBONE_CHECKS[backbone_of(draft)](draft)
    _HEAD_CHECKS[head_of(draft)](draft, n_vocab)
    if head_of(draft) == "draft-dspark":
        _check_confidence(draft, options)


def _check_pairing(draft: GGUFFile) -> None:
    """The newest backbones are built without what the lattices of other heads need."""
    head, backbone = head_of(draft), backbone_of(draft)
    is_newest = backbone in ("deepseek4.1", "mistral-large4")
    if is_newest and head not in ("draft-dspark", "draft-dflash"):
        raise UnsupportedError(
            f"{draft.path}: a {head} head on the {backbone} backbone, expected draft-dspark or "
            "draft-dflash; use another draft"
        )


def _check_width(target: GGUFFile, draft: GGUFFile) -> None:
    width = draft.get_int(draft.key("embedding_length"))
    expected = target.get_int(target.key("embedding_length"))
    if width != expected:
        raise MismatchError(
            f"{draft.path}: hidden width {width} ({draft.key('embedding_length')}) does not match "
            f"the target's {expected}; use a draft made for this target"
        )


def _check_target_layers(target: GGUFFile, draft: GGUFFile) -> None:
    """Ids are layer inputs, 0 to the number of layers (after the last one), each once."""
    key = draft.key("target_layers")
    if key not in draft.metadata:
        raise ModelFileError(
            f"{draft.path}: DFlash model requires 'target_layers' in GGUF metadata ({key})"
        )
    depth = target_depth(target)
    value = draft.metadata[key]
    layers = value.tolist() if isinstance(value, np.ndarray) else value
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if (
        not is_list
        or not layers
        or not all(0 <= layer <= depth for layer in layers)
        or len(set(layers)) < len(layers)
    ):
        raise MismatchError(
            f"{draft.path}: {key} is {layers}, expected a list of different layers from 0 to "
            f"{depth}, as the target has {depth} layers; use a draft made for this target"
        )
    n_embd = draft.get_int(draft.key("embedding_length"))
    check_shape(draft, "fc.weight", (n_embd, len(layers) * n_embd), f"{key} = {layers}")


def _check_dflash2(draft: GGUFFile, n_vocab: int) -> None:
    sizes = [
        draft.get_int(draft.key(name), default=0)
        for name in (
            "selector_rank",
            "selector_top_k",
            "block_size",
            "conv_kernel_size",
            "conv_group_size",
        )
    ]
    n_embd = draft.get_int(draft.key("embedding_length"))
    rank, n_candidates, _, _, group_size = sizes
    if min(sizes) <= 0:
        raise ModelFileError(
            f"{draft.path}: DFlash2 model is missing conv/selector metadata: selector_rank, "
            "selector_top_k, block_size, conv_kernel_size, conv_group_size are "
            f"{', '.join(map(str, sizes))}; expected all above 0"
        )
    if n_embd % group_size:
        raise ModelFileError(
            f"{draft.path}: DFlash hidden size must be divisible by conv_group_size; found "
            f"{n_embd} and {draft.key('conv_group_size')} = {group_size}"
        )
    if n_candidates * (n_candidates + 1) > n_embd or n_candidates > _n_rows(draft, n_vocab):
        raise ModelFileError(
            f"{draft.path}: DFlash2 hidden size is too small for the selector lattice; found "
            f"{n_embd} and {draft.key('selector_top_k')} = {n_candidates}"
        )
    check_shape(draft, "selector_hidden.weight", (rank, n_embd), "selector_rank")
    for name in ("selector_predecessor.weight", "selector_successor.weight"):
        check_shape(draft, name, (n_vocab, rank), "selector_rank and the target's vocabulary")


def _check_dspark(draft: GGUFFile, n_vocab: int) -> None:
    _require_block_size(draft, "DSpark")
    shape = draft.info("markov_w1.weight").shape
    if len(shape) != 2 or shape[0] != n_vocab:
        raise MismatchError(
            f"{draft.path}: tensor markov_w1.weight: shape {list(shape)}, expected {n_vocab} rows "
            "for the target's vocabulary; use a draft made for this target"
        )
    rank, n_embd = shape[1], draft.get_int(draft.key("embedding_length"))
    if rank < 1:
        raise ModelFileError(
            f"{draft.path}: tensor markov_w1.weight: shape {list(shape)}, expected a rank of 1 or "
            "more; convert the draft again"
        )
    rows = (_n_rows(draft, n_vocab), rank)
    check_shape(draft, "markov_w2.weight", rows, "markov_w1.weight and the draft's vocabulary")
    if "conf_proj.weight" in draft.tensors:
        check_shape(draft, "conf_proj.weight", (1, n_embd + rank), "markov_w1.weight")
        if "conf_proj.bias" in draft.tensors:
            check_shape(draft, "conf_proj.bias", (1,), "conf_proj.weight")
    joint = joint_projection(draft)
    if joint:
        shape = (3 * rank, n_embd + 2 * rank)
        check_shape(draft, f"{joint}.weight", shape, "markov_w1.weight")
        check_shape(draft, f"{joint}.bias", shape[:1], f"{joint}.weight")


def _check_confidence(draft: GGUFFile, options: DraftOptions) -> None:
    says_so = draft.get_bool(draft.key("has_confidence_head"), default=True)
    if options.p_min > 0 and not (says_so and "conf_proj.weight" in draft.tensors):
        raise UsageError(
            "DSpark draft has no confidence head: please set --spec-draft-p-min 0 "
            f"(found {options.p_min:g} for {draft.path})"
        )


def _check_lilicorr(draft: GGUFFile, n_vocab: int) -> None:
    _require_block_size(draft, "LiliCorr")
    names = ("hidden_size", "num_heads", "candidate_topk", "num_layers")
    sizes = {name: draft.get_int(f"lilicorr.{name}") for name in names}
    n_candidates, n_embd = sizes["candidate_topk"], draft.get_int(draft.key("embedding_length"))
    if (
        min(sizes.values()) <= 0
        or sizes["hidden_size"] % sizes["num_heads"]
        or draft.get_int(draft.key("selector_top_k"), default=0) > 0
        or n_candidates * (n_candidates + 1) > n_embd
        or n_candidates > _n_rows(draft, n_vocab)
    ):
        raise ModelFileError(
            f"{draft.path}: invalid LiLiCorr DFlash metadata: {_listed(sizes)}; expected sizes "
            "above 0, hidden_size a multiple of num_heads, no selector_top_k, and candidate_topk * "
            f"(candidate_topk + 1) within the width {n_embd}"
        )
    inner = {name: draft.get_int(f"lilicorr.{name}") for name in ("factor_dim", "mlp_hidden_size")}
    n_layer = min(draft.get_int(draft.key("block_count")), len(draft.tensors))
    if min(inner.values()) <= 0 or sizes["num_layers"] > n_layer:
        raise ModelFileError(
            f"{draft.path}: invalid LiLiCorr head dimensions: {_listed(inner | sizes)}; expected "
            f"sizes above 0 and at most {n_layer} layers"
        )
    block_size, first = read_block_size(draft), draft.get_int(draft.key("block_count"))
    shapes = lilicorr_shapes(read_lilicorr_sizes(draft), n_embd, block_size, first)
    for name, shape in shapes.items():
        check_shape(draft, name, shape, "the lilicorr.* keys and dflash.block_size")


def _check_plain(draft: GGUFFile, n_vocab: int) -> None:
    """A plain head has no sizes of its own."""


_HEAD_CHECKS: dict[str, Callable[[GGUFFile, int], None]] = {
    "draft-dspark": _check_dspark,
    "draft-dflash2": _check_dflash2,
    "draft-lilicorr": _check_lilicorr,
    "draft-dflash": _check_plain,
}


def _check_base(draft: GGUFFile) -> None:
    """The base backbone is checked when its modules are made."""


_BACKBONE_CHECKS: dict[str, Callable[[GGUFFile], None]] = {
    "deepseek4.1": check_dsv4,
    "deepseek4": check_dsv4,
    "mistral-large4": check_mistral_large4,
    "base": _check_base,
}


def _require_block_size(draft: GGUFFile, head: str) -> None:
    if draft.key("block_size") not in draft.metadata:
        raise ModelFileError(
            f"{draft.path}: {head} model is missing {draft.key('block_size')}, expected the block "
            "size that it was trained with"
        )


def _n_rows(draft: GGUFFile, n_vocab: int) -> int:
    return draft.tensors["d2t"].shape[0] if "d2t" in draft.tensors else n_vocab


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())

"""What a draft file says about itself: head, backbone, block, taps, vocabulary.

Describes every kind of draft that llama.cpp knows, also those that have no drafter here yet.
Reads metadata, tensor names and shapes; whether a draft fits its target is `selection`'s business.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specdec.drafters import DRAFTERS
from specdec.drafters.dflash import BACKBONES, HEADS, backbone_of, head_of
from specdec.drafters.dflash.config import DEFAULT_BLOCK_SIZE, MASK_KEY
from specdec.drafters.selection import ASSISTANTS, draft_type, has_mtp_layers
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.models import MTP_ARCHITECTURES

Detail = int | float | str | bool | tuple[int, ...]

HEAD_NAMES: Mapping[str, str] = {
    "draft-dflash": "plain DFlash",
    "draft-dflash2": "DFlash2",
    "draft-dspark": "DSpark",
    "draft-lilicorr": "LiliCorr",
    "draft-eagle3": "EAGLE-3",
}
BACKBONE_NAMES: Mapping[str, str] = {
    "base": "base (Qwen3-like)",
    "deepseek4": "DeepSeek-V4",
    "deepseek4.1": "DeepSeek-V4.1",
    "mistral-large4": "Mistral Large 4",
}
UNVERIFIED_BACKBONES = ("deepseek4.1", "mistral-large4")
"""Backbones whose reference implementation has never been run against ours."""


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """A file that drafts, or the part of a target that does."""

    spec_type: str
    """The spec type that runs it."""
    head: str
    backbone: str
    is_supported: bool
    """Whether there is a drafter for its head and its backbone."""
    note: str | None = None
    """What a user should know before relying on it."""
    is_standalone: bool = True
    """Whether it is a file of its own, not layers of a target."""
    block_size: int | None = None
    """Slots of a block, the last token included; None for drafters without blocks."""
    target_layers: tuple[int, ...] | None = None
    """Inputs of target layers that it reads (taps), in the order of the file."""
    target_width: int | None = None
    """Hidden width of the target that it was made for."""
    mask_token: int | None = None
    mask_text: str | None = None
    n_draft_vocab: int | None = None
    """Rows of `d2t`, the tokens it can draft; None = the whole vocabulary."""
    has_own_embedding: bool = True
    has_own_output: bool = True
    details: Mapping[str, Detail] = field(default_factory=dict)
    """Facts of this head alone, by their name in the file."""


def describe_draft(file: GGUFFile) -> DraftDescription | None:
    """What ``file`` drafts with; None for an ordinary model and for a vocabulary.

    Raises `ModelFileError` for metadata of a wrong type.
    """
    if file.architecture == "dflash":
        return _describe_dflash(file)
    if file.architecture == "eagle3":
        return _describe_eagle3(file)
    return _describe_mtp(file) if has_mtp_layers(file) else None


def token_text(file: GGUFFile, token: int | None) -> str | None:
    """The text of a token as the file writes it; None if the file has no such token."""
    key = "tokenizer.ggml.tokens"
    if token is None or key not in file.metadata:
        return None
    texts = file.get_strs(key)
    return texts[token] if 0 <= token < len(texts) else None


def _describe_dflash(file: GGUFFile) -> DraftDescription:
    spec_type, backbone = head_of(file), backbone_of(file)
    layers = file.metadata.get(file.key("target_layers"))
    mask = file.get_int(MASK_KEY, default=None)
    default = None if spec_type in ("draft-dspark", "draft-lilicorr") else DEFAULT_BLOCK_SIZE
    return DraftDescription(
        spec_type=spec_type,
        head=HEAD_NAMES[spec_type],
        backbone=BACKBONE_NAMES[backbone],
        is_supported=spec_type in HEADS and backbone in BACKBONES and spec_type in DRAFTERS,
        note="not verified against upstream" if backbone in UNVERIFIED_BACKBONES else None,
        block_size=file.get_int(file.key("block_size"), default=default),
        target_layers=None if layers is None else tuple(file.get_ints(file.key("target_layers"))),
        target_width=file.get_int(file.key("embedding_length"), default=None),
        mask_token=mask,
        mask_text=token_text(file, mask),
        n_draft_vocab=_map_size(file),
        has_own_embedding="token_embd.weight" in file.tensors,
        has_own_output="output.weight" in file.tensors,
        details={**_trunk_details(file), **_HEAD_DETAILS[spec_type](file)},
    )


def _map_size(file: GGUFFile) -> int | None:
    return file.tensors["d2t"].n_elements if "d2t" in file.tensors else None


def _trunk_details(file: GGUFFile) -> dict[str, Detail]:
    details: dict[str, Detail] = {
        "attention.causal": file.get_bool(file.key("attention.causal"), default=False)
    }
    window = file.get_int(file.key("attention.sliding_window"), default=0)
    if window:
        key = file.key("attention.sliding_window_pattern")
        pattern = file.get_bools(key, default=None) if key in file.metadata else None
        n_layer = file.get_int(file.key("block_count"), default=0)
        details["sliding layers"] = n_layer if pattern is None else sum(pattern)
    return details | _present(file, ("conv_kernel_size", "conv_group_size"))


def _present(file: GGUFFile, names: tuple[str, ...]) -> dict[str, Detail]:
    """The integers that the file has among ``names``, without its architecture's prefix."""
    return {name: file.get_int(file.key(name)) for name in names if file.key(name) in file.metadata}


def _plain_details(file: GGUFFile) -> dict[str, Detail]:
    return {}


def _dflash2_details(file: GGUFFile) -> dict[str, Detail]:
    return _present(file, ("selector_rank", "selector_top_k"))


def _dspark_details(file: GGUFFile) -> dict[str, Detail]:
    says_so = file.get_bool(file.key("has_confidence_head"), default=True)
    shape = file.info("markov_w1.weight").shape
    return {
        "markov rank": shape[-1] if shape else 0,
        "confidence head": says_so and "conf_proj.weight" in file.tensors,
        "sample_from_anchor": file.get_bool(file.key("sample_from_anchor"), default=True),
    }


def _lilicorr_details(file: GGUFFile) -> dict[str, Detail]:
    names = ("hidden_size", "candidate_topk", "num_heads", "num_layers", "factor_dim")
    keys = {name: f"lilicorr.{name}" for name in names}
    return {key: file.get_int(key) for key in keys.values() if key in file.metadata}


_HEAD_DETAILS: Mapping[str, Callable[[GGUFFile], dict[str, Detail]]] = {
    "draft-dflash": _plain_details,
    "draft-dflash2": _dflash2_details,
    "draft-dspark": _dspark_details,
    "draft-lilicorr": _lilicorr_details,
}


def _describe_eagle3(file: GGUFFile) -> DraftDescription:
    key = file.key("target_layers")
    return DraftDescription(
        spec_type="draft-eagle3",
        head=HEAD_NAMES["draft-eagle3"],
        backbone="one decoder layer",
        is_supported="draft-eagle3" in DRAFTERS,
        target_layers=tuple(file.get_ints(key)) if key in file.metadata else None,
        target_width=file.get_int(file.key("target_hidden_size"), default=None),
        n_draft_vocab=_map_size(file),
        has_own_embedding="token_embd.weight" in file.tensors,
        has_own_output="output.weight" in file.tensors,
        details={
            name: file.get_bool(file.key(name), default=False)
            for name in ("norm_before_residual", "norm_before_fc")
        },
    )


def _describe_mtp(file: GGUFFile) -> DraftDescription:
    """Multi-token prediction: heads behind the layers of a target, or in a file of their own."""
    is_assistant = file.architecture in ASSISTANTS
    n_head = file.get_int(file.key("nextn_predict_layers"), default=1)
    n_layer = file.get_int(file.key("block_count"))
    if not 0 < n_head <= min(n_layer, len(file.tensors)):
        raise ModelFileError(
            f"{file.path}: {file.key('nextn_predict_layers')} is {n_head} of {n_layer} layers in "
            f"{len(file.tensors)} tensors; the file is damaged"
        )
    heads = [f"blk.{layer}.nextn" for layer in range(n_layer - n_head, n_layer)]
    width = "embedding_length_out" if is_assistant else "embedding_length"
    name = "MTP assistant that reads the target's cache" if is_assistant else _count_heads(n_head)
    is_standalone = is_assistant or "blk.0.attn_norm.weight" not in file.tensors
    return DraftDescription(
        spec_type=draft_type(file),
        head=name,
        backbone=f"{file.architecture}, {n_head} layer{'s' if n_head > 1 else ''}",
        is_supported=is_assistant or file.architecture in MTP_ARCHITECTURES,
        is_standalone=is_standalone,
        target_width=file.get_int(file.key(width), default=None),
        has_own_embedding=_has_own(file, heads, "embed_tokens", "token_embd", is_standalone)
        and not is_assistant,
        has_own_output=is_assistant
        or _has_own(file, heads, "shared_head_head", "output", is_standalone),
    )


def _has_own(file: GGUFFile, heads: list[str], name: str, shared: str, is_standalone: bool) -> bool:
    """Whether every head has tensor ``name``, or a file without a target the ``shared`` one."""
    if is_standalone and f"{shared}.weight" in file.tensors:
        return True
    return all(f"{head}.{name}.weight" in file.tensors for head in heads)


def _count_heads(n_head: int) -> str:
    return "MTP, one head" if n_head == 1 else f"MTP, {n_head} chained heads"

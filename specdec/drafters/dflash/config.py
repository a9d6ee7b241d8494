"""What a draft file of the DFlash family says about itself. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.drafters.dflash import backbone_of
from specdec.drafters.dflash.names import mask_table
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile

DEFAULT_BLOCK_SIZE = 16
"""llama.cpp's default for plain DFlash; the other heads need the key."""
MASK_KEY = "tokenizer.ggml.mask_token_id"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The facts that trunk, head and drafter share."""

    n_embd: int
    n_layer: int
    n_vocab: int
    """V, the target's vocabulary."""
    n_ctx_train: int
    rms_eps: float
    block_size: int
    """Longest block the draft was trained for."""
    mask_token: int
    target_layers: tuple[int, ...]
    """Taps of the target, in the order in which `fc` reads them."""
    is_causal: bool
    """Whether a slot of the block sees only the slots up to itself."""
    embedding_scale: float
    """Factor on the embeddings of the block."""
    logit_softcap: float
    """Bound of the logits before a head adds to them, 0 = none; only on Mistral Large 4."""


def read_config(file: GGUFFile, n_vocab: int) -> DraftConfig:
    """The configuration of a draft for a target with ``n_vocab`` tokens.

    Raises `ModelFileError` for missing keys and for values that fit no draft.
    """
    key = file.key
    n_layer = file.get_int(key("block_count"))
    if not 0 < n_layer <= len(file.tensors):
        raise ModelFileError(
            f"{file.path}: {key('block_count')} is {n_layer}, but the file has "
            f"{len(file.tensors)} tensors; it is incomplete"
        )
    return DraftConfig(
        n_embd=file.get_int(key("embedding_length")),
        n_layer=n_layer,
        n_vocab=n_vocab,
        n_ctx_train=file.get_int(key("context_length")),
        rms_eps=file.get_float(key("attention.layer_norm_rms_epsilon")),
        block_size=read_block_size(file),
        mask_token=read_mask_token(file, n_vocab),
        target_layers=tuple(file.get_ints(key("target_layers"))),
        is_causal=file.get_bool(key("attention.causal"), default=False),
        embedding_scale=file.get_float(key("embedding_scale"), default=1.0) or 1.0,
        logit_softcap=_read_softcap(file),
    )


def read_block_size(file: GGUFFile) -> int:
    """`dflash.block_size`, at least 2: the last token and one mask."""
    block_size = file.get_int(file.key("block_size"), default=DEFAULT_BLOCK_SIZE)
    if not 2 <= block_size <= 1024:
        raise ModelFileError(
            f"{file.path}: {file.key('block_size')} is {block_size}, expected 2 to 1024; "
            "the file is damaged"
        )
    return block_size


def read_mask_token(file: GGUFFile, n_vocab: int) -> int:
    """The token that fills the block; it must be in the vocabulary.

    A draft with a table of masks embeds no such token and may leave it out; then it is 0.
    """
    mask = file.get_int(MASK_KEY, default=0 if mask_table(file) else None)
    if mask is None or not 0 <= mask < n_vocab:
        found = "is missing" if mask is None else f"is {mask}"
        raise ModelFileError(
            f"{file.path}: {MASK_KEY} {found}, expected a token id from 0 to {n_vocab - 1}; "
            "give it with --override-kv or use another draft"
        )
    return mask


def _read_softcap(file: GGUFFile) -> float:
    """`dflash.final_logit_softcapping`, which llama.cpp's other backbones leave to the head."""
    if backbone_of(file) != "mistral-large4":
        return 0.0
    cap = file.get_float(file.key("final_logit_softcapping"), default=0.0)
    if not 0.0 <= cap < math.inf:
        raise ModelFileError(
            f"{file.path}: {file.key('final_logit_softcapping')} is {cap:g}, expected 0 or more"
        )
    return cap

"""Names in files that were never published, in one table.

llama.cpp's graphs for DeepSeek-V4.1, Mistral Large 4 and the gated Markov chain are public, but not
what their files call three things; no such file has been seen. The first spelling of each row is
what its neighbours suggest (`hyper_connection.count`, `conf_proj`), the others are near variants.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.gguf_file import GGUFFile

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    # key after `dflash.`, bool: DeepSeek-V4.1 (LLM_KV_HYPER_CONNECTION_SINGLE_PASS)
    "single pass": (
        "hyper_connection.single_pass",
        "hyper_connection.is_single_pass",
        "hyper_connection.use_single_pass",
        "hyper_connection.singlepass",
    ),
    # tensor before `.weight`: the masks of a Mistral Large 4 block (LLM_TENSOR_DSPARK_MASK_EMBD)
    "mask table": ("mask_embd", "mask_embeddings", "mask_embedding", "dspark_mask_embd"),
    # tensor before `.weight` and `.bias`: the gated chain (LLM_TENSOR_DSPARK_JOINT_PROJ)
    "joint projection": ("joint_proj", "markov_joint_proj", "dspark_joint_proj", "markov_joint"),
}
"""What a thing may be called, the likeliest name first."""


def is_single_pass(file: GGUFFile) -> bool:
    """Whether a draft with hyper-connections is a DeepSeek-V4.1 draft."""
    keys = (file.key(name) for name in SPELLINGS["single pass"])
    return any(file.get_bool(key, default=False) for key in keys)


def mask_table(file: GGUFFile) -> str:
    """The name of the tensor with a block's mask embeddings, without `.weight`; empty if none."""
    return _tensor(file, "mask table")


def joint_projection(file: GGUFFile) -> str:
    """The name of a DSpark file's joint projection; empty if its chain is not gated."""
    return _tensor(file, "joint projection")


def _tensor(file: GGUFFile, row: str) -> str:
    return next((name for name in SPELLINGS[row] if f"{name}.weight" in file.tensors), "")

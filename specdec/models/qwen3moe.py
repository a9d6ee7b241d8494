"""Qwen3 mixture of experts (`general.architecture` = qwen3moe): qwen3 with routed feed-forwards."""

from __future__ import annotations

from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.models import qwen3
from specdec.models.base import Target
from specdec.options import RopeOptions


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    n_expert = file.get_int(file.key("expert_count"))
    n_used = file.get_int(file.key("expert_used_count"))
    if not 0 < n_used <= n_expert:
        raise ModelFileError(
            f"{file.path}: {file.key('expert_used_count')} must be 1 to {n_expert}, got {n_used}"
        )
    return qwen3.load(file, rope)

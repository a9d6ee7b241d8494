"""Qwen3 mixture of experts (`general.architecture` = qwen3moe): qwen3 with routed feed-forwards."""

from __future__ import annotations

from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.models import qwen3
from specdec.models.base import Target, read_expert_counts
from specdec.options import RopeOptions


def load(file: GGUFFile, rope: RopeOptions) -> Target:
    """The target in ``file``."""
    n_expert, _ = read_expert_counts(file)
    if not n_expert:
        raise ModelFileError(f"{file.path}: {file.key('expert_count')} is 0, expected above 0")
    return qwen3.load(file, rope)

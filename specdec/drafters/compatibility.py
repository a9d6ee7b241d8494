"""Whether a draft file fits a target file, judged from metadata before any weights are read."""

from __future__ import annotations

from specdec.errors import MismatchError
from specdec.gguf_file import GGUFFile

MAX_SIZE_DIFFERENCE = 128
"""Vocabularies may differ in size by this many tokens (llama.cpp's constant)."""
FIRST_COMPARED = 5
"""Token texts are compared from this id on; the first ones are special and may differ."""


def check_vocabulary(target: GGUFFile, draft: GGUFFile) -> None:
    """Raises `MismatchError` unless both files have the same vocabulary, as llama.cpp defines it:
    type, BOS and EOS, size within 128, token texts from id 5 on.
    """
    for key in (
        "tokenizer.ggml.model",
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
    ):
        _check_equal(target, draft, key)
    for flag, key in (("add_bos_token", "bos_token_id"), ("add_eos_token", "eos_token_id")):
        if target.metadata.get(f"tokenizer.ggml.{flag}"):
            _check_equal(target, draft, f"tokenizer.ggml.{key}")
    ours = target.get_strs("tokenizer.ggml.tokens")
    theirs = draft.get_strs("tokenizer.ggml.tokens")
    if abs(len(ours) - len(theirs)) > MAX_SIZE_DIFFERENCE:
        raise _mismatch(draft, f"{len(theirs)} tokens, the target has {len(ours)}")
    check_tokens(draft, ours, theirs, FIRST_COMPARED)


def check_tokens(draft: GGUFFile, ours: list[str], theirs: list[str], first: int = 0) -> None:
    """Raises `MismatchError` that names the first differing id and both texts."""
    if ours[first:] == theirs[first:]:
        return
    for token_id in range(first, min(len(ours), len(theirs))):
        if ours[token_id] != theirs[token_id]:
            raise _mismatch(
                draft,
                f"token {token_id} is {theirs[token_id]!r}, in the target {ours[token_id]!r}",
            )


def _check_equal(target: GGUFFile, draft: GGUFFile, key: str) -> None:
    ours, theirs = target.metadata.get(key), draft.metadata.get(key)
    if ours != theirs:
        raise _mismatch(draft, f"{key} is {theirs!r}, in the target {ours!r}")


def _mismatch(draft: GGUFFile, fact: str) -> MismatchError:
    return MismatchError(
        f"{draft.path}: draft model vocab type must match target model to use speculation: {fact}; "
        "use a draft made for this target"
    )

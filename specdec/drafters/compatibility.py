"""Whether a draft file fits a target file, judged from metadata before any weights are read."""

from __future__ import annotations

import numpy as np

from specdec.errors import MismatchError, ModelFileError
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


def target_depth(target: GGUFFile) -> int:
    """The target's layers, those for multi-token prediction not counted."""
    n_layer = target.get_int(target.key("block_count"))
    return n_layer - target.get_int(target.key("nextn_predict_layers"), default=0)


def target_vocabulary(target: GGUFFile) -> int:
    """V, the height of the target's embedding table."""
    return target.info("token_embd.weight").shape[0]


def check_token_list(target: GGUFFile, draft: GGUFFile) -> None:
    """Raises `MismatchError` unless token texts agree; a draft without a list uses the target's."""
    key = "tokenizer.ggml.tokens"
    if key in draft.metadata and key in target.metadata:
        check_tokens(draft, target.get_strs(key), draft.get_strs(key))


def check_ends(draft: GGUFFile, n_vocab: int) -> None:
    """Raises unless embeddings, output matrix and the map of a reduced vocabulary fit ``n_vocab``.

    What the file lacks is the target's.
    """
    n_embd = draft.get_int(draft.key("embedding_length"))
    vocabulary = f"the target's vocabulary of {n_vocab}"
    if "token_embd.weight" in draft.tensors:
        check_shape(draft, "token_embd.weight", (n_vocab, n_embd), vocabulary)
    if "d2t" not in draft.tensors:
        if "output.weight" in draft.tensors:
            check_shape(draft, "output.weight", (n_vocab, n_embd), f"{vocabulary}, without d2t")
        return
    n_rows = _check_map(draft, n_vocab)
    check_shape(draft, "output.weight", (n_rows, n_embd), f"d2t with {n_rows} rows")


def check_shape(draft: GGUFFile, name: str, expected: tuple[int, ...], reason: str) -> None:
    """Raises `MismatchError` unless tensor ``name`` has the shape that ``reason`` demands."""
    found = tuple(draft.info(name).shape)
    if found != expected:
        raise MismatchError(
            f"{draft.path}: tensor {name}: shape {list(found)}, expected {list(expected)} from "
            f"{reason}; use a draft made for this target"
        )


def _check_map(draft: GGUFFile, n_vocab: int) -> int:
    """Checks `d2t`, target ids by row, and returns its length."""
    info = draft.info("d2t")
    if info.ggml_type != "I64" or len(info.shape) != 1:
        raise ModelFileError(
            f"{draft.path}: tensor d2t is {info.ggml_type} {list(info.shape)}, expected I64 with "
            "one target token id a row; convert the draft again"
        )
    ids = np.frombuffer(draft.raw("d2t"), "<i8")
    wrong = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(wrong):
        raise MismatchError(
            f"{draft.path}: tensor d2t: row {wrong[0]} is token {ids[wrong[0]]}, expected 0 to "
            f"{n_vocab - 1} in the target's vocabulary; use a draft made for this target"
        )
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        twice = values[counts > 1][0]
        raise ModelFileError(
            f"{draft.path}: tensor d2t: token {twice} is in several rows, expected each once; "
            "convert the draft again"
        )
    return len(ids)

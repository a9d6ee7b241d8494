"""What a draft looks like before it has weights: sizes, taps, block and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.drafters.dflash.lilicorr_config import LiliCorrSizes
from specdec.errors import UnsupportedError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.models.base import count_mtp_layers, read_per_layer

CONTROL = 3
"""`tokenizer.ggml.token_type` of control tokens."""
N_TAPS = 5
MARKOV_RANK = 64
SELECTOR_RANK = 32
LILICORR_WIDTH = 192
GROUP_SIZE = 16
"""Channels that share a kernel of the local convolution."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Everything about a draft but its weights."""

    head: str
    """Its spec type."""
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rms_eps: float
    freq_base: float
    n_ctx_train: int
    n_vocab: int
    """V, the target's vocabulary."""
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    """Taps as GGUF files count them: k is the input of layer k."""
    d2t: tuple[int, ...] = ()
    """Target tokens of the draft's vocabulary, ascending; () = all of them, the target's output."""
    markov_rank: int = MARKOV_RANK
    selector_rank: int = SELECTOR_RANK
    n_candidates: int = 0
    """Candidates a slot of the lattice heads, chosen to fit the width; 0 for the others."""
    kernel_size: int = 2
    group_size: int = GROUP_SIZE
    lilicorr: LiliCorrSizes | None = None

    @property
    def n_rows(self) -> int:
        """VD, rows of the draft's vocabulary."""
        return len(self.d2t) or self.n_vocab


def default_shape(
    file: GGUFFile,
    head: str,
    *,
    n_layer: int = 2,
    block_size: int = 8,
    n_taps: int = N_TAPS,
    mask_token: int | None = None,
    target_layers: tuple[int, ...] = (),
    d2t: tuple[int, ...] = (),
) -> DraftShape:
    """A draft for the target in ``file``, with the width and heads of the target's own layers.

    ``target_layers`` takes the place of ``n_taps`` evenly spread ones. Raises `UnsupportedError`
    for a target whose width the head cannot use, `UsageError` for a mask or layers that the target
    does not have.
    """
    n_embd = file.get_int(file.key("embedding_length"))
    n_head = read_per_layer(file, "attention.head_count", 0)
    n_target_layers = file.get_int(file.key("block_count")) - count_mtp_layers(file)
    n_vocab = file.tensors["token_embd.weight"].shape[0]
    if mask_token is None:
        mask_token = pick_mask_token(file)
    if not 0 <= mask_token < n_vocab:
        raise UsageError(f"--mask-token: expected 0 to {n_vocab - 1}, got {mask_token}")
    if not all(0 <= layer <= n_target_layers for layer in target_layers):
        raise UsageError(
            f"--target-layers: expected layers from 0 to {n_target_layers}, "
            f"got {list(target_layers)}"
        )
    return DraftShape(
        head=head,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=read_per_layer(file, "attention.head_count_kv", 0, default=n_head),
        head_dim=file.get_int(file.key("attention.key_length"), default=n_embd // n_head),
        n_ff=read_per_layer(file, "feed_forward_length", 0),
        rms_eps=file.get_float(file.key("attention.layer_norm_rms_epsilon")),
        freq_base=file.get_float(file.key("rope.freq_base"), default=10000.0),
        n_ctx_train=file.get_int(file.key("context_length")),
        n_vocab=n_vocab,
        block_size=block_size,
        mask_token=mask_token,
        target_layers=target_layers or pick_taps(n_target_layers, n_taps),
        d2t=d2t,
        n_candidates=_pick_candidates(file, head, n_embd),
        group_size=next(size for size in (GROUP_SIZE, 8, 4, 2, 1) if n_embd % size == 0),
        lilicorr=_lilicorr_sizes(n_embd, n_layer) if head == "draft-lilicorr" else None,
    )


def pick_taps(n_layer: int, n_taps: int) -> tuple[int, ...]:
    """Evenly spread layer inputs of a target with ``n_layer`` layers (DFlash's own rule).

    Output of layer ``round(1 + i (N - 4) / (n - 1))`` for tap i of n, which is the input of the
    next one; half way for a single tap; fewer taps if the target has not that many layers.
    """
    n_taps = max(1, min(n_taps, n_layer - 3))
    if n_taps == 1:
        return (n_layer // 2 + 1,)
    ids = (round(1 + i * (n_layer - 4) / (n_taps - 1)) for i in range(n_taps))
    return tuple(dict.fromkeys(layer + 1 for layer in ids))


def pick_mask_token(file: GGUFFile) -> int:
    """The last control token that has no other use in texts: it never stands in a reply.

    Raises `UnsupportedError` where the vocabulary has none.
    """
    used = {
        file.get_int(f"tokenizer.ggml.{name}_token_id", default=-1)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator")
    }
    own = file.get_int("tokenizer.ggml.mask_token_id", default=-1)
    if own >= 0:
        return own
    types = file.get_ints("tokenizer.ggml.token_type", default=[])
    template = file.get_str("tokenizer.chat_template", default="")
    tokens = file.get_strs("tokenizer.ggml.tokens", default=[])
    for token in range(len(types) - 1, -1, -1):
        if types[token] == CONTROL and token not in used and tokens[token] not in template:
            return token
    raise UnsupportedError(
        f"{file.path}: the vocabulary has no spare control token for the mask; "
        "choose a token that never occurs with --mask-token"
    )


def _pick_candidates(file: GGUFFile, head: str, n_embd: int) -> int:
    """The most candidates C <= 16 (LiliCorr: 8) with C (C + 1) <= width, as llama.cpp demands."""
    most = {"draft-dflash2": 16, "draft-lilicorr": 8}.get(head, 0)
    while most and most * (most + 1) > n_embd:
        most //= 2
    if not most and head in ("draft-dflash2", "draft-lilicorr"):
        raise UnsupportedError(f"{file.path}: width {n_embd} is too small for a {head} head")
    return most


def _lilicorr_sizes(n_embd: int, n_layer: int) -> LiliCorrSizes:
    width = min(LILICORR_WIDTH, n_embd // 4 * 4)
    n_candidates = 8
    while n_candidates * (n_candidates + 1) > n_embd:
        n_candidates //= 2
    return LiliCorrSizes(
        width=width,
        n_candidates=n_candidates,
        n_head=4,
        n_layer=min(2, n_layer),  # llama.cpp numbers these layers within the draft's
        n_ff=2 * width,
        n_factor=width,
        vector_eps=1e-4,
        logit_scale=8.0,
    )

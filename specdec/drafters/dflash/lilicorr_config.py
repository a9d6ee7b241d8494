"""What a LiliCorr file says about its scorer: sizes, and the tensors they ask for.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.gguf_file import GGUFFile

N_FEATURES = 5
"""Numbers that describe a candidate's probability and rank."""


@dataclass(frozen=True, slots=True)
class LiliCorrSizes:
    """Sizes and factors of a LiliCorr scorer."""

    width: int
    """D', the width of its states."""
    n_candidates: int
    """C, candidates per slot."""
    n_head: int
    n_layer: int
    n_ff: int
    n_factor: int
    """Width of the vectors whose products are scores."""
    vector_eps: float
    logit_scale: float


def read_lilicorr_sizes(file: GGUFFile) -> LiliCorrSizes:
    """The scorer's keys, which have no architecture prefix; all are needed."""
    return LiliCorrSizes(
        width=file.get_int("lilicorr.hidden_size"),
        n_candidates=file.get_int("lilicorr.candidate_topk"),
        n_head=file.get_int("lilicorr.num_heads"),
        n_layer=file.get_int("lilicorr.num_layers"),
        n_ff=file.get_int("lilicorr.mlp_hidden_size"),
        n_factor=file.get_int("lilicorr.factor_dim"),
        vector_eps=file.get_float("lilicorr.vector_eps"),
        logit_scale=file.get_float("lilicorr.logit_scale"),
    )


def lilicorr_shapes(
    sizes: LiliCorrSizes, n_embd: int, block_size: int, first: int
) -> dict[str, tuple[int, ...]]:
    """The scorer's tensors by name, rows first, for a draft of width ``n_embd``.

    Files number its blocks from ``first``, behind the trunk's, but for one tensor from 0.
    """
    inner, n_slots = sizes.width, block_size - 1
    n_nodes = n_slots * sizes.n_candidates
    last = f"blk.{first + sizes.n_layer}"
    shapes: dict[str, tuple[int, ...]] = {
        "lilicorr.slot_embedding.weight": (n_slots, inner),
        "lilicorr.rank_embedding.weight": (sizes.n_candidates, inner),
        "lilicorr.attention_bias.bias": (sizes.n_head, n_nodes, n_nodes),
        "lilicorr.output_norm.weight": (inner,),
        "lilicorr.anchor_norm.weight": (inner,),
        f"{last}.ffn_norm.weight": (N_FEATURES,),
        f"{last}.ffn_norm.bias": (N_FEATURES,),
    }
    linear = {
        "lilicorr.pass_hidden_proj": (inner, n_embd),
        "lilicorr.context_proj": (inner, n_embd),
        "lilicorr.factor_input_proj": (inner, 3 * inner),
        "lilicorr.out_head": (sizes.n_factor, inner),
        "lilicorr.in_head": (sizes.n_factor, inner),
        "lilicorr.anchor_out_head": (sizes.n_factor, inner),
        f"{last}.ffn_up": (inner, N_FEATURES),
        f"{last}.ffn_down": (inner, inner),
    }
    if inner != n_embd:
        linear["lilicorr.token_proj"] = (inner, n_embd)
    for layer in range(sizes.n_layer):
        block = f"blk.{first + layer}"
        shapes |= {f"{block}.attn_norm.weight": (inner,), f"{block}.ffn_norm.weight": (inner,)}
        linear |= {
            f"lilicorr.layers.{layer}.attn.in_proj": (3 * inner, inner),
            f"{block}.attn_output": (inner, inner),
            f"{block}.ffn_up": (sizes.n_ff, inner),
            f"{block}.ffn_down": (inner, sizes.n_ff),
        }
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes

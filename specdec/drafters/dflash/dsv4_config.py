"""What a draft on the DeepSeek-V4 or V4.1 backbone says about its blocks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.drafters.dflash.config import DraftConfig
from specdec.drafters.dflash.names import SPELLINGS, is_single_pass
from specdec.errors import ModelFileError, UnsupportedError
from specdec.gguf_file import MAX_SIZE, GGUFFile

N_STREAMS = 4
"""Residual streams; llama.cpp's graph is written for four."""
MAX_SINKHORN = 1000
"""Iterations that a row may take: with many more, a program would seem to hang."""
SQRT_SOFTPLUS = 4
"""`expert_gating_func` of DeepSeek-V4."""


@dataclass(frozen=True, slots=True)
class DSV4Spec:
    """Sizes and factors of the blocks; lists have one entry a layer."""

    n_embd: int
    n_head: int
    head_dim: int
    n_rot: int
    freq_base: float
    rms_eps: float
    window: int
    """Context keys visible to a query, itself included; in V4.1 one more than the file says."""
    q_rank: int
    n_groups: int
    """Groups of heads that are projected together."""
    output_rank: int
    n_streams: int
    n_sinkhorn: int
    hc_eps: float
    n_expert: int
    n_expert_used: int
    n_shared: int
    normalises_weights: bool
    weights_scale: float
    n_ff: list[int]
    """Width of an expert."""
    clamp: list[float]
    clamp_shared: list[float]
    output_a_shapes: list[tuple[int, ...]]
    """Files store the groups of `attn_output_a` stacked or as an axis of their own."""


def read_dsv4_spec(file: GGUFFile, config: DraftConfig) -> DSV4Spec:
    """The blocks of a draft; raises `ModelFileError` or `UnsupportedError`, see `check_dsv4`."""
    check_dsv4(file)
    key, n_layer = file.key, config.n_layer
    clamp = file.get_floats(key("swiglu_clamp_exp"), length=n_layer)
    n_ff = file.get_ints(key("expert_feed_forward_length"), length=n_layer)
    for width in n_ff:
        file.check_size(key("expert_feed_forward_length"), width)
    head_dim = file.get_int(key("attention.key_length"))
    return DSV4Spec(
        n_embd=config.n_embd,
        n_head=file.get_int(key("attention.head_count")),
        head_dim=head_dim,
        n_rot=file.get_int(key("rope.dimension_count"), default=head_dim),
        freq_base=file.get_float(key("rope.freq_base"), default=10000.0),
        rms_eps=config.rms_eps,
        window=file.get_int(key("attention.sliding_window")) + is_single_pass(file),
        q_rank=file.get_int(key("attention.q_lora_rank")),
        n_groups=file.get_int(key("attention.output_group_count")),
        output_rank=file.get_int(key("attention.output_lora_rank")),
        n_streams=file.get_int(key("hyper_connection.count")),
        n_sinkhorn=file.get_int(key("hyper_connection.sinkhorn_iterations")),
        hc_eps=file.get_float(key("hyper_connection.epsilon")),
        n_expert=file.get_int(key("expert_count")),
        n_expert_used=file.get_int(key("expert_used_count")),
        n_shared=file.get_int(key("expert_shared_count")),
        normalises_weights=file.get_bool(key("expert_weights_norm")),
        weights_scale=file.get_float(key("expert_weights_scale")) or 1.0,
        n_ff=n_ff,
        clamp=clamp,
        clamp_shared=file.get_floats(key("swiglu_clamp_shexp"), clamp, length=n_layer),
        output_a_shapes=[_output_a_shape(file, layer) for layer in range(n_layer)],
    )


def check_dsv4(file: GGUFFile) -> None:
    """Raises unless the sizes of a DeepSeek-V4 draft are possible.

    `UnsupportedError` for what llama.cpp refuses in such drafts, too.
    """
    key = file.key
    for name, wanted in (("hyper_connection.count", N_STREAMS), ("attention.head_count_kv", 1)):
        found = file.get_int(key(name))
        if found != wanted:
            raise UnsupportedError(f"{file.path}: {key(name)} is {found}, expected {wanted}")
    gating = file.get_int(key("expert_gating_func"))
    if gating != SQRT_SOFTPLUS:
        raise UnsupportedError(
            f"{file.path}: DSpark DSV4 draft expects sqrtsoftplus MoE scoring; found "
            f"{key('expert_gating_func')} = {gating}, expected {SQRT_SOFTPLUS}"
        )
    ratios = file.get_ints(key("attention.compress_ratios"), default=[])
    if any(ratios):
        raise UnsupportedError(
            f"{file.path}: DSpark DSV4 draft expects uncompressed attention on all stages; found "
            f"{key('attention.compress_ratios')} = {ratios}, expected zeros"
        )
    if "output_hc_fn.weight" not in file.tensors and not is_single_pass(file):
        known = ", ".join(key(name) for name in SPELLINGS["single pass"])
        raise ModelFileError(
            f"{file.path}: tensor output_hc_fn.weight is missing, which only DeepSeek-V4.1 drafts "
            f"lack; those say so with one of the keys {known} = true"
        )
    _check_sizes(file)


def _check_sizes(file: GGUFFile) -> None:
    key = file.key
    names = (
        "attention.head_count",
        "attention.key_length",
        "attention.sliding_window",
        "attention.q_lora_rank",
        "attention.output_group_count",
        "attention.output_lora_rank",
        "hyper_connection.sinkhorn_iterations",
        "expert_count",
        "expert_used_count",
        "expert_shared_count",
    )
    sizes = {name: file.get_int(key(name)) for name in names}
    for name, size in sizes.items():
        if size < 1:
            raise ModelFileError(f"{file.path}: {key(name)} is {size}, expected 1 or more")
    base = file.get_float(key("rope.freq_base"), default=10000.0)
    if base <= 0:
        raise ModelFileError(f"{file.path}: {key('rope.freq_base')} is {base:g}, expected above 0")
    head_dim = sizes["attention.key_length"]
    bounds = {name: (size, MAX_SIZE) for name, size in sizes.items()} | {
        "rope.dimension_count": (file.get_int(key("rope.dimension_count"), default=0), head_dim),
        "attention.value_length": (
            file.get_int(key("attention.value_length"), default=head_dim),
            head_dim,
        ),
        "expert_used_count": (sizes["expert_used_count"], sizes["expert_count"]),
        "hyper_connection.sinkhorn_iterations": (
            sizes["hyper_connection.sinkhorn_iterations"],
            MAX_SINKHORN,
        ),
        "attention.output_group_count": (
            sizes["attention.output_group_count"],
            sizes["attention.head_count"],
        ),
    }
    for name, (found, most) in bounds.items():
        if not 0 <= found <= most:
            raise ModelFileError(f"{file.path}: {key(name)} is {found}, expected at most {most}")
    n_head, n_groups = sizes["attention.head_count"], sizes["attention.output_group_count"]
    n_rot = bounds["rope.dimension_count"][0]
    if n_head % n_groups or n_rot % 2 or bounds["attention.value_length"][0] != head_dim:
        raise ModelFileError(
            f"{file.path}: {n_head} heads in {n_groups} groups, {n_rot} rotary dimensions, key and "
            f"value widths {head_dim} and {bounds['attention.value_length'][0]}; expected groups "
            "of equal size, an even number of dimensions and equal widths"
        )


def _output_a_shape(file: GGUFFile, layer: int) -> tuple[int, ...]:
    """The stored shape of `attn_output_a`, [G * R, n] or [G, R, n]."""
    key = file.key
    n_groups = file.get_int(key("attention.output_group_count"))
    rank = file.get_int(key("attention.output_lora_rank"))
    n_head = file.get_int(key("attention.head_count"))
    width = n_head * file.get_int(key("attention.key_length")) // n_groups
    stored = file.info(f"blk.{layer}.attn_output_a.weight").shape
    return (n_groups, rank, width) if len(stored) == 3 else (n_groups * rank, width)

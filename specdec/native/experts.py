"""A routed feed-forward branch as the kernels read it."""

from __future__ import annotations

from specdec.models.experts import MIN_WEIGHT_SUM
from specdec.models.layers import LayerSpec
from specdec.native.library import Experts
from specdec.native.weights import LayerTensors

PARTS = ("gate", "up", "down")


def expert_struct(spec: LayerSpec, tensors: LayerTensors) -> Experts:
    """The experts of the layer that ``tensors`` belong to."""
    assert 0 < spec.n_expert_used <= spec.n_expert
    shared = {}
    if spec.n_ff_shared:
        shared = {f"shared_{part}": tensors.matrix(f"ffn_{part}_shexp") for part in PARTS}
    return Experts(
        n_expert=spec.n_expert,
        n_used=spec.n_expert_used,
        uses_sigmoid=spec.routing.gating == "sigmoid",
        is_normalised=spec.routing.is_normalised,
        weight_scale=spec.routing.scale,
        min_weight_sum=MIN_WEIGHT_SUM,
        # In eight bits a row might choose other experts.
        router=tensors.plain_matrix("ffn_gate_inp"),
        bias=tensors.pointer(spec.expert_bias) if spec.expert_bias else None,
        n_ff_shared=spec.n_ff_shared,
        **{part: tensors.experts(f"ffn_{part}_exps") for part in PARTS},
        **shared,
    )

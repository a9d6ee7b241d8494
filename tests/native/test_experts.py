"""Routed feed-forward branches: the choices of torch, and numbers of every row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_layers import (
    Run,
    assert_agrees,
    assert_chunks_leave_the_same,
    assert_rounding_is_small,
    assert_row_invariant,
    build,
    new_plain,
    random_rows,
    to_native,
)

from specdec.models.experts import Routing
from specdec.models.layers import LayerSpec, RopeSpec

PLAIN = LayerSpec(
    n_embd=48,
    n_head=2,
    n_head_kv=1,
    head_dim=16,
    head_dim_v=16,
    n_ff=40,
    rms_eps=1e-5,
    rope=RopeSpec(16, 10000.0),
    attention_scale=0.25,
    n_expert=6,
    n_expert_used=2,
)
SIGMOID = replace(PLAIN, routing=Routing("sigmoid", scale=2.5), n_ff_shared=24)
VARIANTS = {
    "softmax": PLAIN,
    "as they are": replace(PLAIN, routing=Routing(is_normalised=False, scale=0.5)),
    "sigmoid": SIGMOID,
    "bias": replace(SIGMOID, expert_bias="exp_probs_b"),
    "bias of its own": replace(SIGMOID, expert_bias="exp_probs_b.bias", activation="gelu_tanh"),
    "other name": replace(PLAIN, ffn_norm="post_attention_norm"),
    "all": replace(PLAIN, n_expert_used=6),
    "one": replace(PLAIN, n_expert=1, n_expert_used=1),
    "many": replace(PLAIN, n_expert=70, n_expert_used=9, n_ff=16),
    "odd": replace(SIGMOID, n_embd=37, n_ff=21, n_ff_shared=45, n_expert=17, n_expert_used=3),
    "tiny": replace(SIGMOID, n_embd=3, n_ff=1, n_ff_shared=1),
}
QUANTISED = replace(SIGMOID, n_embd=64, n_ff=96, n_ff_shared=32, expert_bias="exp_probs_b")
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16")


@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_the_torch_layer(name: str) -> None:
    assert_agrees(*build(VARIANTS[name]))


@pytest.mark.parametrize("ggml_type", ["Q4_1", "Q5_0", "Q8_0"])
def test_eight_bit_activations_stay_close(ggml_type: str) -> None:
    """With all experts in use: where some are chosen, rounding may change the choice."""
    assert_rounding_is_small(replace(QUANTISED, n_expert_used=6), ggml_type)


@pytest.mark.parametrize("name", [*VARIANTS, *TYPES])
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    _, native = build(VARIANTS[name]) if name in VARIANTS else build(QUANTISED, name, "int8")
    assert_row_invariant(native)


def test_prompt_chunks_leave_the_same_cache() -> None:
    assert_chunks_leave_the_same(build(QUANTISED, "Q4_1", "int8")[1])


def test_of_equal_scores_the_first_count() -> None:
    spec = replace(SIGMOID, n_expert=40, n_expert_used=5, expert_bias="exp_probs_b")
    plain = new_plain(spec)
    plain.ffn_gate_inp.weight.zero_()
    plain.exp_probs_b.zero_()
    native = to_native(plain)
    plain.exp_probs_b.copy_(torch.linspace(0.1, 0, 40))
    assert_agrees(plain, native)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_harm_no_other(gating: str, value: float) -> None:
    spec = replace(PLAIN, routing=Routing(gating))  # type: ignore[arg-type]
    _, native = build(spec)
    hidden = random_rows(spec, 3)
    expected = Run(native)(hidden[:2])
    hidden[2, 5] = value
    found = Run(native)(hidden)
    assert torch.equal(found[:2], expected)
    assert found[2].isnan().any()


def test_scores_that_are_not_finite_still_choose_experts() -> None:
    plain = new_plain(replace(PLAIN, n_expert=9, n_expert_used=4))
    for value in (float("nan"), float("inf"), -float("inf")):
        plain.ffn_gate_inp.weight.fill_(value)
        assert Run(to_native(plain))(random_rows(PLAIN, 3)).shape == (3, PLAIN.n_embd)

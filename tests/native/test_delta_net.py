"""Gated delta nets: torch's numbers, every row as if alone, and the states that are kept."""

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
    random_rows,
)

from specdec.models.delta_net import DeltaNetSpec
from specdec.models.layers import RopeSpec

PLAIN = DeltaNetSpec(
    n_embd=48,
    n_head=2,
    n_head_kv=1,
    head_dim=16,
    head_dim_v=16,
    n_ff=80,
    rms_eps=1e-5,
    rope=RopeSpec(16, 10000.0),
    attention_scale=0.25,
    ffn_norm="post_attention_norm",
    n_key_heads=2,
    n_value_heads=4,
    state_size=16,
    conv_kernel=4,
)
VARIANTS = {
    "plain": PLAIN,
    "whole pieces": replace(PLAIN, state_size=128, n_key_heads=1, n_value_heads=2),
    "a piece and a rest": replace(PLAIN, state_size=83, n_key_heads=1, n_value_heads=1),
    "odd": replace(PLAIN, n_embd=37, n_ff=51, state_size=7, n_value_heads=6),
    "tiny": replace(PLAIN, state_size=1, n_key_heads=1, n_value_heads=1),
    "no convolution": replace(PLAIN, conv_kernel=1),
    "wide convolution": replace(PLAIN, conv_kernel=9),
    "experts": replace(PLAIN, n_expert=5, n_expert_used=2, n_ff_shared=20),
}
QUANTISED = replace(PLAIN, n_embd=64, n_ff=96, state_size=32)
TYPES = ("Q4_1", "Q8_0", "F16")


@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_the_torch_layer(name: str) -> None:
    assert_agrees(*build(VARIANTS[name]))


@pytest.mark.parametrize("ggml_type", ["Q4_1", "Q8_0"])
def test_eight_bit_activations_stay_close(ggml_type: str) -> None:
    assert_rounding_is_small(QUANTISED, ggml_type)


@pytest.mark.parametrize("name", [*VARIANTS, *TYPES])
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    _, native = build(VARIANTS[name]) if name in VARIANTS else build(QUANTISED, name, "int8")
    assert_row_invariant(native)


@pytest.mark.parametrize("name", ["plain", "wide convolution"])
def test_prompt_chunks_leave_the_same_state(name: str) -> None:
    assert_chunks_leave_the_same(build(VARIANTS[name])[1])


@pytest.mark.parametrize("n", [1, 2, 3, 9])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_state_behind_every_row_is_kept(name: str, n: int) -> None:
    _, native = build(VARIANTS[name])
    hidden, together, alone = random_rows(native.spec, n + 5), Run(native), Run(native)
    for run in (together, alone):
        run(hidden[:5])
    together(hidden[5:], exact=True)
    expected = []
    for row in hidden[5:].split(1):
        alone(row)
        expected.append([part.clone() for part in alone.kept()])
    for length in range(5 + n, 5, -1):
        together.cache.truncate(length)
        for ours, theirs in zip(together.kept(), expected[length - 6], strict=True):
            assert torch.equal(ours, theirs), f"behind {length} rows"


def test_a_pass_over_a_prompt_keeps_its_last_state_alone() -> None:
    run = Run(build(PLAIN)[1])
    run(random_rows(PLAIN, 9))
    assert [run.cache.reachable(length) for length in (8, 9)] == [0, 9]
    assert not any(part.any() for part in run.cache._zeros[0])


def test_states_are_never_changed_later() -> None:
    """A state may be read again after a rejection, whatever passes have followed it."""
    run = Run(build(PLAIN)[1])
    hidden = random_rows(PLAIN, 6)
    run(hidden, exact=True)
    run.cache.truncate(3)
    before = [part.clone() for part in run.kept()]
    first = run(hidden[3:])
    run.cache.truncate(3)
    assert all(torch.equal(*pair) for pair in zip(run.kept(), before, strict=True))
    assert torch.equal(run(hidden[3:]), first)

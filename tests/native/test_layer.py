"""`NativeLayer` against `DecoderLayer` in every variant, and row by row to the last bit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

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

from specdec.errors import CacheError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models.layers import LayerSpec, RopeSpec
from specdec.models.mimo2 import FusedSpec
from specdec.models.qwen35 import GatedSpec
from specdec.native.calls import layer_calls
from specdec.native.layer import NativeEmbedding, NativeLinear, NativeRMSNorm
from specdec.native.library import load_library
from specdec.native.packing import pack

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
PLAIN = LayerSpec(
    n_embd=48,
    n_head=4,
    n_head_kv=2,
    head_dim=16,
    head_dim_v=16,
    n_ff=80,
    rms_eps=1e-5,
    rope=RopeSpec(16, 10000.0),
    attention_scale=0.25,
)
ODD = {"n_embd": 37, "n_ff": 51, "head_dim": 10, "head_dim_v": 10, "rope": RopeSpec(6, 1e4)}


def fields_of(spec: LayerSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}


VARIANTS = {
    "plain": PLAIN,
    "norms": replace(PLAIN, has_qk_norm=True, has_post_norms=True),
    "biases": replace(PLAIN, has_qkv_bias=True, has_output_bias=True),
    "gelu": replace(PLAIN, activation="gelu_tanh"),
    "window": replace(PLAIN, window=5),
    "sinks": replace(PLAIN, has_sinks=True, window=7),
    "scales": replace(PLAIN, value_scale=1.5, has_output_scale=True),
    "shared": replace(PLAIN, shares_kv=True, has_qk_norm=True),
    "value norm": replace(PLAIN, has_value_norm=True, head_dim_v=20),
    "one matrix": FusedSpec(**(fields_of(PLAIN) | {"has_sinks": True, "head_dim_v": 12})),
    "gates": GatedSpec(**(fields_of(PLAIN) | {"has_qk_norm": True})),
    "odd gates": GatedSpec(**(fields_of(PLAIN) | {"has_qk_norm": True} | ODD)),
    "partial": replace(PLAIN, rope=RopeSpec(6, 10000.0)),
    "wide": replace(PLAIN, head_dim=80, head_dim_v=144, rope=RopeSpec(80, 10000.0)),
    "odd": replace(
        PLAIN, n_embd=37, n_ff=51, head_dim=10, head_dim_v=7, rope=RopeSpec(10, 10000.0)
    ),
    "one head": replace(PLAIN, n_head=1, n_head_kv=1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_agrees_with_the_torch_layer(name: str) -> None:
    assert_agrees(*build(VARIANTS[name]))


QUANTISED = replace(PLAIN, n_embd=64, n_ff=96, head_dim=32, head_dim_v=32)
QUANTISED_VARIANTS = {
    "Q4_1": QUANTISED,
    "Q8_0": replace(QUANTISED, has_qk_norm=True, has_post_norms=True),
    "Q4_0": FusedSpec(**fields_of(QUANTISED)),
    "BF16": GatedSpec(**(fields_of(QUANTISED) | {"has_qk_norm": True})),
    "Q5_1": GatedSpec(**(fields_of(QUANTISED) | {"has_qk_norm": True})),
    "Q5_0": replace(QUANTISED, n_head=8, n_head_kv=4, head_dim=16, head_dim_v=16),
}


@pytest.mark.parametrize("ggml_type", sorted({*QUANTISED_VARIANTS} - {"BF16"}))
def test_eight_bit_activations_stay_close(ggml_type: str) -> None:
    assert_rounding_is_small(QUANTISED_VARIANTS[ggml_type], ggml_type)


@pytest.mark.parametrize("name", [*VARIANTS, *QUANTISED_VARIANTS])
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    spec = VARIANTS.get(name) or QUANTISED_VARIANTS[name]
    _, native = build(spec) if name in VARIANTS else build(spec, name, "int8")
    assert_row_invariant(native)


def test_prompt_chunks_leave_the_same_cache() -> None:
    spec = VARIANTS["norms"]
    _, native = build(spec)
    assert_chunks_leave_the_same(native)


def test_large_scores_do_not_overflow() -> None:
    plain, native = (Run(layer) for layer in build(replace(PLAIN, attention_scale=50.0)))
    hidden = random_rows(PLAIN, 9) * 30
    torch.testing.assert_close(native(hidden), plain(hidden), atol=1e-3, rtol=1e-4)


def test_heads_and_norms_take_what_torch_takes() -> None:
    weight = torch.randn(20, 12, generator=torch.Generator().manual_seed(3))
    packed = pack(weight.view(torch.uint8), "F32", 12)
    head, norm = (
        NativeLinear(load_library(), packed, "int8"),
        NativeRMSNorm(load_library(), weight[0], 1e-5),
    )
    for shape in ((12,), (1, 12), (0, 12), (2, 3, 12)):
        x = torch.ones(shape)
        assert head(x).shape == (*shape[:-1], 20)
        torch.testing.assert_close(head(x), torch.nn.functional.linear(x, weight))
        assert norm(x).shape == shape


@pytest.mark.parametrize("name", ["tgt_llama", "tgt_qwen2"])
def test_only_tokens_have_embeddings(name: str) -> None:
    with GGUFFile.open(VECTORS / f"{name}.gguf") as file:
        table, n_vocab = (
            NativeEmbedding(file, "token_embd.weight"),
            file.info("token_embd.weight").shape[0],
        )
    tokens = torch.tensor([n_vocab - 1, 0])
    assert torch.equal(table(tokens), table(tokens.flip(0)).flip(0))
    assert table(tokens[:0]).shape[0] == 0
    for wrong in (-1, -n_vocab, n_vocab, 2**31, -(2**63)):
        with pytest.raises(IndexError):
            table(torch.tensor([0, wrong]))


CACHE_TYPES = {
    "f16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16 and f32": (torch.float16, torch.float32),
    "f32 and bf16": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("types", CACHE_TYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_caches_of_other_types(name: str, types: str) -> None:
    """They keep what torch would keep, and a row still does not depend on the rows beside it."""
    spec = VARIANTS[name]
    plain, native = (Run(layer, *CACHE_TYPES[types]) for layer in build(spec))
    for n in (3, 1, 20, 1, 2):
        hidden = random_rows(spec, n)
        torch.testing.assert_close(native(hidden), plain(hidden), atol=2e-2, rtol=1e-2)
    for ours, theirs in zip(
        native.cache.committed(0, torch.float32),
        plain.cache.committed(0, torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    hidden, depth = random_rows(spec, 11), native.cache.length
    alone = torch.cat([native(row) for row in hidden.split(1)])
    for n in range(2, 12):
        native.cache.truncate(depth)
        assert torch.equal(native(hidden[:n]), alone[:n])


def test_caches_round_as_torch_does() -> None:
    """Identity matrices bring chosen numbers into the cache, those that are hard to round too."""
    hard = [0.0, -0.0, 1e-8, -3e-8, 6.1e-5, 5.9e-5, 65504.0, 65519.0, 65520.0, -7e4, 3.4e38]
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    between = (halves[:-1].double() + halves[1:].double()).float() / 2
    numbers = torch.cat((torch.tensor(hard), halves, between, between * 1.00001))
    numbers = numbers[numbers.isfinite()]
    spec = replace(PLAIN, n_embd=16, n_head=1, n_head_kv=1, head_dim=16, head_dim_v=16)
    spec = replace(spec, rope=replace(spec.rope, n_rot=2))
    rows = numbers[: len(numbers) // 16 * 16].view(-1, 16)
    plain = new_plain(spec)
    for matrix in (plain.attn_k, plain.attn_v):
        matrix.weight.copy_(torch.eye(16))
    layer = to_native(plain)
    for dtype in (torch.float16, torch.bfloat16):
        cache = KVCache(
            [spec.cache_shape], len(rows), device=torch.device("cpu"), dtype_k=dtype, dtype_v=dtype
        )
        tables = torch.ones(len(rows), 1), torch.zeros(len(rows), 1)
        calls = layer_calls([layer], cache, 0, len(rows), [tables])
        load_library().write_keys_values(calls, rows, 0)
        cache.advance(len(rows))
        for kept in cache.committed(0, dtype):
            assert torch.equal(kept[0], rows.to(dtype))


def test_caches_of_integers_are_refused() -> None:
    _, native = build(PLAIN)
    run = Run(native)
    shapes = [PLAIN.cache_shape]
    run.cache = KVCache(shapes, 8, device=torch.device("cpu"), dtype_k=torch.int8)
    with pytest.raises(CacheError, match="must be f32"):
        run(random_rows(PLAIN, 1))


def test_the_context_is_the_limit() -> None:
    run = Run(build(PLAIN)[1])
    run.cache = KVCache([PLAIN.cache_shape], 8, device=torch.device("cpu"))
    with pytest.raises(CacheError, match="do not fit"):
        run(random_rows(PLAIN, 9))

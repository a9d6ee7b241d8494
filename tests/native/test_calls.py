"""What kernels are told is made once for a cache, and stays right while the cache changes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_layers import Run, build, random_rows

from specdec.errors import CacheError
from specdec.kv_cache import KVCache
from specdec.models.delta_net import DeltaNetSpec
from specdec.models.layers import LayerSpec, RopeSpec, RotaryEmbedding
from specdec.models.rows import Rows
from specdec.native.calls import layer_calls
from specdec.native.layer import LayerStack, PackedEmbedding
from specdec.native.library import KEPT_SCRATCH, load_library
from specdec.native.packing import pack
from specdec.sampling.head import Best

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "n_embd": 48,
    "n_head": 4,
    "n_head_kv": 2,
    "head_dim": 16,
    "head_dim_v": 16,
    "n_ff": 80,
    "rms_eps": 1e-5,
    "rope": RopeSpec(16, 10000.0),
    "attention_scale": 0.25,
}
PLAIN = LayerSpec(**SIZES)
GIVEN = torch.nn.Identity()
"""An embedding of what are hidden rows already."""
LAST_TWO: dict[str, Any] = {"n_logits": 2, "taps": ()}
RECURRENT = DeltaNetSpec(**SIZES, n_key_heads=2, n_value_heads=4, state_size=16, conv_kernel=4)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_stack_makes_logits_of_the_last_rows(softcap: float) -> None:
    """Three layers of two kinds of positions, one of them with states, over several passes."""
    n_vocab, n = 37, 5
    specs = (PLAIN, RECURRENT, replace(PLAIN, rope=RopeSpec(8, 500.0)))
    pairs = [build(spec) for spec in specs]
    weight, norm = random_rows(PLAIN, n_vocab), torch.rand(PLAIN.n_embd) + 0.5
    output = pack(weight.view(torch.uint8), "F32", PLAIN.n_embd)
    stack = LayerStack(load_library(), norm, PLAIN.rms_eps, output, "f32", softcap, GIVEN)
    cache = KVCache([spec.cache_shape for spec in specs], 2048, device=CPU)
    runs, layers = [Run(plain) for plain, _ in pairs], [native for _, native in pairs]
    for start in range(0, 3 * n, n):
        hidden = random_rows(PLAIN, n) + start
        expected = hidden
        for run in runs:
            expected = run(expected)
        tables = [RotaryEmbedding(spec.rope).tables(start + n, CPU) for spec in specs]
        rows = Rows(start, n, exact=True)
        out, _, found = stack(layers, hidden.clone(), cache, tables, rows, **LAST_TWO)
        assert found is not None
        logits, best = found
        cache.advance(n)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        raw = torch.nn.functional.rms_norm(expected[-2:], norm.shape, norm, PLAIN.rms_eps)
        wanted = raw @ weight.T
        wanted = softcap * torch.tanh(wanted / softcap) if softcap else wanted
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
        assert_ranked(best, logits)


def assert_ranked(best: Best, logits: torch.Tensor) -> None:
    n = min(load_library().n_best, logits.shape[1])
    order = logits.sort(descending=True, stable=True)
    assert best.n == n
    assert list(best.ids) == order.indices[:, :n].flatten().tolist()
    assert list(best.logits) == order.values[:, :n].flatten().tolist()
    assert best.tokens() == logits.argmax(-1).tolist()


def head_of(output: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, Best]:
    """Logits of rows that a layer has not changed."""
    packed = pack(output.view(torch.uint8), "F32", PLAIN.n_embd)
    norm = torch.ones(PLAIN.n_embd)
    stack = LayerStack(load_library(), norm, PLAIN.rms_eps, packed, "f32", 0.0, GIVEN)
    cache, tables = KVCache([PLAIN.cache_shape], 99, device=CPU), RotaryEmbedding(PLAIN.rope)
    n = len(hidden)
    rotary, rows = [tables.tables(n, CPU)], Rows(0, n, exact=True)
    _, _, found = stack([build(PLAIN)[1]], hidden, cache, rotary, rows, n_logits=n, taps=())
    assert found is not None
    return found


@pytest.mark.parametrize("n_vocab", [1, 15, 63, 64, 65, 1000, 4097, 9000])
@pytest.mark.parametrize("n_different", [1, 3, 100, 9000])
def test_the_best_logits_are_given_in_order(n_vocab: int, n_different: int) -> None:
    """Equal ones, too: rows of the output matrix that repeat give equal logits."""
    generator = torch.Generator().manual_seed(n_vocab * n_different)
    kinds = torch.randint(n_different, (n_vocab,), generator=generator)
    output = torch.randn(n_different, PLAIN.n_embd, generator=generator)[kinds]
    logits, best = head_of(output, random_rows(PLAIN, 9))
    assert_ranked(best, logits)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 70, 199])
def test_logits_that_are_not_finite_have_no_order(value: float, place: int) -> None:
    output = random_rows(PLAIN, 200)
    output[place] = value
    logits, best = head_of(output, random_rows(PLAIN, 2))
    assert not logits[:, place].isfinite().any()
    assert best.head(0, 1) is best.head(1, 1) is None
    assert best.tokens() == [-1, -1]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_hidden_state_that_is_no_number_gives_no_logits(softcap: float) -> None:
    norm, output = torch.ones(PLAIN.n_embd), random_rows(PLAIN, 20)
    packed = pack(output.view(torch.uint8), "F32", PLAIN.n_embd)
    stack = LayerStack(load_library(), norm, PLAIN.rms_eps, packed, "f32", softcap, GIVEN)
    hidden = random_rows(PLAIN, 2)
    hidden[1, 3] = torch.nan
    cache, tables = KVCache([PLAIN.cache_shape], 8, device=CPU), RotaryEmbedding(PLAIN.rope)
    rows = Rows(0, 2, exact=True)
    layers = [build(PLAIN)[1]]
    _, _, found = stack(layers, hidden, cache, [tables.tables(2, CPU)], rows, **LAST_TWO)
    assert found is not None
    logits, best = found
    assert best.tokens() == [logits[0].argmax(), -1]
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def test_threads_run_side_by_side() -> None:
    """None of them computes in the memory of another, however large theirs gets."""
    specs = [replace(PLAIN, n_ff=width) for width in (80, 160, 320, 640)]
    layers = [build(spec)[1] for spec in specs]
    rows = [random_rows(PLAIN, n) for n in (1, 300, 2, 40)]

    def passes(i: int) -> list[torch.Tensor]:
        return [Run(layers[i])(rows[(i + turn) % 4]) for turn in range(12)]

    alone = [passes(i) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for found, expected in zip(threads.map(passes, range(4)), alone, strict=True):
            assert all(map(torch.equal, found, expected))


def test_tables_live_as_long_as_what_points_to_them() -> None:
    """Another thread may make a module's tables longer while a pass reads the old ones."""
    rotary, layer = RotaryEmbedding(PLAIN.rope), build(PLAIN)[1]
    cache = KVCache([PLAIN.cache_shape], 8, device=CPU)
    cos = weakref.ref(rotary.tables(4, CPU)[0])
    layer_calls([layer], cache, 0, 4, [rotary.tables(4, CPU)])
    rotary.tables(5000, CPU)
    assert cos() is not None


def test_tables_that_change_their_device_do_not_grow() -> None:
    rotary = RotaryEmbedding(PLAIN.rope)
    for device in [CPU, torch.device("meta")] * 2:
        tables = rotary.tables(4, device)
        assert tables is rotary.tables(512, device)
        assert {(len(table), table.device) for table in tables} == {(512, device)}


def test_memory_of_a_long_pass_is_not_kept_for_short_ones() -> None:
    layers = [build(PLAIN)[1]]
    rotary, library = [RotaryEmbedding(PLAIN.rope).tables(5000, CPU)], load_library()
    cache = KVCache([PLAIN.cache_shape], 5000, device=CPU)
    kept = []
    for n in (1, 5000, 4000, 1, 2):
        library.run_layers(layer_calls(layers, cache, 0, n, rotary), random_rows(PLAIN, n), 0)
        kept.append(library._scratch.kept.numel())
    assert kept[1] == kept[2] > KEPT_SCRATCH > max(kept[3:])


def test_calls_follow_the_buffers() -> None:
    """Layers that share a cache grow it one after the other, in parts and as a whole."""
    layers = [build(PLAIN)[1] for _ in range(3)]
    rotary = [RotaryEmbedding(PLAIN.rope).tables(600, CPU)] * 3
    parts, whole = (KVCache([PLAIN.cache_shape] * 3, 600, device=CPU) for _ in range(2))
    library = load_library()
    for n in (255, 1, 1, 1, 300):
        x, y = random_rows(PLAIN, n), random_rows(PLAIN, n)
        start = parts.length
        for first, last in ((0, 1), (1, 3)):
            calls = layer_calls(layers[first:last], parts, first, n, rotary[first:last], start)
            library.run_layers(calls, x, start)
        library.run_layers(layer_calls(layers, whole, 0, n, rotary, start), y, start)
        assert torch.equal(x, y)
        for cache in (parts, whole):
            cache.advance(n)
    with pytest.raises(CacheError, match="do not fit"):
        layer_calls(layers, whole, 0, 100, rotary, 558)
    with pytest.raises(ValueError, match="rotary tables"):
        layer_calls(layers, whole, 0, 1, rotary, 600)


def without_order(cache: KVCache) -> None:
    cache.reserve(0, 1)
    cache._keys[0] = cache._keys[0].transpose(0, 1).contiguous().transpose(0, 1)


def with_large_states(cache: KVCache) -> None:
    cache._states[0][0] = tuple(part.double() for part in cache.state(0))


@pytest.mark.parametrize(
    ("spec", "shape", "change"),
    [
        (PLAIN, {"n_head_kv": 1}, None),
        (PLAIN, {"head_dim": 15}, None),
        (PLAIN, {"head_dim_v": 32}, None),
        (PLAIN, {"state": ((3, 128), (4, 16, 16))}, None),
        (PLAIN, {}, without_order),
        (RECURRENT, {"n_head_kv": 2}, None),
        (RECURRENT, {"state": ()}, None),
        (RECURRENT, {"state": ((3, 128), (4, 16, 15))}, None),
        (RECURRENT, {"state": ((2, 128), (4, 16, 16))}, None),
        (RECURRENT, {}, with_large_states),
    ],
)
def test_the_cache_of_another_layer_never_reaches_the_kernels(
    spec: LayerSpec, shape: dict[str, Any], change: Callable[[KVCache], None] | None
) -> None:
    layer, tables = build(spec)[1], RotaryEmbedding(spec.rope).tables(4, CPU)
    fits, other = (KVCache([replace(spec.cache_shape, **s)], 8, device=CPU) for s in ({}, shape))
    layer_calls([layer], fits, 0, 4, [tables])
    if change:
        change(other)
    with pytest.raises(ValueError, match=r"expected a (contiguous )?cache"):
        layer_calls([layer], other, 0, 4, [tables])


def test_tables_for_wider_heads_never_reach_the_kernels() -> None:
    """Neither with the first pass nor later, neither for all layers nor for one."""
    layers = [build(spec)[1] for spec in (PLAIN, RECURRENT, PLAIN)]
    cache = KVCache([layer.spec.cache_shape for layer in layers], 8, device=CPU)
    fits, wide = (RotaryEmbedding(RopeSpec(n, 1e4)).tables(4, CPU) for n in (16, 18))
    for tables in ([wide] * 3, [fits, fits, wide]):
        with pytest.raises(ValueError, match="turn 18 dimensions"):
            layer_calls(layers, cache, 0, 4, tables)
        layer_calls(layers, cache, 0, 4, [fits, wide, fits])  # the recurrent one turns nothing


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_packed_embedding_is_part_of_the_call(scale: float) -> None:
    weight, norm = random_rows(PLAIN, 40), torch.ones(PLAIN.n_embd)
    packed, library = pack(weight.view(torch.uint8), "F32", PLAIN.n_embd), load_library()
    embedding = PackedEmbedding(library, packed)
    tokens, layers = torch.tensor([39, 0, 7, 7]), [build(PLAIN)[1]]
    found = []
    for one, given in ((embedding, tokens), (GIVEN, embedding(tokens))):
        stack = LayerStack(library, norm, PLAIN.rms_eps, packed, "f32", 0.0, one, scale)
        cache, tables = KVCache([PLAIN.cache_shape], 9, device=CPU), RotaryEmbedding(PLAIN.rope)
        arguments = cache, [tables.tables(4, CPU)], Rows(0, 4, exact=True)
        out, tapped, _ = stack(layers, given, *arguments, n_logits=1, taps=(0, 1))
        assert tapped is not None
        assert torch.equal(tapped[:, 0], weight[tokens] * scale)
        assert torch.equal(tapped[:, 1], out)
        found.append(out)
        for bad in ([1, 40], [-1], [0, 2**40]):
            if one is embedding:
                with pytest.raises(IndexError, match=r"not in 0 \.\.\. 39"):
                    stack(layers, torch.tensor(bad), *arguments, n_logits=1, taps=())
    assert torch.equal(*found)
    stack = LayerStack(library, norm, PLAIN.rms_eps, packed, "f32", 0.0, embedding)
    with pytest.raises(ValueError, match="expected int64"):
        stack(layers, tokens.int(), *arguments, n_logits=1, taps=())

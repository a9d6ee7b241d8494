"""Every packed format against float64 products with the dequantised weights, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from random_blocks import raw_rows
from torch import Tensor

from specdec import quant
from specdec.native.library import Rounding, load_library, matrix_struct
from specdec.native.packing import GROUP, PACKED_TYPES, pack

PLAIN = ("F32", "F16", "BF16", "IQ3_S")
"""Formats whose weights are kept as plain numbers; their activations stay as they are."""
LARGEST = {"int8": 127, "int16": 127 * 128}
"""The largest number that an activation is rounded to."""
GROWTH = {"IQ4_XS": 2}
"""Bytes by which packing makes a block larger: scales of six bits get eight."""
N_COLS = 512


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def product(ggml_type: str, raw: np.ndarray, x: Tensor, activations: Rounding = "f32") -> Tensor:
    packed = pack(torch.from_numpy(raw.copy()), ggml_type, x.shape[1])
    return load_library().multiply(packed, x, activations)


def check(ggml_type: str, rows: int, cols: int, n: int, activations: Rounding = "f32") -> None:
    raw = raw_rows(ggml_type, rows, cols)
    x = torch.from_numpy(np.random.default_rng(n).standard_normal((n, cols))).float()
    weight = quant.dequantize(raw, ggml_type, (rows, cols)).double()
    expected = x.double() @ weight.T
    bound = x.double().abs() @ weight.abs().T  # rounding errors grow with the summands
    if activations in LARGEST and ggml_type not in PLAIN:
        expected = quantised(x, LARGEST[activations]).double() @ weight.T
    found = product(ggml_type, raw, x, activations).double()
    assert float(((found - expected).abs() / bound.clamp(min=1e-30)).max()) < 2e-6


def quantised(x: Tensor, steps: int) -> Tensor:
    """What is left of activations [T, N] as whole numbers up to ``steps`` in each block of 32."""
    blocks = x.view(x.shape[0], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    rounded: Tensor = torch.round(blocks * (steps / largest)) * (largest / steps)
    return rounded.view(x.shape)


@pytest.mark.parametrize("activations", ["f32", "int8", "int16"])
@pytest.mark.parametrize("ggml_type", [*PACKED_TYPES, "IQ3_S"])
def test_products_agree_with_float64(ggml_type: str, threads: int, activations: Rounding) -> None:
    check(ggml_type, rows=40, cols=N_COLS, n=5, activations=activations)


@pytest.mark.parametrize("activations", ["f32", "int8", "int16"])
@pytest.mark.parametrize("ggml_type", [*PACKED_TYPES, "IQ3_S"])
def test_a_row_does_not_depend_on_the_rows_beside_it(ggml_type: str, activations: Rounding) -> None:
    raw = raw_rows(ggml_type, 40, N_COLS)
    x = torch.randn(32, N_COLS, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([product(ggml_type, raw, row, activations) for row in x.split(1)])
    before = torch.get_num_threads()
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        for n in range(1, 33):
            found = product(ggml_type, raw, x[:n], activations)
            assert torch.equal(found, alone[:n]), f"{n} rows"
    torch.set_num_threads(before)


@pytest.mark.parametrize("cols", [1, 2, 15, 16, 17, 31, 33, 63, 100])
@pytest.mark.parametrize("ggml_type", ["F32", "F16", "BF16"])
def test_any_number_of_columns(ggml_type: str, cols: int) -> None:
    check(ggml_type, rows=17, cols=cols, n=3)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("ggml_type", ["F32", "Q4_0", "Q8_0"])
def test_any_number_of_rows(ggml_type: str, rows: int, threads: int) -> None:
    check(ggml_type, rows=rows, cols=96, n=3)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 17])
def test_any_number_of_activation_rows(n: int, threads: int) -> None:
    check("Q4_1", rows=33, cols=64, n=n)


@pytest.mark.parametrize("ggml_type", PACKED_TYPES)
def test_packed_size_is_the_size_in_the_file(ggml_type: str) -> None:
    raw = raw_rows(ggml_type, 2 * GROUP, N_COLS)
    more = GROWTH.get(ggml_type, 0) * raw.size // quant.block_layout(ggml_type)[1]
    assert pack(torch.from_numpy(raw), ggml_type, N_COLS).data.numel() == raw.size + more


def test_large_tensors_are_packed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(raw_rows("Q4_1", 50, N_COLS))
    whole = pack(raw, "Q4_1", N_COLS)
    monkeypatch.setattr("specdec.native.packing._CHUNK_BYTES", 1)
    assert torch.equal(pack(raw, "Q4_1", N_COLS).data, whole.data)


@pytest.mark.parametrize("indices", [torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1).long()])
def test_wrong_indices_never_reach_the_kernels(indices: torch.Tensor) -> None:
    packed = pack(torch.zeros(4, 32).view(torch.uint8), "F32", 8)
    with pytest.raises(ValueError, match="expected int64"):
        load_library().rows(matrix_struct(packed, None), indices)


def test_wrong_shapes_never_reach_the_kernels() -> None:
    packed = pack(torch.from_numpy(raw_rows("F32", 16, 32)), "F32", 32)
    for x in (torch.zeros(2, 31), torch.zeros(2, 32).double(), torch.zeros(2, 33)):
        with pytest.raises(ValueError, match="expected float32"):
            load_library().multiply(packed, x, "int8")


def test_half_precision_specials() -> None:
    """Subnormal, largest and negative zero halves keep their values."""
    halves = np.array([0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8000, 0x8001, 0xFBFF], np.uint16)
    raw = halves.view(np.uint8).reshape(-1, 2)
    expected = torch.from_numpy(halves.view(np.float16).astype(np.float32))
    assert torch.equal(product("F16", raw, torch.ones(1, 1))[0], expected)


@pytest.mark.parametrize("ggml_type", PACKED_TYPES)
def test_rows_are_what_dequantising_gives(ggml_type: str) -> None:
    rows = 2 * GROUP + 5
    raw = raw_rows(ggml_type, rows, N_COLS)
    packed = pack(torch.from_numpy(raw.copy()), ggml_type, N_COLS)
    matrix = matrix_struct(packed, None)
    indices = torch.tensor([rows - 1, 0, 3, GROUP, 3])
    expected = quant.dequantize(raw, ggml_type, (rows, N_COLS)).float()[indices]
    assert torch.equal(load_library().rows(matrix, indices), expected)
    for wrong in (-1, rows):
        with pytest.raises(IndexError, match=f"0 ... {rows - 1}"):
            load_library().rows(matrix, torch.tensor([0, wrong]))


def test_norm() -> None:
    x = torch.randn(3, 77, generator=torch.Generator().manual_seed(2)) * 40
    weight = torch.linspace(-1, 2, 77)
    normed = torch.nn.functional.rms_norm(x, (77,), weight, 1e-5)
    torch.testing.assert_close(load_library().rms_norm(x, weight, 1e-5), normed)

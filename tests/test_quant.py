"""Every block format against `gguf.quants`, bit for bit, on random bytes."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
import torch

from specdec import quant
from specdec.errors import ModelFileError, UnsupportedError
from specdec.ggml_types import BLOCK_LAYOUTS, TYPE_NAMES

QUANTISED = [name for name in quant.SUPPORTED if quant.block_layout(name).block_size > 1]


def random_blocks(ggml_type: str, n_blocks: int, seed: int = 0) -> np.ndarray:
    size = quant.block_layout(ggml_type).type_size
    return np.random.default_rng(seed).integers(0, 256, n_blocks * size, dtype=np.uint8)


def reference(raw: np.ndarray, ggml_type: str) -> np.ndarray:
    size = quant.block_layout(ggml_type).type_size
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(
            raw.reshape(-1, size), gguf.GGMLQuantizationType[ggml_type]
        ).reshape(-1)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit patterns, signs of zeros included; one not-a-number is as good as another."""
    both_nan = np.isnan(found) & np.isnan(expected)
    same = found.view(np.uint32) == expected.view(np.uint32)
    assert np.all(same | both_nan), np.flatnonzero(~(same | both_nan))[:10]


def test_the_type_table_is_that_of_the_gguf_package() -> None:
    assert {t.value: t.name for t in gguf.GGMLQuantizationType} == TYPE_NAMES
    assert {t.name: s for t, s in gguf.GGML_QUANT_SIZES.items()} == BLOCK_LAYOUTS


def test_everything_that_the_gguf_package_decodes_is_supported() -> None:
    known = {t.name for t in gguf.quants._type_traits}
    assert known | {"F32", "F16", "F64", "I8", "I16", "I32", "I64"} == set(quant.SUPPORTED)


@pytest.mark.parametrize("ggml_type", QUANTISED)
def test_blocks_decode_to_the_bits_of_the_reference(ggml_type: str) -> None:
    raw = random_blocks(ggml_type, 999)
    shape = (27, 37, quant.block_layout(ggml_type).block_size)
    found = quant.dequantize(raw, ggml_type, shape)
    assert found.dtype == torch.float32
    assert found.shape == shape
    assert_same_bits(found.numpy().reshape(-1), reference(raw, ggml_type))


@pytest.mark.parametrize("ggml_type", QUANTISED)
def test_every_value_of_every_scale_byte(ggml_type: str) -> None:
    """Each byte of a block takes all 256 values, so special scales (0, inf, NaN) occur."""
    size = quant.block_layout(ggml_type).type_size
    raw = random_blocks(ggml_type, 256 * 4).reshape(4, 256, size)
    head = np.arange(256, dtype=np.uint8)
    raw[0, :, 0] = raw[1, :, 1] = raw[2, :, -1] = raw[3, :, -2] = head
    raw = raw.reshape(-1)
    found = quant.dequantize(raw, ggml_type, (1024, quant.block_layout(ggml_type).block_size))
    assert_same_bits(found.numpy().reshape(-1), reference(raw, ggml_type))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q4_K", 10)
    whole = quant.dequantize(raw, "Q4_K", (10, 256))
    monkeypatch.setattr(quant, "_CHUNK", 768)
    assert_same_bits(quant.dequantize(raw, "Q4_K", (10, 256)).numpy(), whole.numpy())
    numbers = np.arange(2000, dtype=np.int32)
    found = quant.dequantize(numbers.view(np.uint8), "I32", (2000,))
    assert torch.equal(found, torch.from_numpy(numbers))


@pytest.mark.parametrize(
    ("ggml_type", "dtype"), [("I8", "i1"), ("I16", "i2"), ("I32", "i4"), ("I64", "i8")]
)
def test_integers_keep_their_type(ggml_type: str, dtype: str) -> None:
    numbers = np.array([[0, -1, 1], [100, -128, 127]], dtype=dtype)
    found = quant.dequantize(numbers.view(np.uint8).reshape(-1), ggml_type, (2, 3))
    assert found.numpy().dtype == numbers.dtype
    assert found.tolist() == numbers.tolist()


def test_floats_become_float32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    half = quant.dequantize(bits.view(np.uint8), "F16", (65536,))
    assert_same_bits(half.numpy(), bits.view(np.float16).astype(np.float32))
    brain = quant.dequantize(bits.view(np.uint8), "BF16", (256, 256))
    assert_same_bits(brain.numpy().reshape(-1), reference(bits.view(np.uint8), "BF16"))
    double = np.array([1 / 3, -2.5e30, 0.0])
    found = quant.dequantize(double.view(np.uint8), "F64", (3,))
    assert found.tolist() == double.astype(np.float32).tolist()
    single = np.array([1 / 3, -2.5e30, 0.0], dtype=np.float32)
    assert quant.dequantize(single.view(np.uint8), "F32", (3,)).tolist() == single.tolist()


def test_the_result_is_a_copy_and_reads_unaligned_memory() -> None:
    raw = np.zeros(4 * 8 + 1, dtype=np.uint8)[1:]
    raw.flags.writeable = False
    found = quant.dequantize(raw, "F32", (8,))
    found += 1
    assert not raw.any()


def test_decoding_takes_little_memory_beyond_the_result() -> None:
    """numpy reports its memory to tracemalloc; the reference decoders work in numpy alone."""
    raw = random_blocks("TQ2_0", 40_000)
    quant.dequantize(raw[:66], "TQ2_0", (256,))
    tracemalloc.start()
    quant.dequantize(raw, "TQ2_0", (40_000, 256))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000


def test_a_type_that_cannot_be_decoded_lists_the_others() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor type Q8_K cannot .* supported: F32, F16"):
        quant.dequantize(np.zeros(292, dtype=np.uint8), "Q8_K", (256,))


def test_bytes_must_fit_the_shape() -> None:
    with pytest.raises(ModelFileError, match=r"shape \[2, 32\]: found 18 bytes, expected 36"):
        quant.dequantize(np.zeros(18, dtype=np.uint8), "Q4_0", (2, 32))

"""Products with eight-bit activations are the same bits whatever instructions compute them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from random_blocks import raw_rows

from specdec.native import build
from specdec.native.library import Library, load_library
from specdec.native.packing import Kind, pack

NATIVE = "-march=native"
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512 without vnni": (NATIVE, "-mno-avx512vnni"),
        "avx2 with vnni": (NATIVE, "-mno-avx512f"),
        "avx2": ("-march=x86-64", "-mavx2", "-mfma", "-mf16c"),
        "plain": ("-march=x86-64",),
    },
    "aarch64": {"plain": ("-march=armv8-a",)},
}
"""Processor -> name -> flags for the compiler, with fewer instructions than it may have."""
NEEDED = {"avx2": {"avx2", "fma", "f16c"}}
"""What a variant needs beyond what the compiler assumes of every processor of its kind."""
N_COLS = 512
QUANTISED = [kind.name for kind in Kind if kind > Kind.BF16]


@pytest.mark.parametrize("name", VARIANTS.get(platform.machine(), {"plain": ()}))
def test_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant compiles; those that this processor can run agree."""
    flags = VARIANTS.get(platform.machine(), {"plain": ()})[name]
    monkeypatch.setattr(build, "VARIANTS", (flags,))
    monkeypatch.setattr(build, "LEVEL", "-O1")
    build.compile_kernels(build.find_compiler(), tmp_path / "kernels.so")
    if not set(build.processor().split()).issuperset(NEEDED.get(name, ())):
        return
    other = Library(str(tmp_path / "kernels.so"))
    x = torch.randn(3, N_COLS, generator=torch.Generator().manual_seed(4))
    x[1] *= 1e3
    x[2, ::7] = 0
    for ggml_type in QUANTISED:
        packed = pack(torch.from_numpy(raw_rows(ggml_type, 40, N_COLS)), ggml_type, N_COLS)
        for rounding in ("int8", "int16"):
            expected = load_library().multiply(packed, x, rounding)
            assert torch.equal(other.multiply(packed, x, rounding), expected), ggml_type
        exact, found = (lib.multiply(packed, x, "f32") for lib in (load_library(), other))
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


def test_extreme_bytes() -> None:
    """The largest products of unsigned and signed bytes do not overflow."""
    raw = raw_rows("Q8_0", 16, N_COLS).reshape(16, -1, 34)
    raw[:, :, :2] = torch.tensor([1.0]).half().view(torch.uint8).numpy()
    for value in (127, -128, -127):
        raw[:, :, 2:] = value % 256
        packed = pack(torch.from_numpy(raw.reshape(16, -1).copy()), "Q8_0", N_COLS)
        for sign in (1.0, -1.0):
            found = load_library().multiply(packed, torch.full((1, N_COLS), sign), "int8")
            torch.testing.assert_close(found, torch.full((1, 16), sign * value * N_COLS))


def test_values_that_are_not_finite_stay_visible() -> None:
    packed = pack(torch.from_numpy(raw_rows("Q4_0", 16, N_COLS)), "Q4_0", N_COLS)
    for value in (float("nan"), float("inf")):
        x = torch.ones(2, N_COLS)
        x[0, 40] = value
        for rounding in ("int8", "int16"):
            found = load_library().multiply(packed, x, rounding)
            assert found[0].isnan().all()
            assert found[1].isfinite().all()

"""`make neon`: the kernels for ARM processors, cross-compiled and run by an emulator.

Needs Debian's packages g++-aarch64-linux-gnu and qemu-user-static, so it is no part of `make test`.
What is computed is compared with the same program built for this machine.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from random_blocks import raw_rows

from specdec.native import build
from specdec.native.library import ACTIVATION_BYTES, CACHE_TYPES
from specdec.native.packing import PACKED_TYPES, Kind, pack

DRIVER = Path(__file__).with_name("emulated.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
VARIANTS = {
    "plain": "armv8-a",
    "signed dot product": "armv8.2-a+dotprod",
    "mixed dot product": "armv8.2-a+i8mm",
}
ROWS, COLS, N = 40, 512, 9


def compile_driver(compiler: str, path: Path, *flags: str) -> Path:
    """The driver and all kernels as one program; any warning is an error."""
    sources = [DRIVER, *(build.FOLDER / name for name in build.SOURCES)]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [compiler, build.LEVEL, *build.EXACT_FLAGS, *warnings, "-static", *flags]
    subprocess.run([*command, *sources, "-o", path], check=True)
    return path


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """How to run the program for this machine."""
    path = tmp_path_factory.mktemp("native") / "driver"
    return [compile_driver(build.find_compiler(), path, "-march=native")]


@pytest.fixture(scope="module", params=VARIANTS)
def emulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[str | Path]:
    """How to run the program for an ARM processor."""
    path = tmp_path_factory.mktemp("arm") / "driver"
    return [EMULATOR, compile_driver(COMPILER, path, f"-march={VARIANTS[request.param]}")]


def output(program: list[str | Path], *work: str, problems: bytes = b"") -> np.ndarray:
    """The float32 numbers that the program writes."""
    result = subprocess.run([*program, *work], input=problems, stdout=subprocess.PIPE, check=True)
    return np.frombuffer(result.stdout, np.float32)


def problem(ggml_type: str, x: torch.Tensor, activation_bytes: int) -> bytes:
    """A product as the driver reads it."""
    packed = pack(torch.from_numpy(raw_rows(ggml_type, ROWS, COLS)), ggml_type, COLS)
    data = packed.data.numpy().tobytes()
    sizes = (int(packed.kind), ROWS, COLS, len(x), activation_bytes, len(data))
    return struct.pack("6q", *sizes) + data + x.numpy().tobytes()


def activations() -> torch.Tensor:
    """Rows of ordinary, large and sparse numbers [N, COLS]."""
    x = torch.randn(N, COLS, generator=torch.Generator().manual_seed(4))
    x[1] *= 1e3
    x[2, ::7] = 0
    return x


@pytest.mark.parametrize("ggml_type", PACKED_TYPES)
def test_products(ggml_type: str, native: list[str | Path], emulated: list[str | Path]) -> None:
    """The same bits with rounded activations, close ones in float32; one row like nine."""
    x = activations()
    for name, n_bytes in ACTIVATION_BYTES.items():
        whole = problem(ggml_type, x, n_bytes)
        alone = b"".join(problem(ggml_type, row, n_bytes) for row in x.split(1))
        found = output(emulated, "products", problems=whole)
        assert found.size == N * ROWS
        assert found.tobytes() == output(emulated, "products", problems=alone).tobytes(), name
        expected = output(native, "products", problems=whole)
        if n_bytes and Kind[ggml_type] > Kind.BF16:
            assert found.tobytes() == expected.tobytes(), name
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("cache_type", CACHE_TYPES.values(), ids=str)
@pytest.mark.parametrize("uses_gelu", [0, 1])
def test_a_layer(
    uses_gelu: int, cache_type: int, native: list[str | Path], emulated: list[str | Path]
) -> None:
    """Rows at once are the rows one by one, to the last bit; close to this machine's."""
    work = ("layer", str(uses_gelu), str(cache_type))
    at_once, alone = np.split(output(emulated, *work), 2)
    assert at_once.tobytes() == alone.tobytes()
    expected = output(native, *work)[: at_once.size]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(at_once, expected, rtol=1e-3, atol=1e-3)

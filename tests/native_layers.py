"""Layers with random weights in torch and on native kernels, and what must hold of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from specdec.kv_cache import KVCache
from specdec.models.layers import DecoderLayer, LayerSpec, RotaryEmbedding
from specdec.models.rows import Rows
from specdec.native.layer import NativeLayer
from specdec.native.library import load_library
from specdec.native.weights import Weights
from specdec.options import Activations

DEPTHS = (0, 1, 255, 1000)


class ModuleWeights(Weights):
    """The parameters of a torch module in place of a file's tensors."""

    def __init__(self, module: torch.nn.Module, ggml_type: str) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]
        self._state, self._type = module.state_dict(), ggml_type

    def read(self, name: str) -> tuple[npt.NDArray[np.uint8], str, int]:
        """The matrices in the type of the file."""
        weight = self._state[name].contiguous().numpy()
        raw = quants.quantize(weight, GGMLQuantizationType[self._type])
        raw = raw.view(np.uint8).reshape(*weight.shape[:-1], -1)
        return raw, self._type, weight.shape[-1]

    def vector(self, name: str) -> Tensor:
        """Any tensor as float32."""
        return self._state[name].contiguous()

    def release(self, name: str) -> None:
        """Nothing is kept twice."""


def new_plain(spec: LayerSpec) -> DecoderLayer:
    """A torch layer with random weights."""
    generator = torch.Generator().manual_seed(spec.n_ff)
    plain = spec.new_layer().requires_grad_(False)
    for name, weight in plain.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        if name == "ssm_a":
            weight.copy_(-weight.abs())  # a memory fades
    return plain


def to_native(
    plain: DecoderLayer, ggml_type: str = "F32", activations: Activations = "f32"
) -> NativeLayer:
    """The same layer on native kernels, its matrices in ``ggml_type``."""
    weights = ModuleWeights(plain, ggml_type)
    names = list(plain.state_dict())
    return NativeLayer(load_library(), plain.spec, names, "", weights, activations)


def build(
    spec: LayerSpec, ggml_type: str = "F32", activations: Activations = "f32"
) -> tuple[DecoderLayer, NativeLayer]:
    """A random layer, twice."""
    plain = new_plain(spec)
    return plain, to_native(plain, ggml_type, activations)


class Run:
    """A layer with a cache of its own."""

    def __init__(
        self,
        layer: DecoderLayer | NativeLayer,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
    ) -> None:
        self.layer, spec = layer, layer.spec
        device = torch.device("cpu")
        self.cache = KVCache(
            [spec.cache_shape], 2048, device=device, dtype_k=dtype_k, dtype_v=dtype_v
        )
        self.rotary = RotaryEmbedding(spec.rope)

    def __call__(self, hidden: Tensor, *, exact: bool = False) -> Tensor:
        """Rows [T, D] behind those before; [T, D]."""
        n = hidden.shape[0]
        positions = torch.arange(self.cache.length, self.cache.length + n)
        rows = Rows(self.cache.length, n, exact=exact)
        out: Tensor = self.layer(hidden, self.cache, 0, self.rotary(positions), rows)
        self.cache.advance(n)
        return out

    def kept(self) -> tuple[Tensor, ...]:
        """What the layer has left in the cache."""
        if self.layer.spec.cache_shape.state:
            return self.cache.state(0)
        return self.cache.committed(0, torch.float32)


def random_rows(spec: LayerSpec, n: int) -> Tensor:
    """[T, D], always the same ones."""
    return torch.randn(n, spec.n_embd, generator=torch.Generator().manual_seed(n))


def assert_agrees(plain: DecoderLayer, native: NativeLayer) -> None:
    """Passes of several sizes give the numbers of the torch layer, up to rounding."""
    ours, theirs = Run(native), Run(plain)
    for n in (3, 1, 20, 1, 2):
        hidden = random_rows(native.spec, n)
        torch.testing.assert_close(ours(hidden), theirs(hidden), atol=2e-5, rtol=1e-5)
    for left, right in zip(ours.kept(), theirs.kept(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def assert_rounding_is_small(spec: LayerSpec, ggml_type: str) -> None:
    """Activations in eight bits change something, but little."""
    exact, rounded = (Run(build(spec, ggml_type, kind)[1]) for kind in ("f32", "int8"))
    hidden = random_rows(spec, 20)
    expected, found = exact(hidden) - hidden, rounded(hidden) - hidden
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) < 0.03


def assert_row_invariant(native: NativeLayer) -> None:
    """Passes of up to 32 rows at several depths give the bits of single rows."""
    run, spec = Run(native), native.spec
    hidden = random_rows(spec, 32)
    before = torch.get_num_threads()
    for depth in DEPTHS:
        run.cache.truncate(0)
        if depth:
            run(random_rows(spec, depth))
        alone = torch.cat([run(row) for row in hidden.split(1)])
        for n_threads, n in [(1, n) for n in range(1, 33)] + [(2, n) for n in (1, 2, 7, 8, 32)]:
            torch.set_num_threads(n_threads)
            run.cache.truncate(depth)
            assert torch.equal(run(hidden[:n]), alone[:n]), f"{n} rows at depth {depth}"
        torch.set_num_threads(before)


def assert_chunks_leave_the_same(native: NativeLayer) -> None:
    """A prompt in pieces gives the same rows and leaves the same cache."""
    hidden = random_rows(native.spec, 300)
    whole_run = Run(native)
    whole = whole_run(hidden)
    for size in (1, 17, 256):
        run = Run(native)
        assert torch.equal(torch.cat([run(part) for part in hidden.split(size)]), whole)
        for ours, theirs in zip(run.kept(), whole_run.kept(), strict=True):
            assert torch.equal(ours, theirs)

"""The base trunk of the DFlash family on the native kernels: a `Backbone` of packed weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.drafters.dflash.trunk import BlockLayer, Trunk, TrunkOutput
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models.layers import RotaryEmbedding
from specdec.native import find_library, knows
from specdec.native.calls import LayerCalls, layer_calls
from specdec.native.layer import NativeLayer, NativeLinear, NativeRMSNorm
from specdec.native.library import Library, floats
from specdec.native.modules import Packer
from specdec.native.weights import Weights
from specdec.options import Activations, Kernels


def pack_draft(
    trunk: nn.Module,
    vocabulary: DraftVocabulary,
    head: nn.Module,
    file: GGUFFile,
    kernels: Kernels,
    activations: Activations,
    device: torch.device | str,
) -> nn.Module | None:
    """A native trunk in place of ``trunk``, and native matrices in the modules beside it.

    A trunk with a local convolution stays, with native matrices. None if torch has to do all of it;
    see `specdec.native.install`. The modules are still on the meta device.
    """
    library = find_library(kernels, device, knows_draft=_knows_trunk(trunk))
    if library is None:
        return None
    assert isinstance(trunk, Trunk)
    packer = Packer(library, file, activations)
    for module in (vocabulary, head):
        _pack_matrices(module, file, packer)
    if all(layer.convolution is None for layer in trunk.layers):
        return NativeTrunk(library, trunk, file, activations)
    _pack_matrices(trunk, file, packer)
    return trunk


def _knows_trunk(trunk: nn.Module) -> bool:
    """Whether the kernels can do everything that the trunk does, but for the local convolution."""
    return type(trunk) is Trunk and all(
        type(layer) is BlockLayer and knows(layer.spec) for layer in trunk.layers
    )


def _pack_matrices(module: nn.Module, file: GGUFFile, packer: Packer) -> None:
    """Puts packed matrices into ``module`` where the file has smaller numbers than float32."""
    for path, child in list(module.named_modules()):
        weight = f"{path}.weight"
        if isinstance(child, nn.Linear) and file.info(weight).ggml_type != "F32":
            bias = "" if child.bias is None else f"{path}.bias"
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).add_module(name, packer.linear(weight, bias))


class NativeTrunk(nn.Module):
    """See `specdec.drafters.dflash.trunk.Trunk`; a block's keys lie behind the committed ones."""

    def __init__(
        self, library: Library, trunk: Trunk, file: GGUFFile, activations: Activations
    ) -> None:
        """Packs the weights of ``trunk``, which is built on the meta device, from ``file``."""
        super().__init__()
        self.config = trunk.config
        self.cache_shapes = trunk.cache_shapes
        self._library = library
        weights = Weights(file, None)
        eps = self.config.rms_eps
        self.fc = NativeLinear(library, weights.matrix("fc.weight"), activations)
        self.fused_norm = NativeRMSNorm(library, weights.vector("enc.output_norm.weight"), eps)
        self._layers = [
            NativeLayer(
                library, layer.spec, list(layer.state_dict()), f"blk.{i}.", weights, activations
            )
            for i, layer in enumerate(trunk.layers)
        ]
        self.output_norm = NativeRMSNorm(library, weights.vector("output_norm.weight"), eps)
        self._rotary = RotaryEmbedding(self._layers[0].spec.rope)

    def fuse(self, hidden: Tensor) -> Tensor:
        """See `Backbone.fuse`."""
        return self.fused_norm(self.fc(hidden.flatten(1)))  # type: ignore[no-any-return]

    def inject(self, fused: Tensor, cache: KVCache) -> None:
        """See `Backbone.inject`."""
        n = fused.shape[0]
        if not n:
            return
        calls = self._calls(cache, n)
        rows = floats(fused, (n, self.config.n_embd))
        self._library.write_keys_values(calls, rows, cache.length)
        cache.advance(n)

    def forward(self, embeddings: Tensor, cache: KVCache) -> TrunkOutput:
        """See `Backbone.__call__`."""
        n = embeddings.shape[0]
        calls = self._calls(cache, n)
        hidden = floats(embeddings * self.config.embedding_scale, (n, self.config.n_embd))
        sees_block = not self.config.is_causal
        self._library.run_layers(calls, hidden, cache.length, sees_block=sees_block)
        hidden = self.output_norm(hidden)
        return TrunkOutput(hidden, hidden)

    def _calls(self, cache: KVCache, n: int) -> LayerCalls:
        tables = self._rotary.tables(cache.length + n, torch.device("cpu"))
        rotary = [tables] * len(self._layers)
        return layer_calls(self._layers, cache, 0, n, rotary, cache.length)

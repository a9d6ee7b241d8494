"""Native modules in the place of torch's, wherever they stand in a draft."""

from __future__ import annotations

import torch
from torch import nn

from specdec.gguf_file import GGUFFile
from specdec.models.layers import DecoderLayer
from specdec.native import knows_layer
from specdec.native.layer import (
    NativeEmbedding,
    NativeLayer,
    NativeLinear,
    NativeRMSNorm,
)
from specdec.native.library import Library
from specdec.native.weights import Transform, Weights
from specdec.options import Activations


class Packer:
    """Packs the tensors of ``file`` for the modules that have their names."""

    def __init__(
        self,
        library: Library,
        file: GGUFFile,
        activations: Activations,
        transform: Transform | None = None,
    ) -> None:
        self._library, self._file, self._activations = library, file, activations
        self._weights = Weights(file, transform)

    def pack(self, module: nn.Module, prefix: str = "") -> None:
        """Replaces what is inside ``module``, whose tensors have names behind ``prefix``.

        That is every layer that the kernels know, and of the others every matrix, norm and
        embedding table. The module is on the meta device; what stays has torch's parameters.
        """
        for name, child in list(module.named_children()):
            native = self._native(child, f"{prefix}{name}")
            if native is not None:
                module.add_module(name, native)
            self.pack(native or child, f"{prefix}{name}.")

    def linear(self, name: str, bias: str = "") -> NativeLinear:
        """The product with matrix ``name``, plus the vector ``bias`` if there is one."""
        vector = self._weights.vector(bias) if bias else None
        return NativeLinear(self._library, self._weights.matrix(name), self._activations, vector)

    def layer(self, layer: DecoderLayer, path: str) -> NativeLayer:
        """``layer`` in one native call, without what was added to it from outside."""
        names = list(layer.state_dict())
        return NativeLayer(
            self._library, layer.spec, names, f"{path}.", self._weights, self._activations
        )

    def _native(self, module: nn.Module, path: str) -> nn.Module | None:
        """What takes the place of one module; None if it stays."""
        if knows_layer(module):
            assert isinstance(module, DecoderLayer)
            layer = self.layer(module, path)
            with torch.device("meta"):
                own = dict(module.spec.new_layer().named_children())
            for name, child in module.named_children():
                if name not in own:
                    layer.add_module(name, child)
            return layer
        if isinstance(module, nn.Linear):
            bias = "" if module.bias is None else f"{path}.bias"
            return self.linear(f"{path}.weight", bias)
        if isinstance(module, nn.RMSNorm):
            assert module.eps is not None
            weight = self._weights.vector(f"{path}.weight")
            return NativeRMSNorm(self._library, weight, module.eps)
        if isinstance(module, nn.Embedding):
            return NativeEmbedding(self._file, f"{path}.weight")
        return None

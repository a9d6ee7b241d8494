"""The tensors of a file in the forms that kernels read, and the structures that point to them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.gguf_file import GGUFFile
from specdec.native.library import ExpertMatrices, Matrix, matrix_struct
from specdec.native.memory import WeightMemory
from specdec.native.packing import GROUP, PackedMatrix, pack, pack_rows

Transform = Callable[[str, Tensor], Tensor]
"""Rearranges the rows of a tensor by name, whatever its columns are."""

MISSING = -1
"""In place of the number of a row."""


class Weights:
    """The tensors of a file, packed or as float32."""

    def __init__(self, file: GGUFFile, transform: Transform | None) -> None:
        self._file, self._transform = file, transform
        self._memory = WeightMemory()

    def matrix(self, name: str) -> PackedMatrix:
        """A matrix in its packed form."""
        return self.pieces(name)[0]

    def pieces(self, name: str, *heights: int) -> list[PackedMatrix]:
        """A matrix cut into pieces of so many rows each, or whole without any."""
        order = torch.arange(self.read(name)[0].shape[0])
        if self._transform is not None:  # which does nothing to a matrix but to move its rows
            order = self._transform(name, order)
        return [self._pack(name, part) for part in torch.split(order, list(heights) or len(order))]

    def experts(self, name: str) -> PackedMatrix:
        """The matrices [X, rows, cols] of experts: as `matrix`, the data [X, groups, bytes]."""
        count, rows = self.read(name)[0].shape[:2]
        order = torch.arange(count * rows).view(count, rows)
        packed = self._pack(name, F.pad(order, (0, -rows % GROUP), value=MISSING).flatten())
        data = torch.unflatten(packed.data, 0, (count, -1))
        return PackedMatrix(packed.kind, rows, packed.cols, data)

    def _pack(self, name: str, order: Tensor) -> PackedMatrix:
        """Rows ``order`` of a tensor, `MISSING` ones zeros.

        What was read of the file is given back piece by piece: the packed form is the only copy.
        """
        _, ggml_type, cols = self.read(name)

        def read(start: int, end: int) -> Tensor:
            raw, wanted = self.read(name)[0], order[start:end]
            rows = torch.from_numpy(raw.reshape(-1, raw.shape[-1])[wanted.numpy()])
            self.release(name)
            return rows.masked_fill_((wanted == MISSING)[:, None], 0)

        return pack_rows(read, ggml_type, (len(order), cols), self._memory)

    def plain_matrix(self, name: str) -> PackedMatrix:
        """A matrix as float32, whatever it is in the file."""
        weight = self.vector(name)
        return pack(weight.view(torch.uint8), "F32", weight.shape[1], self._memory)

    def vector(self, name: str) -> Tensor:
        """A tensor as float32, contiguous."""
        tensor = self._file.load(name).float()
        if self._transform is not None:
            tensor = self._transform(name, tensor)
        return tensor.contiguous()

    def read(self, name: str) -> tuple[npt.NDArray[np.uint8], str, int]:
        """The bytes of a tensor, its last axis rows in the file's format; type and columns."""
        info = self._file.info(name)
        return self._file.raw(name).reshape(*info.shape[:-1], -1), info.ggml_type, info.shape[-1]

    def release(self, name: str) -> None:
        """Gives the file's memory of a tensor back."""
        self._file.release(name)


class LayerTensors:
    """The tensors of one layer in structures, which are valid as long as this lives."""

    def __init__(self, weights: Weights, prefix: str, names: Collection[str]) -> None:
        """Those called ``names`` in the layer, which ``weights`` has under ``prefix``."""
        self._weights, self._prefix, self._names = weights, prefix, frozenset(names)
        self._kept: list[Tensor] = []

    def has(self, name: str) -> bool:
        """Whether the layer has a tensor of this name."""
        return name in self._names

    def matrix(self, name: str) -> Matrix:
        """Matrix ``name``, and its bias if it has one."""
        bias = self.vector(f"{name}.bias") if self.has(f"{name}.bias") else None
        return self._structure(self._weights.matrix(f"{self._prefix}{name}.weight"), bias)

    def pieces(self, name: str, *heights: int) -> list[Matrix]:
        """Matrix ``name`` cut into pieces of so many rows each."""
        pieces = self._weights.pieces(f"{self._prefix}{name}.weight", *heights)
        return [self._structure(piece) for piece in pieces]

    def plain_matrix(self, name: str) -> Matrix:
        """Matrix ``name`` as float32."""
        return self._structure(self._weights.plain_matrix(f"{self._prefix}{name}.weight"))

    def experts(self, name: str) -> ExpertMatrices:
        """The matrices ``name`` of all experts."""
        packed = self._weights.experts(f"{self._prefix}{name}.weight")
        return ExpertMatrices(self._structure(packed), packed.data[0].numel())

    def vector(self, name: str) -> Tensor:
        """Tensor ``name`` as float32."""
        vector = self._weights.vector(self._prefix + name)
        self._kept.append(vector)
        return vector

    def pointer(self, name: str) -> int | None:
        """The address of tensor ``name`` as float32; None if the layer has none."""
        return self.vector(name).data_ptr() if self.has(name) else None

    def address(self, tensor: Tensor) -> int:
        """The address of a tensor that was made from others."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _structure(self, packed: PackedMatrix, bias: Tensor | None = None) -> Matrix:
        self._kept.append(packed.data)
        return matrix_struct(packed, bias)

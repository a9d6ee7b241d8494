"""The memory of packed weights: aligned, apart from each other, freed with its tensors."""

from __future__ import annotations

import gc

import torch

from specdec.native.memory import ALIGNMENT, PIECE, WeightMemory


def test_tensors_are_aligned_and_apart() -> None:
    memory = WeightMemory()
    sizes = (1, 63, 64, 65, 1000, PIECE - 10, 0, PIECE + 1, 5)
    tensors = [memory.take(size) for size in sizes]
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % ALIGNMENT == 0 or not size
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all())


def test_tensors_outlive_the_object() -> None:
    tensor = WeightMemory().take(100).fill_(7)
    gc.collect()
    assert torch.equal(tensor, torch.full((100,), 7, dtype=torch.uint8))

"""The memory of packed weights: aligned, apart from each other, freed with its tensors, once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from specdec.native.memory import ALIGNMENT, WeightMemory

PEAK_OF_LOADING = """
import resource, sys
from pathlib import Path
import torch
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.native.library import load_library

def peak():
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])

load_library()
before = peak()
with GGUFFile.open(Path(sys.argv[1])) as file:
    target = load_target(file, kernels="native")
with torch.inference_mode():
    target(torch.tensor([1, 2, 3]), target.new_cache(8))
print(peak() - before)
"""
"""Prints by how many bytes the largest resident memory grows while a model is loaded and run."""
SLACK = 64 << 20
"""Bytes that packing a piece of a tensor and a pass may take."""


def write_model(path: Path) -> Path:
    """A model with one matrix of 38 MB, for embeddings and output, and many of 1.2 or 3.5 MB."""
    n_vocab, n_embd, n_ff, n_layer = 65536, 1024, 3072, 6
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(n_layer)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(16)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (n_vocab, n_embd)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.attn_{name}": (n_embd, n_embd) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{name}": (n_ff, n_embd) for name in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down"] = (n_embd, n_ff)
    kind = gguf.GGMLQuantizationType.Q4_0
    noise = np.random.default_rng(0).standard_normal((64, n_ff)).astype(np.float32)
    for name, (rows, cols) in shapes.items():
        blocks = gguf.quants.quantize(noise[:, :cols] / 100, kind)
        writer.add_tensor(f"{name}.weight", np.tile(blocks, (rows // 64, 1)), raw_dtype=kind)
    norms = [f"blk.{i}.{name}_norm" for i in range(n_layer) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_loading_takes_the_memory_of_the_file(tmp_path: Path) -> None:
    """No second copy of the weights, nor of the largest matrix, at any time."""
    path = write_model(tmp_path / "model.gguf")
    others = {"LD_PRELOAD", "CXXFLAGS"}  # a sanitizer needs memory of its own
    result = subprocess.run(
        [sys.executable, "-c", PEAK_OF_LOADING, str(path)],
        env={name: value for name, value in os.environ.items() if name not in others},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert int(result.stdout) < path.stat().st_size + SLACK


def test_tensors_are_aligned_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 1 << 16
    monkeypatch.setattr("specdec.native.memory.PIECE", piece)
    memory = WeightMemory()
    sizes = (1, 63, 64, 65, 1000, piece - 10, 0, piece + 1, 5)
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

"""The same model in other block formats, and a larger one of random weights; made once, then kept.

`requantised` writes the model's matrices again in another format; `random_model` writes a model of
the shape of SmolLM2-1.7B in Q4_K, with the vocabulary of the given one. What it says is noise, but
it reads as many bytes and multiplies as often as a real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from specdec.folders import cache_folder

N_LAYER, N_EMBD, N_HEAD, N_FF = 24, 2048, 32, 8192
SHAPE = {
    "llama.block_count": N_LAYER,
    "llama.embedding_length": N_EMBD,
    "llama.feed_forward_length": N_FF,
    "llama.attention.head_count": N_HEAD,
    "llama.attention.head_count_kv": N_HEAD,
    "llama.rope.dimension_count": N_EMBD // N_HEAD,
}
BLOCK_COLS, BLOCK_BYTES = 256, 144
"""Of Q4_K."""


def requantised(model: Path, name: str, folder: Path | None = None) -> Path:
    """``model`` with its four-bit matrices in the format ``name``, which gguf-py can write.

    It is kept in the cache, or goes to ``folder``.
    """
    path = _place(model, name) if folder is None else folder / f"{name}.gguf"
    if path.exists():
        return path
    reader = gguf.GGUFReader(model)
    kind = gguf.GGMLQuantizationType[name]

    def tensors() -> Iterator[tuple[str, np.ndarray, gguf.GGMLQuantizationType]]:
        for tensor in reader.tensors:
            data, found = tensor.data, tensor.tensor_type
            if len(tensor.shape) == 2 and found == gguf.GGMLQuantizationType.Q4_1:
                values = gguf.quants.dequantize(data, found)
                data, found = gguf.quants.quantize(values, kind), kind
            yield tensor.name, data, found

    return _write(path, reader, tensors(), {})


def random_model(model: Path) -> Path:
    """A model of 1.7 billion random weights in Q4_K."""
    path = _place(model, "random-1.7B-Q4_K")
    if path.exists():
        return path
    reader = gguf.GGUFReader(model)
    rng = np.random.default_rng(1)
    n_vocab = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")

    def matrix(rows: int, cols: int) -> np.ndarray:
        blocks = rng.integers(0, 256, (rows, cols // BLOCK_COLS, BLOCK_BYTES), dtype=np.uint8)
        factors = rng.uniform(1e-6, 4e-5, (rows, cols // BLOCK_COLS, 2)).astype(np.float16)
        blocks[..., :4] = factors.view(np.uint8)
        return blocks.reshape(rows, -1)

    def tensors() -> Iterator[tuple[str, np.ndarray, gguf.GGMLQuantizationType]]:
        shapes = {"token_embd": (n_vocab, N_EMBD)}
        for layer in range(N_LAYER):
            shapes |= {f"blk.{layer}.attn_{x}": (N_EMBD, N_EMBD) for x in ("q", "k", "v", "output")}
            shapes |= {f"blk.{layer}.ffn_{x}": (N_FF, N_EMBD) for x in ("gate", "up")}
            shapes[f"blk.{layer}.ffn_down"] = (N_EMBD, N_FF)
        for name, (rows, cols) in shapes.items():
            yield f"{name}.weight", matrix(rows, cols), gguf.GGMLQuantizationType.Q4_K
        norms = [f"blk.{i}.{x}_norm" for i in range(N_LAYER) for x in ("attn", "ffn")]
        for name in (*norms, "output_norm"):
            ones = np.ones(N_EMBD, np.float32)
            yield f"{name}.weight", ones, gguf.GGMLQuantizationType.F32

    return _write(path, reader, tensors(), SHAPE)


def _place(model: Path, name: str) -> Path:
    status = model.stat()
    mark = hashlib.sha256(f"{model.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    return cache_folder() / "bench" / f"{mark.hexdigest()[:12]}-{name}.gguf"


def _write(
    path: Path,
    reader: gguf.GGUFReader,
    tensors: Iterator[tuple[str, np.ndarray, gguf.GGMLQuantizationType]],
    changed: dict[str, int],
) -> Path:
    """Writes a file with the metadata of ``reader``, under another name until it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = changed.get(key, field.contents())
        writer.add_key_value(key, value, field.types[0], sub_type=sub_type)
    for name, data, kind in tensors:
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(path)

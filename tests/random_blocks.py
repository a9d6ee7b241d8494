"""Random rows of any block format, for tests of what reads them."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants

from specdec import quant

SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
}
"""Where the float16 numbers of a block are, for formats that `gguf` cannot write."""


def raw_rows(ggml_type: str, rows: int, cols: int) -> np.ndarray:
    """Random rows of a format, [rows, bytes]."""
    rng = np.random.default_rng(rows * cols)
    if ggml_type not in SCALES:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        blocks = quants.quantize(values, GGMLQuantizationType[ggml_type])
        return np.ascontiguousarray(blocks).view(np.uint8).reshape(rows, -1)
    block_size, type_size = quant.block_layout(ggml_type)
    raw = rng.integers(0, 256, (rows * cols // block_size, type_size), dtype=np.uint8)
    for start in SCALES[ggml_type]:
        factors = rng.uniform(-0.02, 0.02, (len(raw), 1)).astype(np.float16)
        raw[:, start : start + 2] = factors.view(np.uint8)
    return raw.reshape(rows, -1)

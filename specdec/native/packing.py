"""GGUF's blocks to the layout of the native kernels: rows interleaved by sixteen.

A group of sixteen rows is a sequence of blocks: sixteen scales, sixteen minima if the format has
them, then the quants column by column, sixteen rows each. Four-bit formats keep two columns in a
byte. Formats without a packed form of their own are dequantised to float32, interleaved.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec import quant
from specdec.ggml_types import block_layout

GROUP = 16
"""Rows that are interleaved."""
_CHUNK_BYTES = 1 << 22
"""Bytes of a tensor that are packed at a time, so that temporaries stay small."""


class Kind(enum.IntEnum):
    """How a block is stored; the numbers are those of ``Kind`` in matmul.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    NIBBLES_CENTRED = 3
    NIBBLES_F16 = 4
    NIBBLES_F32 = 5
    BYTES_F16 = 6
    BYTES_MIN_F16 = 7
    BYTES_MIN_F32 = 8
    BYTES16_F32 = 9


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [rows, cols] as the kernels read it."""

    kind: Kind
    rows: int
    cols: int
    data: Tensor
    """[groups, bytes of a group] uint8; rows beyond the last are zeros."""


class Parts(NamedTuple):
    """The blocks of some rows, taken apart: N blocks of S sub-blocks."""

    factors: tuple[Tensor, ...]
    """Scales, then minima if there are any, each [N, S] float16 or float32."""
    quants: Tensor
    """[N, S, W] uint8, a byte a column or, for four bits, a byte for columns c and c + 16."""


Splitter = Callable[[Tensor], Parts]
"""Takes blocks [N, type size] uint8 apart."""


def pack(raw: Tensor, ggml_type: str, cols: int) -> PackedMatrix:
    """The packed form of the rows ``raw`` [rows, bytes of a row] uint8 of a GGUF tensor.

    Every value stays what `quant.dequantize` would give, up to one rounding of scale times quant.
    """
    rows = raw.shape[0]
    kind, split = _FORMATS.get(ggml_type, (Kind.F32, None))
    step = max(1, _CHUNK_BYTES // (raw.shape[1] * GROUP)) * GROUP
    groups = []
    for start in range(0, max(rows, 1), step):
        part = raw[start : start + step]
        if ggml_type not in _FORMATS:
            values = quant.dequantize(part.numpy(), ggml_type, (part.shape[0], cols))
            part = values.float().view(torch.uint8)
        if missing := -part.shape[0] % GROUP:
            part = torch.nn.functional.pad(part, (0, 0, 0, missing))
        if split is None:
            groups.append(_interleave(part, cols))
        else:
            groups.append(_pack_blocks(part, block_layout(ggml_type).type_size, split))
    return PackedMatrix(kind, rows, cols, torch.cat(groups) if len(groups) > 1 else groups[0])


def _pack_blocks(raw: Tensor, type_size: int, split: Splitter) -> Tensor:
    """Whole groups of rows of a block format, [rows, bytes] to [groups, bytes]."""
    parts = split(raw.reshape(-1, type_size))
    pieces = [factor.contiguous().unsqueeze(-1).view(torch.uint8) for factor in parts.factors]
    n_groups, n_blocks = raw.shape[0] // GROUP, parts.quants.numel() // parts.quants.shape[-1]
    widths = [piece.shape[-1] * GROUP for piece in (*pieces, parts.quants)]
    out = torch.empty(n_groups, n_blocks // raw.shape[0], sum(widths), dtype=torch.uint8)
    *factors, quants = torch.split(out, widths, dim=-1)
    for packed, piece in zip(factors, pieces, strict=True):
        rows = piece.reshape(n_groups, GROUP, -1, piece.shape[-1])
        torch.unflatten(packed, -1, (GROUP, -1)).copy_(rows.permute(0, 2, 1, 3))
    rows = parts.quants.reshape(n_groups, GROUP, -1, parts.quants.shape[-1])
    torch.unflatten(quants, -1, (-1, GROUP)).copy_(rows.permute(0, 2, 3, 1))
    return out.flatten(1)


def _interleave(raw: Tensor, cols: int) -> Tensor:
    """Whole groups of rows of plain numbers, [rows, bytes] to [groups, bytes]."""
    n_groups = raw.shape[0] // GROUP
    return raw.reshape(n_groups, GROUP, cols, -1).permute(0, 2, 1, 3).flatten(1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of every block, [N, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _bytes(values: Tensor) -> Tensor:
    """Small integers as signed bytes, [N, S, W] uint8."""
    return values.to(torch.int8).view(torch.uint8)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts((_half(blocks, 0),), blocks[:, None, 2:])


def _q4_1(blocks: Tensor) -> Parts:
    return Parts((_half(blocks, 0), _half(blocks, 2)), blocks[:, None, 4:])


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    low = quant.nibbles(blocks[:, start + 4 :]).flatten(1)
    return low | quant.high_bits(blocks[:, start : start + 4])


def _q5_0(blocks: Tensor) -> Parts:
    return Parts((_half(blocks, 0),), _bytes(_five_bits(blocks, 2).short() - 16).unsqueeze(1))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts((_half(blocks, 0), _half(blocks, 2)), _five_bits(blocks, 4).unsqueeze(1))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts((_half(blocks, 0),), blocks[:, None, 2:])


def _iq4_nl(blocks: Tensor) -> Parts:
    table = torch.tensor(quant.IQ4_VALUES, dtype=torch.int8).view(torch.uint8)
    codes = quant.nibbles(blocks[:, 2:]).flatten(1)
    return Parts((_half(blocks, 0),), table[codes.long()].unsqueeze(1))


def _k_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, mins = quant.k_scales(blocks)
    return scales.squeeze(2), -mins.squeeze(2)


def _q4_k(blocks: Tensor) -> Parts:
    values = quant.nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1, 2)
    return Parts(_k_factors(blocks), values[..., :16] | (values[..., 16:] << 4))


def _q5_k(blocks: Tensor) -> Parts:
    low = quant.nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
    return Parts(_k_factors(blocks), low | (quant.bit_fields(blocks[:, 16:48], 1) << 4))


def _q6_k(blocks: Tensor) -> Parts:
    low = quant.nibbles(blocks[:, :128].view(-1, 2, 64)).flatten(1)
    high = quant.bit_fields(blocks[:, 128:192].view(-1, 2, 32), 2).flatten(1)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208).float()
    values = (low | (high << 4)).short() - 32
    return Parts((scales,), _bytes(values).view(-1, 16, 16))


_FORMATS: dict[str, tuple[Kind, Splitter | None]] = {
    "F32": (Kind.F32, None),
    "F16": (Kind.F16, None),
    "BF16": (Kind.BF16, None),
    "Q4_0": (Kind.NIBBLES_CENTRED, _q4_0),
    "Q4_1": (Kind.NIBBLES_F16, _q4_1),
    "Q4_K": (Kind.NIBBLES_F32, _q4_k),
    "Q8_0": (Kind.BYTES_F16, _q8_0),
    "Q5_0": (Kind.BYTES_F16, _q5_0),
    "IQ4_NL": (Kind.BYTES_F16, _iq4_nl),
    "Q5_1": (Kind.BYTES_MIN_F16, _q5_1),
    "Q5_K": (Kind.BYTES_MIN_F32, _q5_k),
    "Q6_K": (Kind.BYTES16_F32, _q6_k),
}

PACKED_TYPES = tuple(_FORMATS)
"""GGUF types with a packed form; all others become float32."""

"""GGUF's blocks to the layout of the native kernels: rows interleaved by sixteen.

A group of sixteen rows is a sequence of blocks of 32 columns: the factors of the sixteen rows, then
the quants, four columns of a row side by side; K formats have a header for every eight blocks.
formats.h has the details. Plain numbers stand column by column. Formats without a packed form of
their own are dequantised to float32.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec import quant
from specdec.ggml_types import block_layout
from specdec.native.memory import WeightMemory

GROUP = 16
"""Rows that are interleaved."""
_CHUNK_BYTES = 1 << 20
"""Bytes of a tensor that are packed at a time, so that temporaries stay small."""


class Kind(enum.IntEnum):
    """How a matrix is stored; the numbers are those of ``Kind`` in matmul.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    IQ4_NL = 11
    Q2_K = 12
    Q3_K = 13
    IQ4_XS = 14


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [rows, cols] as the kernels read it."""

    kind: Kind
    rows: int
    cols: int
    data: Tensor
    """[groups, bytes of a group] uint8; rows beyond the last are zeros."""


class Parts(NamedTuple):
    """The blocks of some rows, taken apart: N blocks of S sub-blocks of 32 columns."""

    header: tuple[Tensor, ...]
    """What the sub-blocks share, [N] or [N, K] of their own type each."""
    factors: tuple[Tensor, ...]
    """Factors of every sub-block, [N, S] of their own type each."""
    quants: Tensor
    """[N, S, W] int32: the bytes of a row's sub-block, four columns in every word."""


Splitter = Callable[[Tensor], Parts]
"""Takes blocks [N, type size] uint8 apart."""


def pack(
    raw: Tensor, ggml_type: str, cols: int, memory: WeightMemory | None = None
) -> PackedMatrix:
    """The packed form of the rows ``raw`` [rows, bytes of a row] uint8 of a GGUF tensor.

    Every value stays what `quant.dequantize` would give, up to one rounding of scale times quant.
    ``memory`` is where it is to lie; by default in some of its own.
    """

    def read(start: int, end: int) -> Tensor:
        return raw[start:end]

    return pack_rows(read, ggml_type, (raw.shape[0], cols), memory or WeightMemory())


def pack_rows(
    read: Callable[[int, int], Tensor], ggml_type: str, shape: tuple[int, int], memory: WeightMemory
) -> PackedMatrix:
    """`pack` for a matrix of ``shape`` (rows, cols), asking for some rows at a time.

    ``read`` gives rows start ... end - 1 of the file's bytes, so that nobody holds all of them.
    """
    rows, cols = shape
    kind = Kind[ggml_type] if ggml_type in PACKED_TYPES else Kind.F32
    split = _SPLITTERS.get(ggml_type)
    layout = block_layout(ggml_type)
    step = max(1, _CHUNK_BYTES // (cols // layout.block_size * layout.type_size * GROUP)) * GROUP
    packed, place = torch.empty(0, 0), 0
    for start in range(0, max(rows, 1), step):
        part = read(start, min(start + step, rows))
        if ggml_type not in PACKED_TYPES:
            values = quant.dequantize(part.numpy(), ggml_type, (part.shape[0], cols))
            part = values.float().view(torch.uint8)
        if missing := -part.shape[0] % GROUP:
            part = torch.nn.functional.pad(part, (0, 0, 0, missing))
        if split is None:
            groups = _interleave(part, cols)
        else:
            groups = _pack_blocks(part, layout.type_size, split)
        if not start:
            size = -(-rows // GROUP), groups.shape[1]
            packed = memory.take(math.prod(size)).view(size)
        packed[place : place + len(groups)] = groups
        place += len(groups)
    return PackedMatrix(kind, rows, cols, packed)


def _pack_blocks(raw: Tensor, type_size: int, split: Splitter) -> Tensor:
    """Whole groups of rows of a block format, [rows, bytes] to [groups, bytes]."""
    parts = split(raw.reshape(-1, type_size))
    n_sub = parts.quants.shape[1]
    header = [factor.view(len(factor), 1, -1) for factor in parts.header]
    blocks = [*(factor[:, :, None] for factor in parts.factors), parts.quants]
    n_header, n_block = (sum(map(_bytes_of, pieces)) for pieces in (header, blocks))
    n_groups = raw.shape[0] // GROUP
    n_blocks = parts.quants.shape[0] // raw.shape[0]
    out = torch.empty(n_groups, n_blocks, n_header + n_sub * n_block, dtype=torch.uint8)
    _place(header, out[..., None, :n_header])
    _place(blocks, torch.unflatten(out[..., n_header:], -1, (n_sub, n_block)))
    return out.flatten(1)


def _bytes_of(piece: Tensor) -> int:
    """Bytes of a sub-block of sixteen rows in a piece [N, S, K]."""
    return piece.shape[-1] * piece.element_size() * GROUP


def _place(pieces: list[Tensor], out: Tensor) -> None:
    """Fills ``out`` [groups, N, S, bytes] with the pieces [rows * N, S, K], rows interleaved."""
    start = 0
    for piece in pieces:
        end = start + _bytes_of(piece)
        n_groups, n_blocks, n_sub, _ = out.shape
        elements = piece.reshape(n_groups, GROUP, n_blocks, n_sub, -1).permute(0, 2, 3, 4, 1)
        place = out[..., start:end].view(piece.dtype)
        torch.unflatten(place, -1, (-1, GROUP)).copy_(elements)
        start = end


def _interleave(raw: Tensor, cols: int) -> Tensor:
    """Whole groups of rows of plain numbers, [rows, bytes] to [groups, bytes]."""
    n_groups = raw.shape[0] // GROUP
    return raw.reshape(n_groups, GROUP, cols, -1).permute(0, 2, 1, 3).flatten(1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of every block, [N]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).squeeze(1)


def _words(quants: Tensor) -> Tensor:
    """Bytes [..., W] as words [..., W / 4]."""
    return quants.contiguous().view(torch.int32)


def _five_bits(values: Tensor) -> Tensor:
    """Values [N, S, 32] below 32: a word of fifth bits, then nibbles."""
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = torch.unflatten(values >> 4, -1, (8, 4)) << places
    return torch.cat((_words(high.sum(-2, dtype=torch.uint8)), _nibbles(values)), dim=-1)


def _six_bits(values: Tensor) -> Tensor:
    """Values [N, S, 32] below 64: two words of upper bits, then nibbles."""
    places = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    high = (torch.unflatten(values >> 4, -1, (2, 4, 4)) << places).sum(-2, dtype=torch.uint8)
    return torch.cat((_words(high.flatten(-2)), _nibbles(values)), dim=-1)


def _two_bits(values: Tensor) -> Tensor:
    """The lower two bits of values [N, S, 32]: vector q in bits 2q, 2q + 1 of word q / 4."""
    places = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    fields = torch.unflatten(values & 3, -1, (2, 4, 4)) << places
    return _words(fields.sum(-2, dtype=torch.uint8).flatten(-2))


def _three_bits(values: Tensor) -> Tensor:
    """Values [N, S, 32] below 8: the lower two bits, then a word of third bits."""
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (torch.unflatten(values >> 2, -1, (8, 4)) << places).sum(-2, dtype=torch.uint8)
    return torch.cat((_two_bits(values), _words(high)), dim=-1)


def _nibbles(values: Tensor) -> Tensor:
    """The lower four bits of values [N, S, 32], columns c and c + 16 in a byte."""
    return _words((values[..., :16] & 15) | (values[..., 16:] << 4))


def _q4_0(blocks: Tensor) -> Parts:
    return Parts((), (_half(blocks, 0)[:, None],), _words(blocks[:, None, 2:]))


def _q4_1(blocks: Tensor) -> Parts:
    factors = _half(blocks, 0)[:, None], _half(blocks, 2)[:, None]
    return Parts((), factors, _words(blocks[:, None, 4:]))


def _q5(blocks: Tensor, n_factors: int) -> Parts:
    start = 2 * n_factors
    low = quant.nibbles(blocks[:, start + 4 :]).flatten(1)
    values = low | quant.high_bits(blocks[:, start : start + 4])
    factors = tuple(_half(blocks, 2 * i)[:, None] for i in range(n_factors))
    return Parts((), factors, _five_bits(values.unsqueeze(1)))


def _q5_0(blocks: Tensor) -> Parts:
    return _q5(blocks, 1)


def _q5_1(blocks: Tensor) -> Parts:
    return _q5(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    return Parts((), (_half(blocks, 0)[:, None],), _words(blocks[:, None, 2:] ^ 128))


def _q4_k(blocks: Tensor) -> Parts:
    values = quant.nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1, 2)
    return Parts(_k_header(blocks), (), _nibbles(values))


def _q5_k(blocks: Tensor) -> Parts:
    low = quant.nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
    values = low | (quant.bit_fields(blocks[:, 16:48], 1) << 4)
    return Parts(_k_header(blocks), (), _five_bits(values))


def _k_header(blocks: Tensor) -> tuple[Tensor, ...]:
    scales_and_minima = torch.stack(quant.k_integers(blocks), -1)
    return _half(blocks, 0), _half(blocks, 2), _six_bit_factors(scales_and_minima)


def _six_bit_factors(values: Tensor) -> Tensor:
    """Values [N, 8, 2] below 64, two for every sub-block, in twelve bytes [N, 12]."""
    pairs = values.view(-1, 4, 4)  # four vectors of two sub-blocks each
    low = (pairs[:, 0::2] & 15) | (pairs[:, 1::2] << 4)
    places = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    high = ((pairs >> 4) << places).sum(1, dtype=torch.uint8)
    return torch.cat((low.flatten(1), high), dim=1)


def _q6_k(blocks: Tensor) -> Parts:
    low = quant.nibbles(blocks[:, :128].view(-1, 2, 64)).flatten(1)
    high = quant.bit_fields(blocks[:, 128:192].view(-1, 2, 32), 2).flatten(1)
    scales = torch.unflatten(blocks[:, 192:208], 1, (8, 2))
    values = (low | (high << 4)).view(-1, 8, 32)
    return Parts((_half(blocks, 208),), (scales[..., 0], scales[..., 1]), _six_bits(values))


def _q2_k(blocks: Tensor) -> Parts:
    both = torch.unflatten(blocks[:, :16], 1, (8, 2))
    values = quant.bit_fields(blocks[:, 16:80].view(-1, 2, 32), 2).flatten(1)
    header = _half(blocks, 80), _half(blocks, 82)
    return Parts(header, (both[..., 0], both[..., 1]), _two_bits(values.view(-1, 8, 32)))


def _q3_k(blocks: Tensor) -> Parts:
    scales, values = quant.q3_k_integers(blocks)
    six = _six_bit_factors(torch.unflatten(scales + 32, 1, (8, 2)).view(torch.uint8))
    return Parts((_half(blocks, 108), six), (), _three_bits(values.view(-1, 8, 32)))


def _iq4_xs(blocks: Tensor) -> Parts:
    words = _words(blocks[:, 8:].view(-1, 8, 16))
    return Parts((_half(blocks, 0),), (quant.iq4_xs_scales(blocks),), words)


_SPLITTERS: dict[str, Splitter] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,  # the same bytes, read through a table
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_XS": _iq4_xs,
}

PACKED_TYPES = tuple(kind.name for kind in Kind)
"""GGUF types with a packed form; all others become float32."""

"""GGML tensor types to torch: every block format that can be decoded, as float32.

The formats that models commonly ship in are decoded here with torch; the rare ones go to
`gguf.quants`, the reference. Both ways give the same bits: multiplications and additions are done
in the order of ggml's ``dequantize_row_*`` and never fused. Knows nothing about files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.errors import ModelFileError, UnsupportedError
from specdec.ggml_types import TYPE_NAMES, block_layout

__all__ = ["SUPPORTED", "block_layout", "dequantize"]

# Elements decoded at a time: few enough for small temporaries, and enough that threads seldom wait
# for each other, which is slow when other programs use the cores.
_CHUNK = 1 << 20

# Fills `out` [N, block size] (float32) from `blocks` [N, type size] (uint8).
Decoder = Callable[[Tensor, Tensor], None]

_SCALAR_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Non-linear 4-bit values of IQ4_NL and IQ4_XS (ggml: kvalues_iq4nl).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# E2M1 values times two (ggml: kvalues_mxfp4).
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize(raw: npt.NDArray[np.uint8], ggml_type: str, shape: Sequence[int]) -> Tensor:
    """A new tensor of `shape` (torch order) with the values of `raw`, the bytes as in the file.

    Integer types keep their dtype, everything else becomes float32. Whatever the size, it takes a
    few dozen MB beyond the result at most. Raises `UnsupportedError` for a type that cannot be
    decoded and `ModelFileError` if the bytes do not fit the shape.
    """
    if ggml_type not in SUPPORTED:
        raise UnsupportedError(
            f"tensor type {ggml_type} cannot be decoded; supported: {', '.join(SUPPORTED)}"
        )
    block_size, type_size = block_layout(ggml_type)
    n_elements = math.prod(shape)
    if n_elements * type_size != raw.size * block_size:
        raise ModelFileError(
            f"{ggml_type} tensor of shape {list(shape)}: found {raw.size} bytes, "
            f"expected {n_elements * type_size // block_size}"
        )
    blocks = raw.reshape(-1, type_size)
    if ggml_type in _SCALAR_TYPES:
        return _convert_scalars(blocks, _SCALAR_TYPES[ggml_type]).reshape(tuple(shape))
    decode = _DECODERS.get(ggml_type) or _reference_decoder(ggml_type)
    out = torch.empty(len(blocks), block_size, dtype=torch.float32)
    step = max(1, _CHUNK // block_size)
    for start in range(0, len(blocks), step):
        # The copy makes the bytes aligned and writable: torch wants both, a memory map has neither.
        decode(torch.from_numpy(blocks[start : start + step].copy()), out[start : start + step])
    return out.reshape(tuple(shape))


def _convert_scalars(items: npt.NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """The numbers of `items` [N, item size]: floats as float32, integers in their own dtype."""
    out = torch.empty(len(items), dtype=torch.float32 if dtype.is_floating_point else dtype)
    for start in range(0, len(items), _CHUNK):
        part = torch.from_numpy(items[start : start + _CHUNK].copy())
        out[start : start + _CHUNK] = part.view(dtype).squeeze(1)
    return out


def _reference_decoder(ggml_type: str) -> Decoder:
    """The decoder of the `gguf` package for one of the rare formats."""
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType[ggml_type]

    def decode(blocks: Tensor, out: Tensor) -> None:
        # Scales that are infinite or not a number are the file's business, not a warning's.
        with np.errstate(all="ignore"):
            values: npt.NDArray[Any] = quants.dequantize(blocks.numpy(), number)
        out.copy_(torch.from_numpy(values.reshape(out.shape)))

    return decode


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as float32 [N, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """Low halves, then high halves, of the bytes along the last axis: [..., W] to [..., 2, W]."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def bit_fields(packed: Tensor, width: int) -> Tensor:
    """The 8 / width fields of every byte, lowest first: [..., W] to [..., 8 / width, W]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8).unsqueeze(1)
    return (packed.unsqueeze(-2) >> shifts) & ((1 << width) - 1)


def high_bits(packed: Tensor) -> Tensor:
    """Bit j of the 32-bit little-endian number in every row, times 16: [N, 4] to [N, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).mul_(16).flatten(1)


def _look_up(values: Sequence[int], codes: Tensor) -> Tensor:
    """``values[code]`` as float32, for 4-bit codes of any shape."""
    table = torch.tensor(values, dtype=torch.float32)
    return table.index_select(0, codes.int().flatten()).view(codes.shape)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, 2:]).flatten(1))
    out.sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, 4:]).flatten(1))
    out.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, 6:]).flatten(1).bitwise_or_(high_bits(blocks[:, 2:6])))
    out.sub_(16).mul_(_halves(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(nibbles(blocks[:, 8:]).flatten(1).bitwise_or_(high_bits(blocks[:, 4:8])))
    out.mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_halves(blocks, 0))


def k_integers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the 8 sub-blocks of Q4_K and Q5_K as 6-bit numbers, uint8 [N, 8].

    Twelve bytes hold them: the first four of each kind whole, the other four as a nibble plus two
    bits above the whole ones (ggml: get_scale_min_k4).
    """
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (mixed & 15) | ((first >> 2) & 48)), dim=1)
    mins = torch.cat((second & 63, (mixed >> 4) | ((second >> 2) & 48)), dim=1)
    return scales, mins


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, both float32 [N, 8, 1]."""
    scales, mins = k_integers(blocks)
    return (
        (scales * _halves(blocks, 0)).unsqueeze(2),
        (mins * _halves(blocks, 2)).unsqueeze(2),
    )


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = ((blocks[:, :16] & 15) * _halves(blocks, 80)).unsqueeze(2)
    mins = ((blocks[:, :16] >> 4) * _halves(blocks, 82)).unsqueeze(2)
    out.copy_(bit_fields(blocks[:, 16:80].view(-1, 2, 32), 2).flatten(1))
    out.view(-1, 16, 16).mul_(scales).sub_(mins)


def q3_k_integers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales, int8 [N, 16], and values plus 4, uint8 [N, 256], of Q3_K.

    Two low bits and a high bit per value; 6-bit scales as nibbles and pairs of bits.
    """
    low = bit_fields(blocks[:, 32:96].view(-1, 2, 32), 2).flatten(1)
    high = bit_fields(blocks[:, :32], 1).flatten(1)
    low_scales = nibbles(blocks[:, 96:104]).flatten(1)
    high_scales = bit_fields(blocks[:, 104:108], 2).flatten(1)
    scales = (low_scales | (high_scales * 16)).view(torch.int8) - 32
    return scales, low.bitwise_or_(high.mul_(4))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    scales, values = q3_k_integers(blocks)
    out.copy_(values).sub_(4)
    out.view(-1, 16, 16).mul_((scales * _halves(blocks, 108)).unsqueeze(2))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, mins = k_scales(blocks)
    values = out.view(-1, 8, 32)
    values.copy_(nibbles(blocks[:, 16:].view(-1, 4, 32)).flatten(1, 2))
    values.mul_(scales).sub_(mins)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, mins = k_scales(blocks)
    low = nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
    values = out.view(-1, 8, 32)
    values.copy_(low.bitwise_or_(bit_fields(blocks[:, 16:48], 1).mul_(16)))
    values.mul_(scales).sub_(mins)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = nibbles(blocks[:, :128].view(-1, 2, 64)).flatten(1)
    high = bit_fields(blocks[:, 128:192].view(-1, 2, 32), 2).flatten(1)
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks, 208)
    out.copy_(low.bitwise_or_(high.mul_(16))).sub_(32)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(2))


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    codes = nibbles(blocks[:, 2:]).flatten(1)
    torch.mul(_look_up(IQ4_VALUES, codes), _halves(blocks, 0), out=out)


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Scales of the 8 sub-blocks of IQ4_XS, int8 [N, 8].

    They are nibbles (bytes 4-7) plus two bits (bytes 2-3), minus 32.
    """
    shape = (len(blocks), 8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(shape)
    high = bit_fields(blocks[:, 2:4], 2).transpose(1, 2).reshape(shape)
    return (low | (high * 16)).view(torch.int8) - 32


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    scales = iq4_xs_scales(blocks) * _halves(blocks, 0)
    codes = nibbles(blocks[:, 8:].view(-1, 8, 16)).flatten(2)
    torch.mul(_look_up(IQ4_VALUES, codes), scales.unsqueeze(2), out=out.view(-1, 8, 32))


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    """One exponent byte e per block: the scale is 2 ** (e - 128), half of E8M0's value."""
    scales = torch.from_numpy(np.ldexp(np.float32(1), blocks[:, :1].numpy().astype(int) - 128))
    torch.mul(_look_up(_MXFP4_VALUES, nibbles(blocks[:, 1:]).flatten(1)), scales, out=out)


def _nvfp4(blocks: Tensor, out: Tensor) -> None:
    """Four sub-blocks of 16, each with an unsigned E4M3 scale (half of it; 0x7F counts as 0)."""
    codes = torch.arange(256)
    exponents, mantissas = (codes >> 3) & 15, (codes & 7).double()
    normal = (1 + mantissas / 8) * torch.exp2(exponents.double() - 8)
    table = torch.where(exponents == 0, mantissas * 2.0**-10, normal).float()
    table[0x7F] = 0
    scales = table.index_select(0, blocks[:, :4].int().flatten()).view(-1, 4, 1)
    values = _look_up(_MXFP4_VALUES, nibbles(blocks[:, 4:].view(-1, 4, 8)).flatten(2))
    torch.mul(values, scales, out=out.view(-1, 4, 16))


_DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
_REFERENCE_TYPES = (
    *("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)

SUPPORTED: tuple[str, ...] = tuple(
    name
    for name in TYPE_NAMES.values()
    if name in _SCALAR_TYPES or name in _DECODERS or name in _REFERENCE_TYPES
)

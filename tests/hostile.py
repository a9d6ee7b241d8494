"""GGUF bytes written by hand, for what `gguf.GGUFWriter` would refuse to write."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(content: bytes) -> bytes:
    return u64(len(content)) + content


def entry(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + u32(kind) + payload


def tensor(name: bytes, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCHITECTURE = entry(b"general.architecture", STRING, text(b"tiny"))


def gguf(
    entries: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    n_tensors: int | None = None,
    n_entries: int | None = None,
) -> bytes:
    """A file of these parts, with whatever counts it is told to announce."""
    head = magic + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(entries) if n_entries is None else n_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data if data else head


def with_entry(kind: int, payload: bytes, key: bytes = b"x") -> bytes:
    return gguf([ARCHITECTURE, entry(key, kind, payload)], [tensor(b"t", [4])], bytes(32))


def with_tensors(*tensors: bytes, data: bytes = bytes(64)) -> bytes:
    return gguf(tensors=tensors, data=data)


def nested_arrays(depth: int) -> bytes:
    """The payload of an array of arrays ... of one byte."""
    return b"".join(u32(ARRAY) + u64(1) for _ in range(depth - 1)) + u32(UINT8) + u64(1) + b"\1"


GOOD = with_tensors(tensor(b"t", [4]))

# Odd, but nothing is wrong with them.
HARMLESS = {
    "key_empty": with_entry(UINT32, u32(1), key=b""),
    "key_not_utf8": with_entry(UINT32, u32(1), key=b"\xff\xfe"),
    "bool_7": with_entry(BOOL, b"\7"),
    "array_empty": with_entry(ARRAY, u32(STRING) + u64(0)),
    "array_nested_4": with_entry(ARRAY, nested_arrays(4)),
    "dims_none": with_tensors(tensor(b"t", [])),
    "tensors_none": gguf(),
    "tensor_name_not_utf8": with_tensors(tensor(b"\xff", [4])),
}

# File -> a part of the message it must end in.
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "one_byte": (b"G", "is no GGUF file"),
    "magic_only": (b"GGUF", "truncated or damaged header"),
    "magic_wrong": (gguf(magic=b"GGML"), r"starts with b'GGML', expected b'GGUF'"),
    "version_0": (gguf(version=0), "version 0 is not supported"),
    "version_1": (gguf(version=1), "version 1 is not supported"),
    "version_99": (gguf(version=99), "version 99 is not supported"),
    "big_endian": (gguf(version=3 << 24), "big-endian"),
    "n_tensors_huge": (gguf(n_tensors=2**61), "2305843009213693952 tensors announced"),
    "n_entries_huge": (gguf(n_entries=2**64 - 1), "metadata values announced"),
    "string_huge": (with_entry(STRING, u64(2**63)), "9223372036854775808 bytes expected"),
    "key_huge": (gguf([u64(2**63) + bytes(8)]), "metadata key at offset 24 is longer than 65535"),
    "array_huge": (with_entry(ARRAY, u32(UINT32) + u64(2**62)), "items of metadata key 'x'"),
    "array_1e9": (with_entry(ARRAY, u32(UINT8) + u64(10**9)), "1000000000 items"),
    "strings_1e9": (with_entry(ARRAY, u32(STRING) + u64(10**9)), "1000000000 items"),
    "strings_past_end": (
        with_entry(ARRAY, u32(STRING) + u64(2) + u64(2**64 - 1)),
        "bytes expected",
    ),
    "array_nested_5": (with_entry(ARRAY, nested_arrays(5)), "nested deeper than 4"),
    "array_nested_5000": (with_entry(ARRAY, nested_arrays(5000)), "nested deeper than 4"),
    "value_type_77": (with_entry(77, bytes(8)), "unknown value type 77"),
    "item_type_77": (with_entry(ARRAY, u32(77) + u64(3) + bytes(8)), "unknown value type 77"),
    "key_twice": (gguf([ARCHITECTURE, ARCHITECTURE]), "'general.architecture' occurs twice"),
    "alignment_0": (with_entry(UINT32, u32(0), key=b"general.alignment"), "is 0, expected a power"),
    "alignment_3": (with_entry(UINT32, u32(3), key=b"general.alignment"), "is 3, expected a power"),
    "alignment_text": (with_entry(STRING, text(b"8"), key=b"general.alignment"), "is no integer"),
    "alignment_huge": (with_entry(UINT64, u64(2**63), key=b"general.alignment"), "truncated"),
    "dims_9": (with_tensors(tensor(b"t", [1] * 9)), "has 9 dimensions, expected at most 4"),
    "dims_wrap": (with_tensors(tensor(b"t", [2**32 + 1, 2**32])), "truncated: tensor 't' ends"),
    "dims_zero": (with_tensors(tensor(b"t", [0, 2**63])), "has no elements"),
    "row_of_half_a_block": (with_tensors(tensor(b"t", [16, 2], kind=8)), "divide into Q8_0 blocks"),
    "offset_past_end": (with_tensors(tensor(b"t", [4], offset=1 << 40)), "truncated: tensor 't'"),
    "offset_odd": (with_tensors(tensor(b"t", [4], offset=5)), "offset 5 is no multiple of"),
    "data_short": (with_tensors(tensor(b"t", [4]), data=bytes(3)), "ends at byte 144, the file"),
    "tensor_twice": (
        with_tensors(tensor(b"t", [4]), tensor(b"t", [4], offset=32)),
        "tensor 't' occurs twice",
    ),
    "tensors_overlap": (
        with_tensors(tensor(b"a", [9]), tensor(b"b", [4], offset=32)),
        "tensors 'a' and 'b' overlap",
    ),
    "name_with_line_break": (with_tensors(tensor(b"a\nb", [9], offset=1)), r"'a\\nb'"),
}

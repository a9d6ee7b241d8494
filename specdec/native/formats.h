// Packed block formats: what stands where in a group of sixteen interleaved rows.
//
// A group is a sequence of blocks of 32 columns: factors of the sixteen rows, then the quants as
// vectors of 64 bytes, four columns each. K formats have a header for every eight blocks. A weight is
// scale * (quant - OFFSET) + minimum. specdec/native/packing.py writes this layout.
#pragma once

#include "bytes.h"

namespace specdec {

constexpr int QUADS = 8;  // vectors of four columns in a block

// Columns c (low) and c + 16 (high) share a byte.
struct Nibbles {
  static constexpr int bytes = 256;
  static constexpr bool wide = false;
  static u8x64 at(const uint8_t* quants, int quad) {
    const u8x64 both = load_bytes(quants + quad % 4 * 64);
    return (quad < 4 ? both : shift_right(both, 4)) & 15;
  }
};

// Bits 2q and 2q + 1 of the first two vectors are vectors q and q + 4.
struct TwoBits {
  static constexpr int bytes = 128;
  static constexpr bool wide = false;
  static u8x64 at(const uint8_t* quants, int quad) {
    return shift_right(load_bytes(quants + quad / 4 * 64), 2 * (quad % 4)) & 3;
  }
};

// Two bits, and bit q of the third vector is the third bit of vector q.
struct ThreeBits {
  static constexpr int bytes = TwoBits::bytes + 64;
  static constexpr bool wide = false;
  static u8x64 at(const uint8_t* quants, int quad) {
    const u8x64 bits = load_bytes(quants + TwoBits::bytes);
    const u8x64 high = quad < 2 ? shift_left(bits, 2 - quad) : shift_right(bits, quad - 2);
    return TwoBits::at(quants, quad) | (high & 4);
  }
};

// Bit q of the first vector is the fifth bit of vector q.
struct FiveBits {
  static constexpr int bytes = 64 + Nibbles::bytes;
  static constexpr bool wide = false;
  static u8x64 at(const uint8_t* quants, int quad) {
    const u8x64 bits = load_bytes(quants);
    const u8x64 high = quad < 4 ? shift_left(bits, 4 - quad) : shift_right(bits, quad - 4);
    return Nibbles::at(quants + 64, quad) | (high & 16);
  }
};

// Bits 2q and 2q + 1 of the first two vectors are the upper bits of vectors q and q + 4.
struct SixBits {
  static constexpr int bytes = 128 + Nibbles::bytes;
  static constexpr bool wide = false;
  static u8x64 at(const uint8_t* quants, int quad) {
    const u8x64 bits = load_bytes(quants + quad / 4 * 64);
    const int place = 2 * (quad % 4);
    const u8x64 high = place < 4 ? shift_left(bits, 4 - place) : shift_right(bits, place - 4);
    return Nibbles::at(quants + 128, quad) | (high & 48);
  }
};

struct Bytes {
  static constexpr int bytes = 512;
  static constexpr bool wide = true;
  static u8x64 at(const uint8_t* quants, int quad) { return load_bytes(quants + 64 * quad); }
};

// Nibbles that choose one of sixteen values, kept here with 128 added.
struct Table {
  static constexpr int bytes = Nibbles::bytes;
  static constexpr bool wide = true;
  static u8x64 at(const uint8_t* quants, int quad) {
    static constexpr uint8_t values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                           129, 141, 153, 166, 181, 197, 217, 241};
    return lookup(values, Nibbles::at(quants, quad));
  }
};

struct Factors {
  f32x16 scale[2];  // of each half of the block if they differ
  f32x16 minimum[2];
};

// What blocks share is read as it is; `memory` is none.
template <int SIZE>
struct Header {
  static constexpr int HEADER = SIZE, MEMORY = 1;
  static const uint8_t* open(const uint8_t* header, uint8_t*) { return header; }
};

// Behind SIZE bytes sixteen numbers of six bits for every row, two of each block. They are taken apart
// for all blocks at once: BYTES for every block, the rows' first numbers, then their second ones.
template <int SIZE>
struct SixBitHeader {
  static constexpr int HEADER = SIZE + 192, MEMORY = SIZE + 256, BYTES = 32;
  static const uint8_t* open(const uint8_t* header, uint8_t* memory) {
    std::memcpy(memory, header, SIZE);
    const u8x64 upper = load_bytes(header + SIZE + 128);
    for (int i = 0; i < 2; i++) {
      const u8x64 both = load_bytes(header + SIZE + 64 * i);
      const u8x64 first = i == 0 ? shift_left(upper, 4) : upper;
      const u8x64 second = i == 0 ? shift_left(upper, 2) : shift_right(upper, 2);
      store_bytes(memory + SIZE + 128 * i, (both & 15) | (first & 48));
      store_bytes(memory + SIZE + 128 * i + 64, (shift_right(both, 4) & 15) | (second & 48));
    }
    return memory;
  }
};

// An f16 scale: Q4_0, Q5_0, Q8_0, IQ4_NL.
template <class Q, int O>
struct Scaled : Header<0> {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 1, MINIMA = 0, BLOCKS = 1, FACTORS = 32;
  static Factors factors(const uint8_t*, const uint8_t* block, int64_t) {
    return {{load_f16(block)}, {}};
  }
};

// An f16 scale and an f16 minimum: Q4_1, Q5_1.
template <class Q>
struct ScaledWithMinimum : Header<0> {
  using Quants = Q;
  static constexpr int OFFSET = 0, SCALES = 1, MINIMA = 1, BLOCKS = 1, FACTORS = 64;
  static Factors factors(const uint8_t*, const uint8_t* block, int64_t) {
    return {{load_f16(block)}, {load_f16(block + 32)}};
  }
};

// In the header f16 factors for scales and minima, and both in six bits: Q4_K, Q5_K.
template <class Q>
struct KScaled : SixBitHeader<64> {
  using Quants = Q;
  static constexpr int OFFSET = 0, SCALES = 1, MINIMA = 1, BLOCKS = 8, FACTORS = 0;
  static Factors factors(const uint8_t* header, const uint8_t*, int64_t b) {
    const uint8_t* both = header + 64 + b % BLOCKS * BYTES;
    const f32x16 minimum = load_f16(header + 32) * to_float(load_u8(both + 16));
    return {{load_f16(header) * to_float(load_u8(both))}, {broadcast(0.0f) - minimum}};
  }
};

// Nibbles for scale and minimum of each half, f16 factors of both in the header: Q2_K.
template <class Q>
struct KHalvesScaled : Header<64> {
  using Quants = Q;
  static constexpr int OFFSET = 0, SCALES = 2, MINIMA = 2, BLOCKS = 8, FACTORS = 32;
  static Factors factors(const uint8_t* header, const uint8_t* block, int64_t) {
    const f32x16 scale = load_f16(header), minimum = broadcast(0.0f) - load_f16(header + 32);
    Factors result;
    for (int h = 0; h < 2; h++) {
      const i32x16 both = load_u8(block + 16 * h), upper = shift_right(both, 4);
      result.scale[h] = scale * to_float(both - shift_left(upper, 4));
      result.minimum[h] = minimum * to_float(upper);
    }
    return result;
  }
};

// A signed byte for the scale, its f16 factor in the header: IQ4_XS.
template <class Q, int O>
struct SignedScaled : Header<32> {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 1, MINIMA = 0, BLOCKS = 8, FACTORS = 16;
  static Factors factors(const uint8_t* header, const uint8_t* block, int64_t) {
    return {{load_f16(header) * to_float(load_i8(block))}, {}};
  }
};

// Signed bytes for the scales of both halves, their f16 factor in the header: Q6_K.
template <class Q, int O>
struct SignedHalvesScaled : Header<32> {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 2, MINIMA = 0, BLOCKS = 8, FACTORS = 32;
  static Factors factors(const uint8_t* header, const uint8_t* block, int64_t) {
    const f32x16 factor = load_f16(header);
    return {{factor * to_float(load_i8(block)), factor * to_float(load_i8(block + 16))}, {}};
  }
};

// In the header an f16 factor for the scales of halves, and these in six bits with 32 added: Q3_K.
template <class Q, int O>
struct SixBitHalvesScaled : SixBitHeader<32> {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 2, MINIMA = 0, BLOCKS = 8, FACTORS = 0;
  static Factors factors(const uint8_t* header, const uint8_t*, int64_t b) {
    const uint8_t* both = header + 32 + b % BLOCKS * BYTES;
    const f32x16 factor = load_f16(header), offset = broadcast(32.0f);
    return {{factor * (to_float(load_u8(both)) - offset),
             factor * (to_float(load_u8(both + 16)) - offset)},
            {}};
  }
};

template <class Format>
int64_t group_bytes(int64_t cols) {
  constexpr int block = Format::FACTORS + Format::Quants::bytes;
  return cols / (32 * Format::BLOCKS) * (Format::HEADER + Format::BLOCKS * block);
}

}  // namespace specdec

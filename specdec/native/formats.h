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

// An f16 scale: Q4_0, Q5_0, Q8_0, IQ4_NL.
template <class Q, int O>
struct Scaled {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 1, MINIMA = 0, BLOCKS = 1;
  static constexpr int HEADER = 0, FACTORS = 32;
  static Factors factors(const uint8_t*, const uint8_t* block) { return {{load_f16(block)}, {}}; }
};

// An f16 scale and an f16 minimum: Q4_1, Q5_1.
template <class Q>
struct ScaledWithMinimum {
  using Quants = Q;
  static constexpr int OFFSET = 0, SCALES = 1, MINIMA = 1, BLOCKS = 1;
  static constexpr int HEADER = 0, FACTORS = 64;
  static Factors factors(const uint8_t*, const uint8_t* block) {
    return {{load_f16(block)}, {load_f16(block + 32)}};
  }
};

// Bytes for scale and minimum, f16 factors of both in the header: Q4_K, Q5_K.
template <class Q>
struct KScaled {
  using Quants = Q;
  static constexpr int OFFSET = 0, SCALES = 1, MINIMA = 1, BLOCKS = 8;
  static constexpr int HEADER = 64, FACTORS = 32;
  static Factors factors(const uint8_t* header, const uint8_t* block) {
    const f32x16 minimum = load_f16(header + 32) * to_float(load_u8(block + 16));
    return {{load_f16(header) * to_float(load_u8(block))}, {broadcast(0.0f) - minimum}};
  }
};

// Nibbles for scale and minimum of each half, f16 factors of both in the header: Q2_K.
template <class Q>
struct KHalvesScaled {
  using Quants = Q;
  static constexpr int OFFSET = 0, SCALES = 2, MINIMA = 2, BLOCKS = 8;
  static constexpr int HEADER = 64, FACTORS = 32;
  static Factors factors(const uint8_t* header, const uint8_t* block) {
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
struct SignedScaled {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 1, MINIMA = 0, BLOCKS = 8;
  static constexpr int HEADER = 32, FACTORS = 16;
  static Factors factors(const uint8_t* header, const uint8_t* block) {
    return {{load_f16(header) * to_float(load_i8(block))}, {}};
  }
};

// Signed bytes for the scales of both halves, their f16 factor in the header: Q3_K, Q6_K.
template <class Q, int O>
struct SignedHalvesScaled {
  using Quants = Q;
  static constexpr int OFFSET = O, SCALES = 2, MINIMA = 0, BLOCKS = 8;
  static constexpr int HEADER = 32, FACTORS = 32;
  static Factors factors(const uint8_t* header, const uint8_t* block) {
    const f32x16 factor = load_f16(header);
    return {{factor * to_float(load_i8(block)), factor * to_float(load_i8(block + 16))}, {}};
  }
};

template <class Format>
int64_t group_bytes(int64_t cols) {
  constexpr int block = Format::FACTORS + Format::Quants::bytes;
  return cols / (32 * Format::BLOCKS) * (Format::HEADER + Format::BLOCKS * block);
}

}  // namespace specdec

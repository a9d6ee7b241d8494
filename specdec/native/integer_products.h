// Products with rounded activations.
#pragma once

#include "products.h"

namespace specdec {

// Activations rounded to BYTES bytes: products add up exactly, as integers.
template <class Format, int BYTES>
struct IntegerProducts {
  using Block = QuantisedBlock<BYTES>;
  static constexpr int TILE = MAX_TILE / BYTES;

  template <int T>
  static void add(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                  f32x16* total) {
    const Block* rows[T];
    for (int t = 0; t < T; t++) rows[t] = input.blocks<BYTES>(input.within(t0 + t));
    for_blocks<Format>(group, cols, [&](const uint8_t* header, const uint8_t* block, int64_t b) {
      const Factors factors = Format::factors(header, block, b);
      for (int h = 0; h < Format::SCALES; h++) {
        i32x16 sums[T];
        add_half<T>(block + Format::FACTORS, h, rows, b, sums);
        for (int t = 0; t < T; t++)
          total[t] = total[t] + factors.scale[h] * broadcast(rows[t][b].scale) * to_float(sums[t]);
      }
      for (int h = 0; h < Format::MINIMA; h++)
        for (int t = 0; t < T; t++)
          total[t] = total[t] + factors.minimum[h] * broadcast(sum_of(rows[t][b], h));
    });
  }

  static float sum_of(const Block& x, int h) {
    return Format::MINIMA == 2 ? x.scale * static_cast<float>(x.halves[h]) : x.sum;
  }

  static_assert(!Format::Quants::wide || Format::OFFSET == 128, "see WIDE_IS_SIGNED");

  static int32_t offset(const Block& x, int h) {
    if (WIDE_IS_SIGNED && Format::Quants::wide) return 0;  // the product takes the offset itself
    return -Format::OFFSET * (Format::SCALES == 2 ? x.halves[h] : x.halves[0] + x.halves[1]);
  }

  // The sums of products with both bytes of the activations are taken apart until the end.
  template <int T>
  static void add_half(const uint8_t* quants, int h, const Block* const* rows, int64_t b,
                       i32x16* sums) {
    constexpr int count = QUADS / Format::SCALES;
    i32x16 upper[T];
    for (int t = 0; t < T; t++) {
      sums[t] = broadcast_int(offset(rows[t][b], h));
      upper[t] = broadcast_int(0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const int quad = h * count + i;
      const u8x64 weights = Format::Quants::at(quants, quad);
      for (int t = 0; t < T; t++) {
        const Block& x = rows[t][b];
        if (BYTES == 2) upper[t] = dot_four(upper[t], weights, x.values[0] + 4 * quad);
        sums[t] = dot_four(sums[t], weights, x.values[BYTES - 1] + 4 * quad);
      }
    }
    if (BYTES == 2)
      for (int t = 0; t < T; t++) sums[t] = sums[t] + shift_left(upper[t], 7);
  }

  static i32x16 dot_four(const i32x16& sum, const u8x64& weights, const int8_t* values) {
    int32_t four;
    std::memcpy(&four, values, sizeof four);
    return dot<Format::Quants::wide>(sum, weights, four);
  }

  static int64_t bytes(int64_t cols) { return group_bytes<Format>(cols); }
};

template <int BYTES>
struct IntegerWork {
  const Call& call;

  template <class Format>
  void blocks() const {
    call.run<IntegerProducts<Format, BYTES>>();
  }
  template <class Numbers>
  void plain() const {}  // never rounded: see `multiply`
};

}  // namespace specdec

// The loops around the inner ones: blocks of a group, tiles of rows, groups of a matrix. A row's
// arithmetic is the same for all numbers of rows: products of a block first, then scale and minimum.
//
// Every type of activations is compiled by itself (matmul_*.cpp): compilers need seconds for each.
#pragma once

#include "formats.h"
#include "matmul.h"
#include "numbers.h"

namespace specdec {

constexpr int AHEAD = 4096;  // bytes that are asked for before their turn, into the second cache,
constexpr int SHORTLY = 640;  // and into the first
constexpr int64_t CHUNK = 1 << 18;  // bytes of weights that meet all rows before the next
constexpr int MAX_TILE = LANES == 16 ? 8 : 4;  // rows whose sums fit the registers

// Calls work(header, block, index) for the blocks of a group in order.
template <class Format, class Work>
inline void for_blocks(const uint8_t* group, int64_t cols, const Work& work) {
  constexpr int bytes = Format::FACTORS + Format::Quants::bytes;
  alignas(64) uint8_t memory[Format::MEMORY];
  const uint8_t* header = nullptr;
  for (int64_t b = 0; b < cols / BLOCK; b++) {
    if (Format::HEADER && b % Format::BLOCKS == 0) {
      prefetch<2>(group + AHEAD, Format::HEADER);
      prefetch<3>(group + SHORTLY, Format::HEADER);
      header = Format::open(group, memory), group += Format::HEADER;
    }
    prefetch<2>(group + AHEAD, bytes);
    prefetch<3>(group + SHORTLY, bytes);
    work(header, group, b);
    group += bytes;
  }
}

struct Output {
  float* values;
  int64_t stride;
  const float* bias;
  int64_t rows;
};

// A tile of T rows; of those beyond the last one nothing is kept.
template <class Products, int T>
void multiply_tile(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                   int64_t row, const Output& out) {
  f32x16 total[T];
  for (int t = 0; t < T; t++) total[t] = broadcast(0.0f);
  Products::template add<T>(group, cols, input, t0, total);
  const int64_t count = out.rows - row < GROUP ? out.rows - row : GROUP;
  const f32x16 bias = out.bias ? load_partial(out.bias + row, count) : broadcast(0.0f);
  for (int t = 0; t < T && t0 + t < input.n; t++) {
    float* destination = out.values + (t0 + t) * out.stride + row;
    const f32x16 value = out.bias ? total[t] + bias : total[t];
    if (count == GROUP) store(destination, value);
    else store_partial(destination, value, count);
  }
}

// The next smaller tile: 6, 4, 3, 2, 1. Too many rows for it take T of which some count twice: that is
// cheaper than reading weights again.
constexpr int smaller_tile(int T) { return T == 8 ? 6 : T == 6 ? 4 : T - 1; }

// Groups first ... last - 1 with all rows of the input from t0 on, in tiles of at most T rows: a tile
// stays in the first cache, the groups in the second.
template <class Products, int T>
void multiply_tiles(const Matrix& matrix, const Input& input, int64_t t0, int64_t first,
                    int64_t last, const Output& out) {
  const int64_t bytes = Products::bytes(matrix.cols);
  for (; t0 + smaller_tile(T) < input.n; t0 += T)
    for (int64_t g = first; g < last; g++)
      multiply_tile<Products, T>(matrix.data + g * bytes, matrix.cols, input, t0, g * GROUP, out);
  if constexpr (T > 1) {
    if (t0 < input.n)
      multiply_tiles<Products, smaller_tile(T)>(matrix, input, t0, first, last, out);
  }
}

// A product to be computed: see `multiply`.
struct Call {
  const Matrix& matrix;
  const Input& input;
  int64_t first, last;
  Output out;

  template <class Products>
  void run() const {
    const int64_t bytes = Products::bytes(matrix.cols);
    const int64_t step = bytes < CHUNK ? CHUNK / bytes : 1;
    for (int64_t g = first; g < last; g += step)
      multiply_tiles<Products, Products::TILE>(matrix, input, 0, g,
                                               g + step < last ? g + step : last, out);
  }
};

void multiply_float(const Call& call);  // matrices of plain numbers, too
void multiply_int8(const Call& call);
void multiply_int16(const Call& call);

// Calls work.blocks<Format>() for the format of a matrix, or work.plain<Numbers>().
template <class Work>
void for_kind(int64_t kind, const Work& work) {
  switch (kind) {
    case F32: return work.template plain<F32Numbers>();
    case F16: return work.template plain<F16Numbers>();
    case BF16: return work.template plain<BF16Numbers>();
    case Q4_0: return work.template blocks<Scaled<Nibbles, 8>>();
    case Q4_1: return work.template blocks<ScaledWithMinimum<Nibbles>>();
    case Q5_0: return work.template blocks<Scaled<FiveBits, 16>>();
    case Q5_1: return work.template blocks<ScaledWithMinimum<FiveBits>>();
    case Q8_0: return work.template blocks<Scaled<Bytes, 128>>();
    case Q4_K: return work.template blocks<KScaled<Nibbles>>();
    case Q5_K: return work.template blocks<KScaled<FiveBits>>();
    case Q6_K: return work.template blocks<SignedHalvesScaled<SixBits, 32>>();
    case IQ4_NL: return work.template blocks<Scaled<Table, 128>>();
    case Q2_K: return work.template blocks<KHalvesScaled<TwoBits>>();
    case Q3_K: return work.template blocks<SixBitHalvesScaled<ThreeBits, 4>>();
    case IQ4_XS: return work.template blocks<SignedScaled<Table, 128>>();
  }
}

}  // namespace specdec

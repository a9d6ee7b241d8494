// The input of a product: rows of floats and what is kept of them block by block.
#pragma once

#include <cstdint>

namespace specdec {

constexpr int64_t BLOCK = 32;  // columns

// 32 activations as whole numbers times a scale. In one byte a number is up to 127 in size; in two it
// is 128 * values[0][i] + values[1][i], up to 127 * 128.
template <int BYTES>
struct QuantisedBlock {
  float scale;
  float sum;         // of scale * numbers
  int32_t halves[2];  // sums of the first and of the last sixteen numbers
  int8_t values[BYTES][BLOCK];
};

inline int64_t blocks_of(int64_t cols) { return (cols + BLOCK - 1) / BLOCK; }

// Floats of memory for what is kept of a row: quantised blocks, or the sums of half blocks.
inline int64_t kept_floats(int64_t cols, int64_t bytes) {
  const auto block = bytes == 2   ? sizeof(QuantisedBlock<2>)
                       : bytes == 1 ? sizeof(QuantisedBlock<1>)
                                    : 2 * sizeof(float);
  return blocks_of(cols) * static_cast<int64_t>(block / sizeof(float));
}

// n rows of activations and what is kept of them for quantised matrices; matrices of plain numbers
// read the floats alone.
struct Input {
  const float* values;  // [n, cols]
  int64_t cols;
  int64_t n;
  float* kept;     // [n, kept_floats(cols, bytes)]
  int64_t bytes;   // that an activation is rounded to, 1 or 2; 0 = it stays a float
  const int32_t* index = nullptr;  // [n] which rows of the memory these are; null: the first ones

  int64_t place(int64_t t) const { return index ? index[t] : t; }
  int64_t within(int64_t t) const { return t < n ? t : n - 1; }
  const float* row(int64_t t) const { return values + place(t) * cols; }
  float* kept_row(int64_t t) const { return kept + place(t) * kept_floats(cols, bytes); }
  const float* sums(int64_t t) const { return kept_row(t); }
  template <int BYTES>
  QuantisedBlock<BYTES>* blocks(int64_t t) const {
    return reinterpret_cast<QuantisedBlock<BYTES>*>(kept_row(t));
  }

  // Blocks first ... last - 1 of all rows' blocks; every one is to be prepared before products.
  void prepare(int64_t first, int64_t last) const;
};

}  // namespace specdec

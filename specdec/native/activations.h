// The input of a product: rows of floats and what is kept of them block by block.
#pragma once

#include <cstdint>

namespace specdec {

constexpr int64_t BLOCK = 32;  // columns

// 32 activations in eight bits: scale * values[i], the scale being the largest one / 127.
struct QuantisedBlock {
  float scale;
  float sum;         // of scale * values[i]
  int32_t halves[2];  // sums of the first and of the last sixteen values
  int8_t values[BLOCK];
};

inline int64_t blocks_of(int64_t cols) { return (cols + BLOCK - 1) / BLOCK; }

// Floats of memory for what is kept of a row: quantised blocks, or the sums of blocks.
inline int64_t kept_floats(int64_t cols, bool quantises) {
  return blocks_of(cols) * (quantises ? sizeof(QuantisedBlock) / sizeof(float) : 1);
}

// n rows of activations and what is kept of them for quantised matrices; matrices of plain numbers
// read the floats alone.
struct Input {
  const float* values;  // [n, cols]
  int64_t cols;
  int64_t n;
  float* kept;     // [n, kept_floats(cols, quantises)]
  bool quantises;  // in eight bits

  const float* row(int64_t t) const { return values + t * cols; }
  float* kept_row(int64_t t) const { return kept + t * kept_floats(cols, quantises); }
  const float* sums(int64_t t) const { return kept_row(t); }
  const QuantisedBlock* blocks(int64_t t) const {
    return reinterpret_cast<const QuantisedBlock*>(kept_row(t));
  }

  // Blocks first ... last - 1 of all rows' blocks; every one is to be prepared before products.
  void prepare(int64_t first, int64_t last) const;
};

}  // namespace specdec

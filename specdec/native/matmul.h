// Products of packed weight matrices with float activations.
//
// Rows of a matrix are interleaved by sixteen. A group of sixteen rows is a sequence of blocks of
// 32 (or 16) columns: sixteen scales, sixteen minima if the format has them, then the quants, column
// by column, sixteen rows each. specdec/native/packing.py writes this layout.
#pragma once

#include <cstdint>

namespace specdec {

constexpr int64_t GROUP = 16;      // rows that are interleaved
constexpr int64_t SUM_BLOCK = 32;  // columns whose activations are summed for the minima

// How a block is stored; the numbers are those of `Kind` in packing.py.
enum Kind : int32_t {
  F32 = 0,
  F16 = 1,
  BF16 = 2,
  NIBBLES_CENTRED = 3,   // f16 scale; 4-bit q - 8
  NIBBLES_F16 = 4,       // f16 scale and minimum; 4-bit q
  NIBBLES_F32 = 5,       // f32 scale and minimum; 4-bit q
  BYTES_F16 = 6,         // f16 scale; signed bytes
  BYTES_MIN_F16 = 7,     // f16 scale and minimum; signed bytes
  BYTES_MIN_F32 = 8,     // f32 scale and minimum; signed bytes
  BYTES16_F32 = 9,       // f32 scale; signed bytes in blocks of 16 columns
};

struct Matrix {
  const uint8_t* data;
  const float* bias;  // [rows] or null
  int64_t rows;
  int64_t cols;
  int64_t kind;
};

// Activations of n rows: values [n, stride] and their sums over blocks of 32 columns.
struct Input {
  const float* values;
  int64_t stride;
  const float* sums;  // [n, sums_stride]
  int64_t sums_stride;
  int64_t n;
};

inline int64_t groups(const Matrix& matrix) { return (matrix.rows + GROUP - 1) / GROUP; }
inline int64_t sums_of(int64_t cols) { return (cols + SUM_BLOCK - 1) / SUM_BLOCK; }

// Sums of `cols` values over blocks of SUM_BLOCK columns.
void block_sums(const float* values, int64_t cols, float* sums);

// out[t][row] for all rows of groups first ... last - 1, with the bias; out has `stride` columns.
// Every number is computed in the same order whatever n is.
void multiply(const Matrix& matrix, const Input& input, int64_t first, int64_t last, float* out,
              int64_t stride);

}  // namespace specdec

// Products of packed weight matrices with activations, in float32 or in eight bits.
#pragma once

#include "activations.h"

namespace specdec {

constexpr int64_t GROUP = 16;  // rows that are interleaved

// How a matrix is stored; the numbers are those of `Kind` in packing.py.
enum Kind : int32_t {
  F32 = 0,
  F16 = 1,
  BF16 = 2,
  Q4_0 = 3,
  Q4_1 = 4,
  Q5_0 = 5,
  Q5_1 = 6,
  Q8_0 = 7,
  Q4_K = 8,
  Q5_K = 9,
  Q6_K = 10,
  IQ4_NL = 11,
  Q2_K = 12,
  Q3_K = 13,
  IQ4_XS = 14,
};

struct Matrix {
  const uint8_t* data;
  const float* bias;  // [rows] or null
  int64_t rows;
  int64_t cols;
  int64_t kind;
};

inline int64_t groups(const Matrix& matrix) { return (matrix.rows + GROUP - 1) / GROUP; }

// out[t][row] for all rows of groups first ... last - 1, with the bias; out has `stride` columns.
// Every number is computed in the same order whatever the number of activation rows is.
void multiply(const Matrix& matrix, const Input& input, int64_t first, int64_t last, float* out,
              int64_t stride);

// out [cols] = a row of the matrix, with the bits that dequantising it gives.
void read_row(const Matrix& matrix, int64_t row, float* out);

}  // namespace specdec

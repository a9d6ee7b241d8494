// The dense feed-forward branch, and what it shares with experts.
#pragma once

#include "branch.h"

namespace specdec {

// Inner rows of a feed-forward branch: activation(gate x) * up x, prepared for the product behind it.
struct InnerRows {
  float *gate, *up, *kept;
  int64_t n, n_ff;
  int64_t bytes;  // that an activation is rounded to
  bool uses_gelu;

  InnerRows(int64_t n, int64_t n_ff, const Layer& layer, Scratch& scratch);

  Input input() const { return {gate, n_ff, n, kept, bytes}; }
  // Rows first ... first + count - 1.
  InnerRows part(int64_t first, int64_t count) const;
  // Fills some blocks of 32 columns of all rows from the rows `x`.
  void fill(const Matrix& gate_matrix, const Matrix& up_matrix, const Input& x, Range blocks) const;
};

class FeedForward : public Branch {
 public:
  FeedForward(const Layer& layer, const Pass& pass, const Stream& stream, Scratch& scratch);
  void add_steps(Steps& steps) const override;

 private:
  const Layer& layer_;
  const Input x_;
  const InnerRows inner_;
  float* const out_;
};

}  // namespace specdec

// A gated delta net in steps, in the place of attention (specdec/models/delta_net.py has the formulas).
#pragma once

#include "branch.h"

namespace specdec {

class DeltaNetBranch : public Branch {
 public:
  DeltaNetBranch(const LayerCall& call, const Pass& pass, const Stream& stream, Scratch& scratch);
  void add_steps(Steps& steps) const override;

 private:
  const Layer& layer_;
  const DeltaNet& net_;
  const LayerCall& call_;
  const Pass& pass_;
  const Stream& stream_;
  const int64_t n_heads_;     // of queries, keys and values, side by side
  const int64_t n_channels_;  // columns of them
  const int64_t n_mixed_;     // columns of the values
  float *channels_, *heads_;  // [n, n_channels] as projected; behind the convolution
  float* gate_;               // [n, n_mixed]
  float *decay_, *strength_;  // [n, n_value_heads] as projected, then factors
  float* mixed_;              // [n, n_mixed]

  Input read() const;
  Input mixed() const;
  void project(Range range) const;
  const float* input_row(int64_t t) const;
  void keep_inputs(int64_t t, int64_t head) const;
  void convolve(int64_t t, int64_t head) const;
  void find_factors(int64_t t, int64_t head) const;
  void run_columns(int64_t head, int64_t first, int64_t count) const;
  void finish_head(int64_t t, int64_t head) const;
};

}  // namespace specdec

// The attention branch of a layer in steps: projections, heads, output.
#pragma once

#include "branch.h"

namespace specdec {

class AttentionBranch : public Branch {
 public:
  AttentionBranch(const LayerCall& call, const Pass& pass, const Stream& stream, Scratch& scratch);
  void add_steps(Steps& steps) const override;

  // Keys and values alone, of rows `given` that are what attention reads, prepared for products.
  void add_key_value_steps(Steps& steps, const Input& given) const;

 private:
  const Layer& layer_;
  const LayerCall& call_;
  const Pass& pass_;
  const Stream& stream_;
  int64_t q_width_;                    // columns of a head's queries, and gates
  int64_t n_q_, n_k_, n_v_, n_mixed_;  // columns
  int64_t scores_stride_;
  float *q_, *k_, *v_, *mixed_, *scores_;

  Input read() const;
  Input mixed() const;
  int64_t key_value_groups() const;
  void project_keys_values(const Input& input, Range range) const;
  void write_query(int64_t t, int64_t head) const;
  void write_key_value(int64_t t, int64_t head) const;
  void rotate_row(int64_t t, float* head) const;
  int64_t tiles() const;
  void attend_tile(int64_t head, int64_t t0, int64_t head_blocks, int thread) const;
  void gate_head(int64_t t, int64_t head) const;
};

}  // namespace specdec

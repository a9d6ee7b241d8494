// What follows the last layer of a pass.
#pragma once

#include "branch.h"

namespace specdec {

// From the last rows' hidden states to their logits, and the best of these.
class LogitsPass {
 public:
  // Takes scratch memory that the layers need no more by then.
  LogitsPass(const Pass& pass, Scratch scratch);

  int64_t scratch_size() const { return scratch_.size; }
  void add_steps(Steps& steps) const;

 private:
  static constexpr int64_t BLOCK_LOGITS = 64;  // whose largest one is noted

  const Pass& pass_;
  const Head& head_;
  const int64_t n_blocks_;
  Scratch scratch_;
  float *normed_, *kept_;
  float* maxima_;  // [n_logits, n_blocks] NaN if a logit of the block is not finite

  Input input() const;
  void norm_row(int64_t t) const;
  void multiply_blocks(Range range) const;
  void rank_row(int64_t t) const;
};

}  // namespace specdec

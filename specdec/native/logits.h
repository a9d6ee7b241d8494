// What follows the last layer of a pass.
#pragma once

#include "branch.h"

namespace specdec {

// From the last rows' hidden states to their logits.
class LogitsPass {
 public:
  // Takes scratch memory that the layers need no more by then.
  LogitsPass(const Pass& pass, Scratch scratch);

  int64_t scratch_size() const { return scratch_.size; }
  void add_steps(Steps& steps) const;

 private:
  const Pass& pass_;
  const Head& head_;
  Scratch scratch_;
  float *normed_, *kept_;

  Input input() const;
  void norm_row(int64_t t) const;
  void multiply_groups(Range range) const;
};

}  // namespace specdec

// A feed-forward branch of experts: every row chooses some, rows that chose the same one share a read
// of its weights.
#pragma once

#include "feed_forward.h"

namespace specdec {

class ExpertBranch : public Branch {
 public:
  ExpertBranch(const Layer& layer, const Pass& pass, const Stream& stream, Scratch& scratch);
  void add_steps(Steps& steps) const override;
  void finish_row(int64_t t) const override;

 private:
  const Layer& layer_;
  const Experts& experts_;
  const Input x_;
  const int64_t n_pairs_;  // of a row and an expert that it uses
  float* const addition_;
  float* scores_;    // [n, n_expert], then probabilities
  float* ranks_;     // [n, n_expert] what the choice looks at if that is something else
  float* weights_;   // [n, n_used]
  int32_t* chosen_;  // [n, n_used] the experts of a row
  // Pairs, those of one expert next to each other.
  int32_t* place_;  // [n, n_used] the pair of a row's choice
  int32_t* rows_;   // [pairs] the row of a pair
  int32_t* first_;  // [n_expert + 1] the first pair of an expert
  int32_t* used_;   // [n_expert + 1] the number of experts that rows use, then these experts
  const InnerRows inner_;   // of pairs
  float* const outputs_;    // [pairs, n_embd]
  const InnerRows shared_;  // of the expert that every row uses
  float* const shared_output_;

  void choose(int64_t t) const;
  void sort_pairs() const;
  template <class Work>
  void for_experts(Range items, int64_t items_each, const Work& work) const;
  void fill_inner(int64_t expert, Range blocks) const;
  void fill_outputs(int64_t expert, Range some_groups) const;
};

}  // namespace specdec

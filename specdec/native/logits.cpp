#include "logits.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "norms.h"
#include "vector.h"

namespace specdec {
namespace {

// x = cap * tanh(x / cap), in place.
void soft_cap(float* x, int64_t count, float cap) {
  const f32x16 one = broadcast(1.0f), two = broadcast(2.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t width = count - i < 16 ? count - i : 16;
    const f32x16 doubled = load_partial(x + i, width) * broadcast(2.0f / cap);
    const f32x16 tanh = one - two / (one + exp(doubled));
    store_partial(x + i, tanh * broadcast(cap), width);
  }
}

// The largest of some numbers, or NaN if one of them is not finite.
float largest_of_all(const float* x, int64_t count) {
  f32x16 best = broadcast(-std::numeric_limits<float>::infinity()), zeros = broadcast(0.0f);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const f32x16 part = load(x + i);
    best = max(best, part), zeros = zeros + part * broadcast(0.0f);
  }
  float result = largest(best), zero = sum(zeros);
  for (; i < count; i++) {
    result = x[i] > result ? x[i] : result;
    zero += x[i] * 0.0f;
  }
  return result + zero;
}

// The n-th largest of some numbers, or minus infinity if they are fewer.
float nth_largest(std::vector<float> values, int64_t n) {
  if (static_cast<int64_t>(values.size()) < n) return -std::numeric_limits<float>::infinity();
  std::nth_element(values.begin(), values.begin() + (n - 1), values.end(), std::greater<float>());
  return values[n - 1];
}

}  // namespace

LogitsPass::LogitsPass(const Pass& pass, Scratch scratch)
    : pass_(pass),
      head_(*pass.head),
      n_blocks_((head_.matrix.rows + BLOCK_LOGITS - 1) / BLOCK_LOGITS),
      scratch_(scratch) {
  const int64_t cols = head_.matrix.cols;
  normed_ = scratch_.take(pass.n_logits * cols);
  kept_ = scratch_.take(pass.n_logits * kept_floats(cols, head_.bytes));
  maxima_ = scratch_.take(pass.n_logits * n_blocks_);
}

void LogitsPass::add_steps(Steps& steps) const {
  steps.add(pass_.n_logits, [this](Range range, int) {
    for (int64_t t = range.first; t < range.last; t++) norm_row(t);
  });
  steps.add(n_blocks_, [this](Range range, int) { multiply_blocks(range); });
  steps.add(pass_.n_logits, [this](Range range, int) {
    for (int64_t t = range.first; t < range.last; t++) rank_row(t);
  });
}

Input LogitsPass::input() const {
  return {normed_, head_.matrix.cols, pass_.n_logits, kept_, head_.bytes};
}

void LogitsPass::norm_row(int64_t t) const {
  const int64_t cols = head_.matrix.cols, blocks = blocks_of(cols);
  const float* hidden = pass_.hidden + (pass_.n - pass_.n_logits + t) * cols;
  rms_norm(hidden, head_.norm, cols, head_.eps, normed_ + t * cols);
  input().prepare(t * blocks, (t + 1) * blocks);
}

void LogitsPass::multiply_blocks(Range range) const {
  constexpr int64_t GROUPS = BLOCK_LOGITS / GROUP;
  const int64_t rows = head_.matrix.rows;
  const int64_t last = smallest_of(range.last * GROUPS, groups(head_.matrix));
  multiply(head_.matrix, input(), range.first * GROUPS, last, pass_.logits, rows);
  for (int64_t t = 0; t < pass_.n_logits; t++)
    for (int64_t block = range.first; block < range.last; block++) {
      float* logits = pass_.logits + t * rows + block * BLOCK_LOGITS;
      const int64_t count = smallest_of(BLOCK_LOGITS, rows - block * BLOCK_LOGITS);
      if (head_.softcap != 0.0f) soft_cap(logits, count, head_.softcap);
      maxima_[t * n_blocks_ + block] = largest_of_all(logits, count);
    }
}

// As many blocks as are asked for have a logit of `floor`, so smaller ones are not among the best.
void LogitsPass::rank_row(int64_t t) const {
  const int64_t rows = head_.matrix.rows, n_best = smallest_of(N_BEST, rows);
  const float *logits = pass_.logits + t * rows, *maxima = maxima_ + t * n_blocks_;
  int64_t* ids = pass_.best_ids + t * n_best;
  float zero = 0.0f;
  for (int64_t block = 0; block < n_blocks_; block++) zero += maxima[block] * 0.0f;
  if (zero != 0.0f) {  // NaN
    ids[0] = -1;
    return;
  }
  const float floor = nth_largest({maxima, maxima + n_blocks_}, n_best);
  std::vector<std::pair<float, int64_t>> found;  // logits with their signs changed
  for (int64_t block = 0; block < n_blocks_; block++) {
    if (maxima[block] < floor) continue;
    const int64_t last = smallest_of((block + 1) * BLOCK_LOGITS, rows);
    for (int64_t i = block * BLOCK_LOGITS; i < last; i++)
      if (logits[i] >= floor) found.emplace_back(-logits[i], i);
  }
  std::partial_sort(found.begin(), found.begin() + n_best, found.end());
  for (int64_t i = 0; i < n_best; i++) {
    ids[i] = found[i].second;
    pass_.best[t * n_best + i] = -found[i].first;
  }
}

}  // namespace specdec

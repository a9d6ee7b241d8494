#include "logits.h"

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

}  // namespace

LogitsPass::LogitsPass(const Pass& pass, Scratch scratch)
    : pass_(pass), head_(*pass.head), scratch_(scratch) {
  const int64_t cols = head_.matrix.cols;
  normed_ = scratch_.take(pass.n_logits * cols);
  kept_ = scratch_.take(pass.n_logits * kept_floats(cols, head_.bytes));
}

void LogitsPass::add_steps(Steps& steps) const {
  steps.add(pass_.n_logits, [this](Range range, int) {
    for (int64_t t = range.first; t < range.last; t++) norm_row(t);
  });
  steps.add(groups(head_.matrix), [this](Range range, int) { multiply_groups(range); });
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

void LogitsPass::multiply_groups(Range range) const {
  const int64_t rows = head_.matrix.rows;
  multiply(head_.matrix, input(), range.first, range.last, pass_.logits, rows);
  if (head_.softcap == 0.0f) return;
  const int64_t first = range.first * GROUP, last = smallest_of(range.last * GROUP, rows);
  for (int64_t t = 0; t < pass_.n_logits; t++)
    soft_cap(pass_.logits + t * rows + first, last - first, head_.softcap);
}

}  // namespace specdec

#include "feed_forward.h"

#include "vector.h"

namespace specdec {
namespace {

// gate * activation: SiLU, or GELU in its tanh form; in place in `gate`.
void activate(float* gate, const float* up, int64_t count, bool uses_gelu) {
  const f32x16 one = broadcast(1.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t width = count - i < 16 ? count - i : 16;
    const f32x16 x = load_partial(gate + i, width);
    f32x16 slope = broadcast(0.0f) - x;
    if (uses_gelu) {  // (1 + tanh u) / 2 is the logistic function of 2 u
      const f32x16 cube = broadcast(0.044715f) * x * x * x;
      slope = broadcast(-1.5957691216057308f) * (x + cube);
    }
    const f32x16 value = x / (one + exp(slope)) * load_partial(up + i, width);
    store_partial(gate + i, value, width);
  }
}

}  // namespace

InnerRows::InnerRows(int64_t n, int64_t n_ff, const Layer& layer, Scratch& scratch)
    : n(n), n_ff(n_ff), bytes(layer.quantises), uses_gelu(layer.uses_gelu != 0) {
  gate = scratch.take(n * n_ff), up = scratch.take(n * n_ff);
  kept = scratch.take(n * kept_floats(n_ff, bytes));
}

InnerRows InnerRows::part(int64_t first, int64_t count) const {
  InnerRows rows = *this;
  rows.gate += first * n_ff, rows.up += first * n_ff;
  rows.kept += first * kept_floats(n_ff, bytes);
  rows.n = count;
  return rows;
}

void InnerRows::fill(const Matrix& gate_matrix, const Matrix& up_matrix, const Input& x,
                     Range blocks) const {
  constexpr int64_t step = BLOCK / GROUP;
  const int64_t last_group = smallest_of(blocks.last * step, groups(gate_matrix));
  multiply(gate_matrix, x, blocks.first * step, last_group, gate, n_ff);
  multiply(up_matrix, x, blocks.first * step, last_group, up, n_ff);
  const int64_t first = blocks.first * BLOCK, n_blocks = blocks_of(n_ff);
  const int64_t count = smallest_of(blocks.last * BLOCK, n_ff) - first;
  for (int64_t t = 0; t < n; t++) {
    const int64_t place = t * n_ff + first;
    activate(gate + place, up + place, count, uses_gelu);
    input().prepare(t * n_blocks + blocks.first, t * n_blocks + blocks.last);
  }
}

FeedForward::FeedForward(const Layer& layer, const Pass& pass, const Stream& stream,
                         Scratch& scratch)
    : layer_(layer),
      x_{stream.x, layer.n_embd, pass.n, stream.kept, layer.quantises},
      inner_(pass.n, layer.n_ff, layer, scratch),
      out_(stream.addition) {}

void FeedForward::add_steps(Steps& steps) const {
  steps.add(blocks_of(layer_.n_ff), [this](Range range, int) {
    inner_.fill(layer_.gate, layer_.up, x_, range);
  });
  Product{layer_.down, inner_.input(), out_}.add_step(steps);
}

}  // namespace specdec

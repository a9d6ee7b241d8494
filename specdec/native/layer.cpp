// The functions that Python calls. Every step of a layer is shared out among the threads by rows,
// by heads or by groups of output columns; a number is always computed by one thread, in one order.
#include "layer.h"

#include <cmath>

#include "attention.h"
#include "parallel.h"
#include "vector.h"

namespace specdec {
namespace {

int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Buffers of one pass, carved out of the scratch memory.
struct Buffers {
  float *x, *sums, *q, *k, *v, *mixed, *addition, *middle, *gate, *up, *scores;
  int64_t n_q, n_k, n_v, n_mixed, sums_stride, scores_stride, size;

  Buffers(const Layer& layer, int64_t n, int64_t end, int64_t n_threads, float* memory) {
    n_q = layer.n_head * layer.head_dim;
    n_k = layer.n_head_kv * layer.head_dim;
    n_v = layer.n_head_kv * layer.head_dim_v;
    n_mixed = layer.n_head * layer.head_dim_v;
    sums_stride = sums_of(largest_of(layer.n_embd, largest_of(n_mixed, layer.n_ff)));
    scores_stride = (end + 15) / 16 * 16;
    size = 0;
    const auto take = [&](int64_t count) {
      float* place = memory ? memory + size : nullptr;
      size += (count + 15) / 16 * 16;
      return place;
    };
    x = take(n * layer.n_embd), sums = take(n * sums_stride);
    q = take(n * n_q), k = take(n * n_k), v = take(n * n_v), mixed = take(n * n_mixed);
    addition = take(n * layer.n_embd), middle = take(n * layer.n_embd);
    gate = take(n * layer.n_ff), up = take(n * layer.n_ff);
    scores = take(n_threads * scores_stride);
  }
};

class LayerPass {
 public:
  LayerPass(const Layer& layer, const Pass& pass)
      : layer(layer), pass(pass),
        b(layer, pass.n, pass.start + pass.n, pass.n_threads, pass.scratch) {}

  void run(const Worker& worker) {
    norm_rows(worker, pass.hidden, layer.attn_norm);
    worker.wait();
    const Input x = input(b.x, layer.n_embd);
    multiply_share(worker, layer.q, x, b.q, b.n_q);
    multiply_share(worker, layer.k, x, b.k, b.n_k);
    if (!layer.shares_kv) multiply_share(worker, layer.v, x, b.v, b.n_v);
    worker.wait();
    write_heads(worker);
    worker.wait();
    attend_heads(worker);
    worker.wait();
    sum_rows(worker, b.mixed, b.n_mixed);
    worker.wait();
    multiply_share(worker, layer.output, input(b.mixed, b.n_mixed), b.addition, layer.n_embd);
    worker.wait();
    add_rows(worker, pass.hidden, layer.post_attention_norm, layer.value_scale, 1.0f, b.middle);
    norm_rows(worker, b.middle, layer.ffn_norm);
    worker.wait();
    feed_forward_share(worker, x);
    worker.wait();
    sum_rows(worker, b.gate, layer.n_ff);
    worker.wait();
    multiply_share(worker, layer.down, input(b.gate, layer.n_ff), b.addition, layer.n_embd);
    worker.wait();
    add_rows(worker, b.middle, layer.post_ffw_norm, 1.0f, layer.output_scale, pass.out);
  }

 private:
  const Layer& layer;
  const Pass& pass;
  const Buffers b;

  Input input(const float* values, int64_t cols) const {
    return {values, cols, b.sums, b.sums_stride, pass.n};
  }

  static void multiply_share(const Worker& worker, const Matrix& matrix, const Input& input,
                             float* out, int64_t stride) {
    const Range range = worker.share(groups(matrix));
    multiply(matrix, input, range.first, range.last, out, stride);
  }

  // b.x = normed rows, with their sums.
  void norm_rows(const Worker& worker, const float* rows, const float* weight) const {
    const Range range = worker.share(pass.n);
    for (int64_t t = range.first; t < range.last; t++) {
      float* x = b.x + t * layer.n_embd;
      rms_norm(rows + t * layer.n_embd, weight, layer.n_embd, layer.rms_eps, x);
      block_sums(x, layer.n_embd, b.sums + t * b.sums_stride);
    }
  }

  void sum_rows(const Worker& worker, const float* rows, int64_t cols) const {
    const Range range = worker.share(pass.n);
    for (int64_t t = range.first; t < range.last; t++)
      block_sums(rows + t * cols, cols, b.sums + t * b.sums_stride);
  }

  // Queries are normed, rotated and scaled in place; keys and values go to the cache.
  void write_heads(const Worker& worker) const {
    const int64_t n_heads = layer.n_head + layer.n_head_kv;
    const Range range = worker.share(pass.n * n_heads);
    for (int64_t item = range.first; item < range.last; item++) {
      const int64_t t = item / n_heads, head = item % n_heads;
      head < layer.n_head ? write_query(t, head) : write_key_value(t, head - layer.n_head);
    }
  }

  void write_query(int64_t t, int64_t head) const {
    float* q = b.q + t * b.n_q + head * layer.head_dim;
    if (layer.q_norm) rms_norm(q, layer.q_norm, layer.head_dim, layer.rms_eps, q);
    rotate_row(t, q);
    for (int64_t i = 0; i < layer.head_dim; i++) q[i] *= layer.attention_scale;
  }

  void write_key_value(int64_t t, int64_t head) const {
    const int64_t place = head * pass.capacity + pass.start + t;
    const float* raw = b.k + t * b.n_k + head * layer.head_dim;
    float* value = pass.values + place * layer.head_dim_v;
    if (layer.shares_kv) {
      rms_norm(raw, nullptr, layer.head_dim_v, layer.rms_eps, value);
    } else {
      std::memcpy(value, b.v + t * b.n_v + head * layer.head_dim_v,
                  static_cast<size_t>(layer.head_dim_v) * sizeof(float));
    }
    float* key = pass.keys + place * layer.head_dim;
    std::memcpy(key, raw, static_cast<size_t>(layer.head_dim) * sizeof(float));
    if (layer.k_norm) rms_norm(key, layer.k_norm, layer.head_dim, layer.rms_eps, key);
    rotate_row(t, key);
  }

  void rotate_row(int64_t t, float* head) const {
    const int64_t half = pass.n_rot / 2;
    rotate(head, pass.cos + t * half, pass.sin + t * half, half);
  }

  void attend_heads(const Worker& worker) const {
    float* scores = b.scores + worker.index * b.scores_stride;
    const Range range = worker.share(pass.n * layer.n_head);
    for (int64_t item = range.first; item < range.last; item++) {
      const int64_t t = item / layer.n_head, head = item % layer.n_head;
      attend(layer, pass, t, head, b.q + t * b.n_q + head * layer.head_dim, scores,
             b.mixed + t * b.n_mixed + head * layer.head_dim_v);
    }
  }

  void feed_forward_share(const Worker& worker, const Input& x) const {
    const Range range = worker.share(groups(layer.gate));
    multiply(layer.gate, x, range.first, range.last, b.gate, layer.n_ff);
    multiply(layer.up, x, range.first, range.last, b.up, layer.n_ff);
    const int64_t first = range.first * GROUP;
    const int64_t last = range.last * GROUP < layer.n_ff ? range.last * GROUP : layer.n_ff;
    for (int64_t t = 0; t < pass.n; t++) {
      const int64_t place = t * layer.n_ff + first;
      activate(b.gate + place, b.up + place, last - first, layer.uses_gelu);
    }
  }

  // out = (rows + norm(addition * factor)) * scale
  void add_rows(const Worker& worker, const float* rows, const float* norm, float factor,
                float scale, float* out) const {
    const Range range = worker.share(pass.n);
    for (int64_t t = range.first; t < range.last; t++) {
      float* addition = b.addition + t * layer.n_embd;
      const int64_t place = t * layer.n_embd;
      if (factor != 1.0f)
        for (int64_t i = 0; i < layer.n_embd; i++) addition[i] *= factor;
      if (norm) rms_norm(addition, norm, layer.n_embd, layer.rms_eps, addition);
      for (int64_t i = 0; i < layer.n_embd; i++) out[place + i] = rows[place + i] + addition[i];
      if (scale != 1.0f)
        for (int64_t i = 0; i < layer.n_embd; i++) out[place + i] *= scale;
    }
  }
};

}  // namespace
}  // namespace specdec

using namespace specdec;

extern "C" {

// Sizes of the structures, to be compared with Python's.
int64_t specdec_layer_size() { return sizeof(Layer); }
int64_t specdec_pass_size() { return sizeof(Pass); }

// Floats of scratch memory that a pass of n rows up to position `end` needs.
int64_t specdec_scratch(const Layer* layer, int64_t n, int64_t end, int64_t n_threads) {
  return Buffers(*layer, n, end, n_threads, nullptr).size;
}

void specdec_layer(const Layer* layer, const Pass* pass) {
  LayerPass layer_pass(*layer, *pass);
  run_team(static_cast<int>(pass->n_threads),
           [&](const Worker& worker) { layer_pass.run(worker); });
}

// out [n, rows] = x [n, cols] times the matrix; sums [n, (cols + 31) / 32] is scratch memory.
void specdec_multiply(const Matrix* matrix, const float* x, int64_t n, float* sums, float* out,
                      int64_t n_threads) {
  const int64_t cols = matrix->cols, stride = sums_of(cols);
  run_team(static_cast<int>(n_threads), [&](const Worker& worker) {
    const Range rows = worker.share(n);
    for (int64_t t = rows.first; t < rows.last; t++)
      block_sums(x + t * cols, cols, sums + t * stride);
    worker.wait();
    const Range range = worker.share(groups(*matrix));
    multiply(*matrix, {x, cols, sums, stride, n}, range.first, range.last, out, matrix->rows);
  });
}

void specdec_rms_norm(const float* x, const float* weight, int64_t n, int64_t cols, float eps,
                      float* out) {
  for (int64_t t = 0; t < n; t++) rms_norm(x + t * cols, weight, cols, eps, out + t * cols);
}

// x = cap * tanh(x / cap), in place.
void specdec_softcap(float* x, int64_t count, float cap) {
  const f32x16 one = broadcast(1.0f), two = broadcast(2.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t width = count - i < 16 ? count - i : 16;
    const f32x16 doubled = load_partial(x + i, width) * broadcast(2.0f / cap);
    const f32x16 tanh = one - two / (one + exp(doubled));
    store_partial(x + i, tanh * broadcast(cap), width);
  }
}

}  // extern "C"

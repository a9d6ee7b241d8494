// The functions that Python calls. Every step of a layer is shared out among the threads by rows, by
// heads or by groups of output columns; a number is always computed by one thread, in one order.
#include "layer.h"

#include <cmath>
#include <deque>

#include "attention.h"
#include "parallel.h"
#include "vector.h"

namespace specdec {
namespace {

int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t smallest_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Buffers of one pass, carved out of the scratch memory.
struct Buffers {
  float *x, *kept, *inner_kept, *q, *k, *v, *mixed, *addition, *middle, *gate, *up, *scores;
  int64_t n_q, n_k, n_v, n_mixed, scores_stride, size;

  Buffers(const Layer& layer, const Pass& pass) {
    const int64_t n = pass.n;
    float* const memory = pass.scratch;
    n_q = layer.n_head * layer.head_dim;
    n_k = layer.n_head_kv * layer.head_dim;
    n_v = layer.n_head_kv * layer.head_dim_v;
    n_mixed = layer.n_head * layer.head_dim_v;
    const int64_t widest = largest_of(largest_of(layer.n_embd, layer.k.cols), n_mixed);
    const bool quantises = layer.quantises != 0;
    scores_stride = score_floats(pass.start + n);
    size = 0;
    const auto take = [&](int64_t count) {
      float* place = memory ? memory + size : nullptr;
      size += (count + 15) / 16 * 16;
      return place;
    };
    x = take(n * layer.n_embd), kept = take(n * kept_floats(widest, quantises));
    inner_kept = take(n * kept_floats(layer.n_ff, quantises));
    q = take(n * n_q), k = take(n * n_k), v = take(n * n_v), mixed = take(n * n_mixed);
    addition = take(n * layer.n_embd), middle = take(n * layer.n_embd);
    gate = take(n * layer.n_ff), up = take(n * layer.n_ff);
    scores = take(pass.n_threads * scores_stride);
  }
};

class LayerPass {
 public:
  LayerPass(const LayerCall& call, const Pass& pass)
      : layer(*call.layer), call(call), pass(pass), b(layer, pass) {}

  // The steps of the layer. What comes first, `start_row`, belongs to the last step of the layer
  // before; `next` is the layer behind this one or null.
  void add_steps(Steps& steps, const LayerPass* next) const {
    const int64_t head_blocks = layer.head_dim_v % BLOCK ? 0 : layer.head_dim_v / BLOCK;
    steps.add(projection_groups(), [this](Range range, int) { project(range); });
    steps.add(pass.n * (layer.n_head + layer.n_head_kv), [this](Range range, int) {
      for (int64_t item = range.first; item < range.last; item++) write_head(item);
    });
    steps.add(layer.n_head * tiles(), [this, head_blocks](Range range, int thread) {
      for (int64_t item = range.first; item < range.last; item++)
        attend_tile(item / tiles(), item % tiles() * ATTEND_TILE, head_blocks, thread);
    });
    if (!head_blocks)
      steps.add(pass.n * blocks_of(b.n_mixed),
                [this](Range range, int) { mixed().prepare(range.first, range.last); });
    steps.add(groups(layer.output), [this](Range range, int) {
      multiply(layer.output, mixed(), range.first, range.last, b.addition, layer.n_embd);
    });
    steps.add(pass.n, [this](Range range, int) {
      for (int64_t t = range.first; t < range.last; t++) finish_attention(t);
    });
    steps.add(blocks_of(layer.n_ff), [this](Range range, int) { feed_forward(range); });
    steps.add(groups(layer.down), [this](Range range, int) {
      multiply(layer.down, inner(), range.first, range.last, b.addition, layer.n_embd);
    });
    steps.add(pass.n, [this, next](Range range, int) {
      for (int64_t t = range.first; t < range.last; t++) {
        add_row(t, b.middle, layer.post_ffw_norm, 1.0f, layer.output_scale, pass.hidden);
        if (next) next->start_row(t);
      }
    });
  }

  void start_row(int64_t t) const {
    const int64_t blocks = blocks_of(layer.k.cols);
    if (pass.inputs)
      attended().prepare(t * blocks, (t + 1) * blocks);
    else
      norm_row(t, pass.hidden, layer.attn_norm);
  }

  // Keys and values of rows that are what attention reads; prepare_given() comes first.
  void add_key_value_steps(Steps& steps) const {
    steps.add(groups(layer.k) + (layer.shares_kv ? 0 : groups(layer.v)), [this](Range range, int) {
      project_part(layer.k, given(), range, b.k, b.n_k);
      if (!layer.shares_kv) project_part(layer.v, given(), range, b.v, b.n_v);
    });
    steps.add(pass.n * layer.n_head_kv, [this](Range range, int) {
      for (int64_t item = range.first; item < range.last; item++)
        write_key_value(item / layer.n_head_kv, item % layer.n_head_kv);
    });
  }

  void prepare_given(Range blocks) const { given().prepare(blocks.first, blocks.last); }

 private:
  const Layer& layer;
  const LayerCall& call;
  const Pass& pass;
  const Buffers b;

  Input input(const float* values, int64_t cols, float* kept) const {
    return {values, cols, pass.n, kept, layer.quantises != 0};
  }
  Input given() const { return input(pass.hidden, layer.k.cols, b.kept); }
  Input attended() const {
    return pass.inputs ? input(pass.inputs, layer.k.cols, b.kept) : normed();
  }
  Input normed() const { return input(b.x, layer.n_embd, b.kept); }
  Input mixed() const { return input(b.mixed, b.n_mixed, b.kept); }
  Input inner() const { return input(b.gate, layer.n_ff, b.inner_kept); }

  // Row t of b.x = the normed row, prepared for products.
  void norm_row(int64_t t, const float* rows, const float* weight) const {
    const int64_t place = t * layer.n_embd, blocks = blocks_of(layer.n_embd);
    rms_norm(rows + place, weight, layer.n_embd, layer.rms_eps, b.x + place);
    normed().prepare(t * blocks, (t + 1) * blocks);
  }

  int64_t projection_groups() const {
    return groups(layer.q) + groups(layer.k) + (layer.shares_kv ? 0 : groups(layer.v));
  }

  // Some of the groups of q, k and v, counted through.
  void project(Range range) const {
    project_part(layer.q, attended(), range, b.q, b.n_q);
    project_part(layer.k, attended(), range, b.k, b.n_k);
    if (!layer.shares_kv) project_part(layer.v, attended(), range, b.v, b.n_v);
  }

  // The groups of `range` that are the matrix's; the rest of the range then counts from its end.
  static void project_part(const Matrix& matrix, const Input& input, Range& range, float* out,
                           int64_t stride) {
    const int64_t count = groups(matrix);
    if (range.first < count)
      multiply(matrix, input, range.first, smallest_of(range.last, count), out, stride);
    range.first = largest_of(range.first - count, 0);
    range.last = largest_of(range.last - count, 0);
  }

  // Queries are normed, rotated and scaled in place; keys and values go to the cache.
  void write_head(int64_t item) const {
    const int64_t n_heads = layer.n_head + layer.n_head_kv;
    const int64_t t = item / n_heads, head = item % n_heads;
    head < layer.n_head ? write_query(t, head) : write_key_value(t, head - layer.n_head);
  }

  void write_query(int64_t t, int64_t head) const {
    float* q = b.q + t * b.n_q + head * layer.head_dim;
    if (layer.q_norm) rms_norm(q, layer.q_norm, layer.head_dim, layer.rms_eps, q);
    rotate_row(t, q);
    for (int64_t i = 0; i < layer.head_dim; i++) q[i] *= layer.attention_scale;
  }

  void write_key_value(int64_t t, int64_t head) const {
    float* key = b.k + t * b.n_k + head * layer.head_dim;
    float* value = b.v + t * b.n_v + head * layer.head_dim_v;
    if (layer.shares_kv) rms_norm(key, nullptr, layer.head_dim_v, layer.rms_eps, value);
    if (layer.k_norm) rms_norm(key, layer.k_norm, layer.head_dim, layer.rms_eps, key);
    rotate_row(t, key);
    write_cache(call, head, pass.start + t, key, value);
  }

  void rotate_row(int64_t t, float* head) const {
    const int64_t half = call.n_rot / 2;
    rotate(head, call.cos + t * half, call.sin + t * half, half);
  }

  // Tiles of rows that attend together.
  int64_t tiles() const { return (pass.n + ATTEND_TILE - 1) / ATTEND_TILE; }

  // Rows t0 ... of one head, prepared for products if a head is a number of whole blocks.
  void attend_tile(int64_t head, int64_t t0, int64_t head_blocks, int thread) const {
    Query queries[ATTEND_TILE];
    const int64_t count = smallest_of(pass.n - t0, ATTEND_TILE);
    for (int64_t i = 0; i < count; i++) {
      const int64_t t = t0 + i, own_end = pass.start + t + 1;
      queries[i] = {b.q + t * b.n_q + head * layer.head_dim,
                    layer.window ? largest_of(own_end - layer.window, 0) : 0,
                    pass.sees_block ? pass.start + pass.n : own_end,
                    b.mixed + t * b.n_mixed + head * layer.head_dim_v};
    }
    attend(call, head, queries, count, b.scores + thread * b.scores_stride);
    for (int64_t i = 0; i < count; i++) {
      const int64_t block = ((t0 + i) * layer.n_head + head) * head_blocks;
      mixed().prepare(block, block + head_blocks);
    }
  }

  void finish_attention(int64_t t) const {
    add_row(t, pass.hidden, layer.post_attention_norm, layer.value_scale, 1.0f, b.middle);
    norm_row(t, b.middle, layer.ffn_norm);
  }

  // Some blocks of 32 columns of the inner state, for all rows, prepared for products.
  void feed_forward(Range range) const {
    constexpr int64_t step = BLOCK / GROUP;
    const int64_t last_group = smallest_of(range.last * step, groups(layer.gate));
    multiply(layer.gate, normed(), range.first * step, last_group, b.gate, layer.n_ff);
    multiply(layer.up, normed(), range.first * step, last_group, b.up, layer.n_ff);
    const int64_t first = range.first * BLOCK, blocks = blocks_of(layer.n_ff);
    const int64_t count = smallest_of(range.last * BLOCK, layer.n_ff) - first;
    for (int64_t t = 0; t < pass.n; t++) {
      const int64_t place = t * layer.n_ff + first;
      activate(b.gate + place, b.up + place, count, layer.uses_gelu);
      inner().prepare(t * blocks + range.first, t * blocks + range.last);
    }
  }

  // out = (rows + norm(addition * factor)) * scale, for row t
  void add_row(int64_t t, const float* rows, const float* norm, float factor, float scale,
               float* out) const {
    float* addition = b.addition + t * layer.n_embd;
    const int64_t place = t * layer.n_embd;
    if (factor != 1.0f)
      for (int64_t i = 0; i < layer.n_embd; i++) addition[i] *= factor;
    if (norm) rms_norm(addition, norm, layer.n_embd, layer.rms_eps, addition);
    for (int64_t i = 0; i < layer.n_embd; i++) out[place + i] = rows[place + i] + addition[i];
    if (scale != 1.0f)
      for (int64_t i = 0; i < layer.n_embd; i++) out[place + i] *= scale;
  }
};

}  // namespace
}  // namespace specdec

using namespace specdec;

extern "C" {

// Sizes of the structures, to be compared with Python's.
int64_t specdec_layer_size() { return sizeof(Layer); }
int64_t specdec_call_size() { return sizeof(LayerCall); }
int64_t specdec_pass_size() { return sizeof(Pass); }

// Floats of scratch memory that a pass needs; its own scratch is null.
int64_t specdec_scratch(const Pass* pass) {
  int64_t size = 0;
  for (int64_t i = 0; i < pass->n_layers; i++)
    size = largest_of(size, Buffers(*pass->calls[i].layer, *pass).size);
  return size;
}

// The layers one after the other.
void specdec_layers(const Pass* pass) {
  std::deque<LayerPass> layers;
  for (int64_t i = 0; i < pass->n_layers; i++) layers.emplace_back(pass->calls[i], *pass);
  Steps steps(static_cast<int>(pass->n_threads));
  steps.add(pass->n, [&](Range range, int) {
    for (int64_t t = range.first; t < range.last; t++) layers[0].start_row(t);
  });
  for (size_t i = 0; i < layers.size(); i++)
    layers[i].add_steps(steps, i + 1 < layers.size() ? &layers[i + 1] : nullptr);
  run_steps(std::move(steps));
}

// Keys and values of every layer from the same rows, which stay as they are. All layers have the same
// width, so what is kept of the rows lies at one place for all of them.
void specdec_keys_values(const Pass* pass) {
  std::deque<LayerPass> layers;
  for (int64_t i = 0; i < pass->n_layers; i++) layers.emplace_back(pass->calls[i], *pass);
  Steps steps(static_cast<int>(pass->n_threads));
  steps.add(pass->n * blocks_of(pass->calls[0].layer->k.cols),
            [&](Range range, int) { layers[0].prepare_given(range); });
  for (const LayerPass& layer : layers) layer.add_key_value_steps(steps);
  run_steps(std::move(steps));
}

// out [n, rows] = x [n, cols] times the matrix; kept [n, kept_floats(cols)] is scratch memory.
void specdec_multiply(const Matrix* matrix, const float* x, int64_t n, int64_t bytes, float* kept,
                      float* out, int64_t n_threads) {
  const Input input{x, matrix->cols, n, kept, bytes};
  Steps steps(static_cast<int>(n_threads));
  steps.add(n * blocks_of(input.cols),
            [&](Range range, int) { input.prepare(range.first, range.last); });
  steps.add(groups(*matrix), [&](Range range, int) {
    multiply(*matrix, input, range.first, range.last, out, matrix->rows);
  });
  run_steps(std::move(steps));
}

// Floats of memory for what specdec_multiply keeps of a row.
int64_t specdec_kept(int64_t cols, int64_t bytes) { return kept_floats(cols, bytes); }

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

#include "attention_branch.h"

#include "attention.h"
#include "norms.h"
#include "vector.h"

namespace specdec {

AttentionBranch::AttentionBranch(const LayerCall& call, const Pass& pass, const Stream& stream,
                                 Scratch& scratch)
    : layer_(*call.layer), call_(call), pass_(pass), stream_(stream) {
  const int64_t n = pass.n;
  q_width_ = layer_.gates_output ? 2 * layer_.head_dim : layer_.head_dim;
  n_q_ = layer_.n_head * q_width_;
  n_k_ = layer_.n_head_kv * layer_.head_dim;
  n_v_ = layer_.n_head_kv * layer_.head_dim_v;
  n_mixed_ = layer_.n_head * layer_.head_dim_v;
  scores_stride_ = score_floats(pass.start + n);
  q_ = scratch.take(n * n_q_), k_ = scratch.take(n * n_k_), v_ = scratch.take(n * n_v_);
  mixed_ = scratch.take(n * n_mixed_);
  scores_ = scratch.take(pass.n_threads * scores_stride_);
}

void AttentionBranch::add_steps(Steps& steps) const {
  const int64_t n_heads = layer_.n_head + layer_.n_head_kv;
  const int64_t head_blocks = layer_.head_dim_v % BLOCK ? 0 : layer_.head_dim_v / BLOCK;
  steps.add(groups(layer_.q) + key_value_groups(), [this](Range range, int) {
    Product{layer_.q, read(), q_}.run(take_items(range, groups(layer_.q)));
    project_keys_values(read(), range);
  });
  steps.add(pass_.n * n_heads, [this, n_heads](Range range, int) {
    for (int64_t item = range.first; item < range.last; item++) {
      const int64_t t = item / n_heads, head = item % n_heads;
      head < layer_.n_head ? write_query(t, head) : write_key_value(t, head - layer_.n_head);
    }
  });
  steps.add(layer_.n_head * tiles(), [this, head_blocks](Range range, int thread) {
    for (int64_t item = range.first; item < range.last; item++)
      attend_tile(item / tiles(), item % tiles() * ATTEND_TILE, head_blocks, thread);
  });
  if (!head_blocks)
    steps.add(pass_.n * blocks_of(n_mixed_),
              [this](Range range, int) { mixed().prepare(range.first, range.last); });
  Product{layer_.output, mixed(), stream_.addition}.add_step(steps);
}

void AttentionBranch::add_key_value_steps(Steps& steps, const Input& given) const {
  steps.add(key_value_groups(),
            [this, given](Range range, int) { project_keys_values(given, range); });
  steps.add(pass_.n * layer_.n_head_kv, [this](Range range, int) {
    for (int64_t item = range.first; item < range.last; item++)
      write_key_value(item / layer_.n_head_kv, item % layer_.n_head_kv);
  });
}

// What queries, keys and values are made of.
Input AttentionBranch::read() const {
  const float* rows = pass_.inputs ? pass_.inputs : stream_.x;
  return {rows, layer_.k.cols, pass_.n, stream_.kept, layer_.quantises};
}

Input AttentionBranch::mixed() const {
  return {mixed_, n_mixed_, pass_.n, stream_.kept, layer_.quantises};
}

int64_t AttentionBranch::key_value_groups() const {
  return groups(layer_.k) + (layer_.shares_kv ? 0 : groups(layer_.v));
}

// Some of the groups of k and v, counted through.
void AttentionBranch::project_keys_values(const Input& input, Range range) const {
  Product{layer_.k, input, k_}.run(take_items(range, groups(layer_.k)));
  if (!layer_.shares_kv) Product{layer_.v, input, v_}.run(range);
}

// Queries are normed, rotated and scaled in place; keys and values go to the cache.
void AttentionBranch::write_query(int64_t t, int64_t head) const {
  float* q = q_ + t * n_q_ + head * q_width_;
  if (layer_.q_norm) rms_norm(q, layer_.q_norm, layer_.head_dim, layer_.rms_eps, q);
  rotate_row(t, q);
  for (int64_t i = 0; i < layer_.head_dim; i++) q[i] *= layer_.attention_scale;
}

void AttentionBranch::write_key_value(int64_t t, int64_t head) const {
  float* key = k_ + t * n_k_ + head * layer_.head_dim;
  float* value = v_ + t * n_v_ + head * layer_.head_dim_v;
  if (layer_.shares_kv || layer_.has_value_norm)
    rms_norm(layer_.shares_kv ? key : value, nullptr, layer_.head_dim_v, layer_.rms_eps, value);
  if (layer_.k_norm) rms_norm(key, layer_.k_norm, layer_.head_dim, layer_.rms_eps, key);
  rotate_row(t, key);
  write_cache(call_, head, pass_.start + t, key, value);
}

void AttentionBranch::rotate_row(int64_t t, float* head) const {
  const int64_t half = call_.n_rot / 2, place = (pass_.rotary_start + t) * half;
  rotate(head, call_.cos + place, call_.sin + place, half);
}

// Tiles of rows that attend together.
int64_t AttentionBranch::tiles() const { return (pass_.n + ATTEND_TILE - 1) / ATTEND_TILE; }

// Rows t0 ... of one head, prepared for products if a head is a number of whole blocks.
void AttentionBranch::attend_tile(int64_t head, int64_t t0, int64_t head_blocks,
                                  int thread) const {
  Query queries[ATTEND_TILE] = {};
  const int64_t count = smallest_of(pass_.n - t0, ATTEND_TILE);
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = t0 + i, own_end = pass_.start + t + 1;
    queries[i] = {q_ + t * n_q_ + head * q_width_,
                  layer_.window ? largest_of(own_end - layer_.window, 0) : 0,
                  pass_.sees_block ? pass_.start + pass_.n : own_end,
                  mixed_ + t * n_mixed_ + head * layer_.head_dim_v};
  }
  attend(call_, head, queries, count, scores_ + thread * scores_stride_);
  for (int64_t i = 0; i < count; i++) {
    if (layer_.gates_output) gate_head(t0 + i, head);
    const int64_t block = ((t0 + i) * layer_.n_head + head) * head_blocks;
    mixed().prepare(block, block + head_blocks);
  }
}

// The head's part of the attention's output times the logistic function of its gates, which are as
// many as its queries.
void AttentionBranch::gate_head(int64_t t, int64_t head) const {
  const float* gate = q_ + t * n_q_ + head * q_width_ + layer_.head_dim;
  float* mixed = mixed_ + t * n_mixed_ + head * layer_.head_dim_v;
  for (int64_t i = 0; i < layer_.head_dim_v; i += 16) {
    const int64_t width = smallest_of(layer_.head_dim_v - i, 16);
    const f32x16 factor = logistic(load_partial(gate + i, width));
    store_partial(mixed + i, load_partial(mixed + i, width) * factor, width);
  }
}

}  // namespace specdec

// Every head's memory is a matrix, keys by values, whose columns never meet: pieces of columns go
// through the rows of a pass one by one, in parallel to each other.
#include "delta_net.h"

#include <cmath>
#include <cstring>

#include "norms.h"
#include "vector.h"

namespace specdec {
namespace {

constexpr int64_t COLUMNS = 64;  // of a memory that are one item of work

float logistic_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x / max(|x|, eps) * factor, in place.
void make_unit(float* x, int64_t count, float eps, float factor) {
  f32x16 total = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 part = load_partial(x + i, smallest_of(count - i, 16));
    total = fma(part, part, total);
  }
  const float length = std::sqrt(sum(total));
  const float divisor = length < eps ? eps : length;
  for (int64_t i = 0; i < count; i++) x[i] = x[i] / divisor * factor;
}

// What one row does to the memory [size, size] of one head.
struct DeltaRow {
  const float *q, *k, *value;
  float decay, strength;
  int64_t size;
};

// 16 * V columns of a memory, or fewer if V is 1: `to` becomes the memory behind the row, `out` what its
// query reads there. `to` may be `from`.
template <int V>
void run_row(const DeltaRow& row, const float* from, float* to, int64_t columns, float* out) {
  const auto read = [columns](const float* source) {
    return V == 1 ? load_partial(source, columns) : load(source);
  };
  const auto write = [columns](float* destination, const f32x16& value) {
    V == 1 ? store_partial(destination, value, columns) : store(destination, value);
  };
  const f32x16 decay = broadcast(row.decay);
  f32x16 held[V], error[V], result[V];
  for (int v = 0; v < V; v++) held[v] = result[v] = broadcast(0.0f);
  for (int64_t i = 0; i < row.size; i++) {
    const f32x16 key = broadcast(row.k[i]);
    for (int v = 0; v < V; v++)
      held[v] = fma(key, decay * read(from + i * row.size + 16 * v), held[v]);
  }
  for (int v = 0; v < V; v++)
    error[v] = (read(row.value + 16 * v) - held[v]) * broadcast(row.strength);
  for (int64_t i = 0; i < row.size; i++) {
    const f32x16 key = broadcast(row.k[i]), query = broadcast(row.q[i]);
    for (int v = 0; v < V; v++) {
      const int64_t place = i * row.size + 16 * v;
      const f32x16 memory = fma(key, error[v], decay * read(from + place));
      write(to + place, memory);
      result[v] = fma(query, memory, result[v]);
    }
  }
  for (int v = 0; v < V; v++) write(out + 16 * v, result[v]);
}

}  // namespace

DeltaNetBranch::DeltaNetBranch(const LayerCall& call, const Pass& pass, const Stream& stream,
                               Scratch& scratch)
    : layer_(*call.layer),
      net_(*layer_.delta_net),
      call_(call),
      pass_(pass),
      stream_(stream),
      n_heads_(2 * net_.n_key_heads + net_.n_value_heads),
      n_channels_(n_heads_ * net_.state_size),
      n_mixed_(net_.n_value_heads * net_.state_size) {
  const int64_t n = pass.n;
  channels_ = scratch.take(n * n_channels_), heads_ = scratch.take(n * n_channels_);
  gate_ = scratch.take(n * n_mixed_), mixed_ = scratch.take(n * n_mixed_);
  decay_ = scratch.take(n * net_.n_value_heads), strength_ = scratch.take(n * net_.n_value_heads);
}

void DeltaNetBranch::add_steps(Steps& steps) const {
  const int64_t pieces = (net_.state_size + COLUMNS - 1) / COLUMNS;
  const int64_t head_blocks = net_.state_size % BLOCK ? 0 : net_.state_size / BLOCK;
  steps.add(groups(net_.qkv) + groups(net_.gate) + groups(net_.alpha) + groups(net_.beta),
            [this](Range range, int) { project(range); });
  steps.add(pass_.n * n_heads_, [this](Range range, int) {
    for (int64_t item = range.first; item < range.last; item++) {
      const int64_t t = item / n_heads_, head = item % n_heads_;
      convolve(t, head);
      keep_inputs(t, head);
      if (head < net_.n_value_heads) find_factors(t, head);
    }
  });
  steps.add(net_.n_value_heads * pieces, [this, pieces](Range range, int) {
    for (int64_t item = range.first; item < range.last; item++) {
      const int64_t first = item % pieces * COLUMNS;
      run_columns(item / pieces, first, smallest_of(net_.state_size - first, COLUMNS));
    }
  });
  steps.add(pass_.n * net_.n_value_heads, [this, head_blocks](Range range, int) {
    for (int64_t item = range.first; item < range.last; item++)
      finish_head(item / net_.n_value_heads, item % net_.n_value_heads);
    mixed().prepare(range.first * head_blocks, range.last * head_blocks);
  });
  if (!head_blocks)
    steps.add(pass_.n * blocks_of(n_mixed_),
              [this](Range range, int) { mixed().prepare(range.first, range.last); });
  Product{layer_.output, mixed(), stream_.addition}.add_step(steps);
}

Input DeltaNetBranch::read() const {
  return {stream_.x, layer_.n_embd, pass_.n, stream_.kept, layer_.quantises};
}

Input DeltaNetBranch::mixed() const {
  return {mixed_, n_mixed_, pass_.n, stream_.kept, layer_.quantises};
}

// Some of the groups of all four matrices, counted through.
void DeltaNetBranch::project(Range range) const {
  Product{net_.qkv, read(), channels_}.run(take_items(range, groups(net_.qkv)));
  Product{net_.gate, read(), gate_}.run(take_items(range, groups(net_.gate)));
  Product{net_.alpha, read(), decay_}.run(take_items(range, groups(net_.alpha)));
  Product{net_.beta, read(), strength_}.run(range);
}

// The convolution's input at row t of the pass; negative ones are of the rows before.
const float* DeltaNetBranch::input_row(int64_t t) const {
  return t < 0 ? call_.inputs + (net_.conv_kernel - 1 + t) * n_channels_
               : channels_ + t * n_channels_;
}

// One head's part of the inputs that the convolution needs behind row t. Rows whose inputs nobody asked
// for share memory with the next one, which then writes it.
void DeltaNetBranch::keep_inputs(int64_t t, int64_t head) const {
  if (t + 1 < pass_.n && call_.inputs_behind[t] == call_.inputs_behind[t + 1]) return;
  const int64_t count = net_.conv_kernel - 1, place = head * net_.state_size;
  for (int64_t i = 0; i < count; i++)
    std::memcpy(call_.inputs_behind[t] + i * n_channels_ + place,
                input_row(t + 1 - count + i) + place,
                static_cast<size_t>(net_.state_size) * sizeof(float));
}

// Convolution and SiLU; queries and keys become unit vectors, queries scaled.
void DeltaNetBranch::convolve(int64_t t, int64_t head) const {
  const int64_t size = net_.state_size, place = head * size;
  float* out = heads_ + t * n_channels_ + place;
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t width = smallest_of(size - i, 16);
    f32x16 total = broadcast(0.0f);
    for (int64_t k = 0; k < net_.conv_kernel; k++) {
      const float* input = input_row(t + k + 1 - net_.conv_kernel);
      const f32x16 weight = load_partial(net_.convolution + k * n_channels_ + place + i, width);
      total = fma(load_partial(input + place + i, width), weight, total);
    }
    store_partial(out + i, total * logistic(total), width);
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  if (head < 2 * net_.n_key_heads)
    make_unit(out, size, layer_.rms_eps, head < net_.n_key_heads ? scale : 1.0f);
}

// The factor on the memory and how much of the error is written, of row t and a value head.
void DeltaNetBranch::find_factors(int64_t t, int64_t head) const {
  float& decay = decay_[t * net_.n_value_heads + head];
  float& strength = strength_[t * net_.n_value_heads + head];
  decay = std::exp(net_.a[head] * softplus(decay + net_.dt[head]));
  strength = logistic_of(strength);
}

// Some columns of one head's memory, through all rows.
void DeltaNetBranch::run_columns(int64_t head, int64_t first, int64_t count) const {
  const int64_t size = net_.state_size, n_keys = net_.n_key_heads;
  const int64_t memory = head * size * size + first;
  const float* from = call_.memory + memory;
  for (int64_t t = 0; t < pass_.n; t++) {
    const float* heads = heads_ + t * n_channels_;
    const float* q = heads + head % n_keys * size;
    const float* value = heads + (2 * n_keys + head) * size + first;
    const int64_t place = t * net_.n_value_heads + head;
    const DeltaRow row{q, q + n_keys * size, value, decay_[place], strength_[place], size};
    float* to = call_.memory_behind[t] + memory;
    float* out = mixed_ + t * n_mixed_ + head * size + first;
    if (count == COLUMNS) {
      run_row<COLUMNS / 16>(row, from, to, count, out);
    } else {
      for (int64_t i = 0; i < count; i += 16) {
        DeltaRow part = row;
        part.value += i;
        run_row<1>(part, from + i, to + i, smallest_of(count - i, 16), out + i);
      }
    }
    from = to;
  }
}

// What the query has read, normed and gated.
void DeltaNetBranch::finish_head(int64_t t, int64_t head) const {
  const int64_t size = net_.state_size, place = t * n_mixed_ + head * size;
  float* out = mixed_ + place;
  rms_norm(out, net_.norm, size, layer_.rms_eps, out);
  for (int64_t i = 0; i < size; i += 16) {
    const int64_t width = smallest_of(size - i, 16);
    const f32x16 gate = load_partial(gate_ + place + i, width);
    store_partial(out + i, load_partial(out + i, width) * (gate * logistic(gate)), width);
  }
}

}  // namespace specdec

#include "attention.h"

#include <cmath>

#include "vector.h"

namespace specdec {
namespace {

float dot(const float* a, const float* b, int64_t count) {
  f32x16 total = broadcast(0.0f);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) total = fma(load(a + i), load(b + i), total);
  if (i < count)
    total = fma(load_partial(a + i, count - i), load_partial(b + i, count - i), total);
  return sum(total);
}

// out[j] = q times key j of `count`; four keys share the work of adding up lanes, by the same tree.
void score_keys(const float* q, const float* keys, int64_t width, int64_t count, float* out) {
  int64_t j = 0;
  for (; j + 4 <= count && width >= 16; j += 4) {
    f32x16 total[4];
    for (int k = 0; k < 4; k++) total[k] = broadcast(0.0f);
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
      const f32x16 x = load(q + i);
      for (int k = 0; k < 4; k++) total[k] = fma(x, load(keys + (j + k) * width + i), total[k]);
    }
    if (i < width) {
      const f32x16 x = load_partial(q + i, width - i);
      for (int k = 0; k < 4; k++)
        total[k] = fma(x, load_partial(keys + (j + k) * width + i, width - i), total[k]);
    }
    sum_four(total, out + j);
  }
  for (; j < count; j++) out[j] = dot(q, keys + j * width, width);
}

// Turns scores into e^(score - largest), in place; returns their sum.
float exponentials(float* scores, int64_t count, float largest_score) {
  const f32x16 shift = broadcast(largest_score);
  f32x16 total = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 weights = exp(load(scores + i) - shift);
    store(scores + i, weights);
    total = total + (count - i < 16 ? load_partial(scores + i, count - i) : weights);
  }
  return sum(total);
}

// out[0 ... 16 * N - 1] = factor * sum of weights[j] * values[j].
template <int N>
void mix(const float* weights, const float* values, int64_t stride, int64_t count, float factor,
         float* out) {
  f32x16 even[N], odd[N];  // two chains, so that one need not wait for the other
  for (int i = 0; i < N; i++) even[i] = odd[i] = broadcast(0.0f);
  int64_t j = 0;
  for (; j + 2 <= count; j += 2) {
    const float* row = values + j * stride;
    const f32x16 first = broadcast(weights[j]), second = broadcast(weights[j + 1]);
    for (int i = 0; i < N; i++) {
      even[i] = fma(first, load(row + 16 * i), even[i]);
      odd[i] = fma(second, load(row + stride + 16 * i), odd[i]);
    }
  }
  if (j < count)
    for (int i = 0; i < N; i++)
      even[i] = fma(broadcast(weights[j]), load(values + j * stride + 16 * i), even[i]);
  for (int i = 0; i < N; i++) store(out + 16 * i, (even[i] + odd[i]) * broadcast(factor));
}

void mix_rest(const float* weights, const float* values, int64_t stride, int64_t count,
              float factor, float* out, int64_t width) {
  f32x16 total = broadcast(0.0f);
  for (int64_t j = 0; j < count; j++)
    total = fma(broadcast(weights[j]), load_partial(values + j * stride, width), total);
  store_partial(out, total * broadcast(factor), width);
}

}  // namespace

void rms_norm(const float* x, const float* weight, int64_t cols, float eps, float* out) {
  const float scale = 1.0f / std::sqrt(dot(x, x, cols) / static_cast<float>(cols) + eps);
  for (int64_t i = 0; i < cols; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

void attend(const LayerCall& call, int64_t first, int64_t end, int64_t head, const float* q,
            float* scores, float* out) {
  const Layer& layer = *call.layer;
  const int64_t count = end - first;
  const int64_t kv = head / (layer.n_head / layer.n_head_kv);
  const float* keys = call.keys + (kv * call.capacity + first) * layer.head_dim;
  score_keys(q, keys, layer.head_dim, count, scores);
  float largest_score = layer.sinks ? layer.sinks[head] : scores[0];
  for (int64_t j = 0; j < count; j++)
    largest_score = scores[j] > largest_score ? scores[j] : largest_score;
  for (int64_t j = count; j % 16; j++) scores[j] = largest_score;
  float total = exponentials(scores, count, largest_score);
  if (layer.sinks) total += std::exp(layer.sinks[head] - largest_score);

  const int64_t stride = layer.head_dim_v;
  const float* values = call.values + (kv * call.capacity + first) * stride;
  const float factor = 1.0f / total;
  int64_t i = 0;
  for (; i + 64 <= stride; i += 64) mix<4>(scores, values + i, stride, count, factor, out + i);
  for (; i + 16 <= stride; i += 16) mix<1>(scores, values + i, stride, count, factor, out + i);
  if (i < stride) mix_rest(scores, values + i, stride, count, factor, out + i, stride - i);
}

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

}  // namespace specdec

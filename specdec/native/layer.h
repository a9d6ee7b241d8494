// One block of a dense transformer, as specdec.models.layers.LayerSpec describes it.
//
// The structures are those of specdec/native/library.py, field by field.
#pragma once

#include "matmul.h"

namespace specdec {

struct Layer {
  int64_t n_embd, n_head, n_head_kv, head_dim, head_dim_v, n_ff;
  int64_t window;     // keys a query sees, itself included; 0 = all
  int64_t shares_kv;  // values are the raw keys, normalised without a weight
  int64_t uses_gelu;  // tanh form; otherwise SiLU
  int64_t quantises;  // activations of quantised matrices in eight bits
  float rms_eps, attention_scale, value_scale, output_scale;
  Matrix q, k, v, output, gate, up, down;
  const float *attn_norm, *ffn_norm;
  // Null where the layer has none.
  const float *q_norm, *k_norm, *sinks, *post_attention_norm, *post_ffw_norm;
};

// What a cache keeps.
enum CacheType : int64_t { CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2 };

// A layer in a pass: its cache and its rotary tables.
struct LayerCall {
  const Layer* layer;
  void* keys;           // [n_head_kv, capacity, head_dim] of key_type
  void* values;         // [n_head_kv, capacity, head_dim_v] of value_type
  int64_t capacity;     // rows of the cache's buffers
  int64_t key_type, value_type;
  const float* cos;     // [n, n_rot / 2]
  const float* sin;
  int64_t n_rot;        // rotated dimensions of a head
};

// n rows at positions start ... start + n - 1 through some layers.
struct Pass {
  const LayerCall* calls;
  int64_t n_layers, n, start, n_threads;
  int64_t sees_block;  // rows see the rows behind them, too
  float* hidden;   // [n, n_embd], replaced by the last layer's output
  float* scratch;  // specdec_scratch floats
  const float* inputs;  // [n, columns of q] what attention reads; null: the normed hidden rows
};

}  // namespace specdec

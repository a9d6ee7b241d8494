// One block of a transformer, as specdec.models.layers.LayerSpec describes it, and passes over some.
//
// The structures are those of specdec/native/library.py, field by field.
#pragma once

#include "matmul.h"

namespace specdec {

// One matrix of every expert, all of one shape and kind, one behind the other.
struct ExpertMatrices {
  Matrix first;
  int64_t bytes;  // of one

  Matrix of(int64_t expert) const {
    Matrix matrix = first;
    matrix.data += expert * bytes;
    return matrix;
  }
};

// A routed feed-forward branch, as specdec.models.experts.Routing describes it.
struct Experts {
  int64_t n_expert, n_used;
  int64_t uses_sigmoid;  // otherwise softmax over all experts
  int64_t is_normalised;
  float weight_scale, min_weight_sum;
  Matrix router;      // of plain numbers
  const float* bias;  // [n_expert], for the choice alone; or null
  ExpertMatrices gate, up, down;
  int64_t n_ff_shared;  // width of the expert that every row uses; 0 = none
  Matrix shared_gate, shared_up, shared_down;
};

// What stands in the place of attention in a recurrent layer (specdec.models.delta_net).
struct DeltaNet {
  int64_t n_key_heads, n_value_heads, state_size;
  int64_t conv_kernel;             // rows that the convolution sees
  Matrix qkv, gate, alpha, beta;   // alpha and beta have a row for every value head
  const float* convolution;        // [conv_kernel, columns of qkv]
  const float *dt, *a;             // [n_value_heads]
  const float* norm;               // [state_size]
};

struct Layer {
  int64_t n_embd, n_head, n_head_kv, head_dim, head_dim_v;
  int64_t n_ff;       // of one expert if there are some
  int64_t window;     // keys a query sees, itself included; 0 = all
  int64_t shares_kv;  // values are the raw keys, normalised without a weight
  int64_t has_value_norm;  // values are normalised without a weight
  int64_t gates_output;    // q has queries, then gates of the attention's output, head by head
  int64_t uses_gelu;  // tanh form; otherwise SiLU
  int64_t quantises;  // activations of quantised matrices in eight bits
  float rms_eps, attention_scale, value_scale, output_scale;
  Matrix q, k, v, output, gate, up, down;
  const float *attn_norm, *ffn_norm;
  // Null where the layer has none.
  const float *q_norm, *k_norm, *sinks, *post_attention_norm, *post_ffw_norm;
  const Experts* experts;     // in place of gate, up and down
  const DeltaNet* delta_net;  // in place of q, k and v
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
  const float* cos;     // [..., n_rot / 2], whose rows from `rotary_start` on are those of the pass
  const float* sin;
  int64_t n_rot;        // rotated dimensions of a head
  // Of recurrent layers: the convolution's last inputs [conv_kernel - 1, channels] and the memory
  // [n_value_heads, state_size, state_size] before the pass, and where they go behind each of its rows.
  // Behind rows whose state nobody asked for they go where the next row's do.
  const float *inputs, *memory;
  float *const *inputs_behind, *const *memory_behind;  // [n]
};

// From tokens to hidden states: rows of a table, times a factor.
struct Embedding {
  Matrix table;
  float scale;
};

// From last hidden states to logits: a norm, the output matrix, c * tanh(logits / c).
struct Head {
  Matrix matrix;
  const float* norm;
  int64_t bytes;  // that an activation is rounded to, see Input
  float eps;
  float softcap;  // c; 0 = none
};

constexpr int64_t N_BEST = 64;  // logits of a row that are given in order, too

// n rows at positions start ... start + n - 1 through some layers.
struct Pass {
  const LayerCall* calls;
  int64_t n_layers, n, start, n_threads;
  int64_t sees_block;  // rows see the rows behind them, too
  int64_t rotary_start;
  float* hidden;   // [n, n_embd], replaced by the last layer's output
  float* scratch;  // specdec_scratch floats
  const float* inputs;  // [n, columns of q] what attention reads; null: the normed hidden rows
  const Head* head;
  float* logits;     // [n_logits, rows of the head's matrix] of the last rows
  int64_t n_logits;  // 0 = none are wanted
  // [n_logits, N_BEST] the largest logits, of equal ones those of lower ids first, and their ids; as
  // many as there are. The first id of a row is -1 if one of its logits is not finite.
  int64_t* best_ids;
  float* best;
  int64_t n_taps;
  const int64_t* taps;  // [n_taps] the layer whose rows are wanted as it finds them; n_layers = behind
  float* tapped;        // [n, n_taps, n_embd]
  const Embedding* embedding;  // null: hidden rows are given
  const int64_t* tokens;       // [n]
};

}  // namespace specdec

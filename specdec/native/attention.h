// Rotation, caches and attention. A row's numbers do not depend on the rows beside it.
#pragma once

#include "layer.h"
#include "vector.h"

namespace specdec {

// Rows of a head that attend together, so that keys and values are read once for all of them.
constexpr int ATTEND_TILE = LANES == 16 ? 4 : 1;

// One row of one head: what it asks for, the keys it may see and where the answer goes.
struct Query {
  const float* q;      // [head_dim]
  int64_t first, end;  // keys
  float* out;          // [head_dim_v]
};

// Rotates the first 2 * half dimensions of one head in the rotate-half layout.
void rotate(float* head, const float* cos, const float* sin, int64_t half);

// Writes a key and a value of one head as row `position` of the cache.
void write_cache(const LayerCall& call, int64_t kv_head, int64_t position, const float* key,
                 const float* value);

// Floats of scratch memory for `attend` over `n_keys` keys.
int64_t score_floats(int64_t n_keys);

// Attention of up to ATTEND_TILE rows of one head, at positions that follow each other.
void attend(const LayerCall& call, int64_t head, const Query* queries, int64_t count,
            float* scores);

}  // namespace specdec

// Norms, rotation and attention of single rows: nothing here sees more than one row.
#pragma once

#include "layer.h"

namespace specdec {

// x / rms(x) * weight; without a weight for a null pointer. `out` may be `x`.
void rms_norm(const float* x, const float* weight, int64_t cols, float eps, float* out);

// Rotates the first 2 * half dimensions of one head in the rotate-half layout.
void rotate(float* head, const float* cos, const float* sin, int64_t half);

// Attention of one head over keys first ... end - 1 of the cache, into out [head_dim_v]. `scores` has
// room for as many numbers, rounded up to sixteen.
void attend(const LayerCall& call, int64_t first, int64_t end, int64_t head, const float* q,
            float* scores, float* out);

// gate * activation: SiLU, or GELU in its tanh form; in place in `gate`.
void activate(float* gate, const float* up, int64_t count, bool uses_gelu);

}  // namespace specdec

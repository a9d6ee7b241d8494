#include "norms.h"

#include <cmath>

#include "vector.h"

namespace specdec {

void rms_norm(const float* x, const float* weight, int64_t cols, float eps, float* out) {
  f32x16 squares = broadcast(0.0f);
  for (int64_t i = 0; i < cols; i += 16) {
    const f32x16 values = load_partial(x + i, cols - i);
    squares = fma(values, values, squares);
  }
  const float mean = sum(squares) / static_cast<float>(cols);
  const float scale = 1.0f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < cols; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

}  // namespace specdec

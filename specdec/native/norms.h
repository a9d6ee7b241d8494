// Norms. A row's numbers do not depend on the rows beside it.
#pragma once

#include <cstdint>

namespace specdec {

// x / rms(x) * weight; without a weight for a null pointer. `out` may be `x`.
void rms_norm(const float* x, const float* weight, int64_t cols, float eps, float* out);

}  // namespace specdec

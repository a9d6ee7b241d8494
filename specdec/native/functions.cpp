// Functions on rows that Python calls outside of layers.
#include "matmul.h"
#include "norms.h"
#include "parallel.h"

using namespace specdec;

extern "C" {

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

// out [n, cols] = rows of the matrix, as an embedding table is read; 0 if there is no such row.
int64_t specdec_rows(const Matrix* matrix, const int64_t* rows, int64_t n, float* out) {
  for (int64_t t = 0; t < n; t++) {
    if (rows[t] < 0 || rows[t] >= matrix->rows) return 0;
    read_row(*matrix, rows[t], out + t * matrix->cols);
  }
  return 1;
}

}  // extern "C"

// What the branches of a layer have in common: attention or what stands in its place, feed-forward.
#pragma once

#include "layer.h"
#include "parallel.h"

namespace specdec {

inline int64_t largest_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smallest_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory that is given out piece by piece; without any, only counted.
struct Scratch {
  float* memory;
  int64_t size = 0;

  float* take(int64_t count) {
    float* place = memory ? memory + size : nullptr;
    size += (count + 15) / 16 * 16;
    return place;
  }
  int32_t* take_ints(int64_t count) { return reinterpret_cast<int32_t*>(take(count)); }
};

// Buffers of all layers of a pass: the last step of one layer prepares the rows of the next.
struct Stream {
  float* x;         // [n, n_embd] normed rows, the input of a branch
  float* kept;      // what is kept of them, or of the input of a branch's last product
  float* addition;  // [n, n_embd] the output of a branch
  float* middle;    // [n, n_embd] the residual stream between the two branches

  Stream(const Pass& pass, Scratch& scratch);
};

// One of the two branches of a layer.
class Branch {
 public:
  virtual ~Branch() = default;
  // The steps from the normed rows, prepared for products, to the addition.
  virtual void add_steps(Steps& steps) const = 0;
  // What is left to do before row t of the addition is read.
  virtual void finish_row(int64_t) const {}
};

// A product of one layer's rows, as part of a step.
struct Product {
  const Matrix& matrix;
  Input input;
  float* out;  // [n, rows of the matrix]

  void run(Range range) const {
    multiply(matrix, input, range.first, range.last, out, matrix.rows);
  }
  void add_step(Steps& steps) const {
    steps.add(groups(matrix), [product = *this](Range range, int) { product.run(range); });
  }
};

// The items of `range` that are among the first `count`; the rest of the range then counts from there.
// So one step does the items of several matrices one after the other: nobody waits between them.
inline Range take_items(Range& range, int64_t count) {
  const Range taken{smallest_of(range.first, count), smallest_of(range.last, count)};
  range.first = largest_of(range.first - count, 0);
  range.last = largest_of(range.last - count, 0);
  return taken;
}

}  // namespace specdec

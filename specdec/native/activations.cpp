#include "activations.h"

#include "vector.h"

namespace specdec {
namespace {

// The largest absolute value, by its bits: a NaN is larger than all numbers and is not lost.
float largest_size(const f32x16& a, const f32x16& b) {
  i32x16 sizes;
  for (int p = 0; p < PARTS; p++) {
    const i32_lanes first = (i32_lanes)a.part[p] & 0x7fffffff;
    const i32_lanes second = (i32_lanes)b.part[p] & 0x7fffffff;
    sizes.part[p] = first > second ? first : second;
  }
  const int32_t bits = largest(sizes);
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

template <int BYTES>
void quantise_block(const f32x16* halves, QuantisedBlock<BYTES>& block) {
  constexpr float most = BYTES == 1 ? 127.0f : 127.0f * 128.0f;
  const f32x16 rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const float size = largest_size(halves[0], halves[1]);
  const f32x16 inverse = broadcast(size > 0.0f ? most / size : 0.0f);
  for (int h = 0; h < 2; h++) {
    const f32x16 rounded = halves[h] * inverse + rounder;
    i32x16 numbers;
    for (int p = 0; p < PARTS; p++)
      numbers.part[p] = (i32_lanes)rounded.part[p] - (i32_lanes)rounder.part[p];
    block.halves[h] = sum(numbers);
    if (BYTES == 1) {
      store_i8(block.values[0] + 16 * h, numbers);
    } else {
      const i32x16 high = shift_right(numbers + broadcast_int(64), 7);
      store_i8(block.values[0] + 16 * h, high);
      store_i8(block.values[BYTES - 1] + 16 * h, numbers - shift_left(high, 7));
    }
  }
  block.scale = (size + (size - size)) / most;  // of an infinite value nothing is left but NaN
  block.sum = block.scale * static_cast<float>(block.halves[0] + block.halves[1]);
}

// Two halves of up to 32 values, zeros behind the last.
void load_block(const float* values, int64_t count, f32x16* halves) {
  const int64_t first = count < 16 ? count : 16;
  halves[0] = load_partial(values, first);
  halves[1] = load_partial(values + first, count - first);
}

}  // namespace

void Input::prepare(int64_t first, int64_t last) const {
  const int64_t n_blocks = blocks_of(cols);
  for (int64_t item = first; item < last; item++) {
    const int64_t t = item / n_blocks, b = item % n_blocks;
    const int64_t rest = cols - b * BLOCK;
    f32x16 halves[2] = {};
    load_block(row(t) + b * BLOCK, rest < BLOCK ? rest : BLOCK, halves);
    if (bytes == 1) quantise_block(halves, blocks<1>(t)[b]);
    else if (bytes == 2) quantise_block(halves, blocks<2>(t)[b]);
    else
      for (int h = 0; h < 2; h++) kept_row(t)[2 * b + h] = sum(halves[h]);
  }
}

}  // namespace specdec

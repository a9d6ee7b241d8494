#include "activations.h"

#include "vector.h"

namespace specdec {
namespace {

// Whole numbers as signed bytes; returns their sum.
int32_t store_bytes(const i32x16& numbers, int8_t* destination) {
  int32_t lanes[16], total = 0;
  std::memcpy(lanes, &numbers, sizeof lanes);
  for (int i = 0; i < 16; i++) {
    destination[i] = static_cast<int8_t>(lanes[i]);
    total += destination[i];
  }
  return total;
}

// The largest absolute value, by its bits: a NaN is larger than all numbers and is not lost.
float largest_size(const f32x16& a, const f32x16& b) {
  int32_t bits[16];
  i32x16 sizes;
  for (int p = 0; p < PARTS; p++) {
    const i32_lanes first = (i32_lanes)a.part[p] & 0x7fffffff;
    const i32_lanes second = (i32_lanes)b.part[p] & 0x7fffffff;
    sizes.part[p] = first > second ? first : second;
  }
  std::memcpy(bits, &sizes, sizeof bits);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++)
      bits[i] = bits[i] > bits[i + width] ? bits[i] : bits[i + width];
  float result;
  std::memcpy(&result, bits, sizeof result);
  return result;
}

void quantise_block(const f32x16* halves, QuantisedBlock& block) {
  const f32x16 rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const float largest = largest_size(halves[0], halves[1]);
  const f32x16 inverse = broadcast(largest > 0.0f ? 127.0f / largest : 0.0f);
  for (int h = 0; h < 2; h++) {
    const f32x16 rounded = halves[h] * inverse + rounder;
    i32x16 numbers;
    for (int p = 0; p < PARTS; p++)
      numbers.part[p] = (i32_lanes)rounded.part[p] - (i32_lanes)rounder.part[p];
    block.halves[h] = store_bytes(numbers, block.values + 16 * h);
  }
  block.scale = largest / 127.0f;
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
    if (quantises) quantise_block(halves, reinterpret_cast<QuantisedBlock*>(kept_row(t))[b]);
    else kept_row(t)[b] = sum(halves[0] + halves[1]);
  }
}

}  // namespace specdec

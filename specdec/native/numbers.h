// Sixteen numbers in memory: float32, half precision or bfloat16.
#pragma once

#include "vector.h"

namespace specdec {

struct F32Numbers {
  static constexpr int bytes = 4;
  static f32x16 read(const uint8_t* source) { return load(reinterpret_cast<const float*>(source)); }
  static void write(uint8_t* destination, const f32x16& value) {
    store(reinterpret_cast<float*>(destination), value);
  }
};

struct F16Numbers {
  static constexpr int bytes = 2;
  static f32x16 read(const uint8_t* source) { return load_f16(source); }
  static void write(uint8_t* destination, const f32x16& value) { store_f16(destination, value); }
};

struct BF16Numbers {
  static constexpr int bytes = 2;
  static f32x16 read(const uint8_t* source) { return load_bf16(source); }
  static void write(uint8_t* destination, const f32x16& value) { store_bf16(destination, value); }
};

// The first `count` of sixteen numbers, the others 0.
template <class Numbers>
inline f32x16 read_some(const uint8_t* source, int64_t count) {
  if (count >= 16) return Numbers::read(source);
  uint8_t numbers[16 * Numbers::bytes] = {};
  std::memcpy(numbers, source, static_cast<size_t>(count * Numbers::bytes));
  return Numbers::read(numbers);
}

template <class Numbers>
inline void write_some(uint8_t* destination, const f32x16& value, int64_t count) {
  if (count >= 16) return Numbers::write(destination, value);
  uint8_t numbers[16 * Numbers::bytes];
  Numbers::write(numbers, value);
  std::memcpy(destination, numbers, static_cast<size_t>(count * Numbers::bytes));
}

}  // namespace specdec

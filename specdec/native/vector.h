// Sixteen floats at a time, in registers of whatever width the compiler's target has.
//
// Everything is written once, for AVX-512, AVX2, NEON and plain code alike; only the conversion from
// half precision and the fused multiply-add name instructions. Nothing here depends on how many
// values are processed together, and no reduction's order is left to the compiler.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace specdec {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SPECDEC_AVX2
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PARTS = 16 / LANES;

typedef float f32_lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t i32_lanes __attribute__((vector_size(LANES * 4)));
typedef uint8_t u8_lanes __attribute__((vector_size(LANES)));
typedef uint16_t u16_lanes __attribute__((vector_size(LANES * 2)));

// The same in memory, at any address. Compilers may copy with narrower registers than they compute
// with; reading such a copy back in one piece waits for the stores, so loads name the whole register.
typedef float f32_memory __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct f32x16 {
  f32_lanes part[PARTS];
};

struct i32x16 {
  i32_lanes part[PARTS];
};

// Applies `expression` of part index p to every part.
#define SPECDEC_PARTS(type, expression)                    \
  type result;                                             \
  for (int p = 0; p < PARTS; p++) result.part[p] = expression; \
  return result

// The subtraction makes a vector of a number and costs nothing: x - 0 is x, whatever its sign.
inline f32x16 broadcast(float value) { SPECDEC_PARTS(f32x16, value - f32_lanes{}); }

inline f32x16 load(const float* source) {
  SPECDEC_PARTS(f32x16, ((const f32_memory*)source)[p]);
}

inline void store(float* destination, const f32x16& value) {
  for (int p = 0; p < PARTS; p++) ((f32_memory*)destination)[p] = value.part[p];
}

// The first `count` of sixteen values, the others 0; all from sixteen on.
inline f32x16 load_partial(const float* source, int64_t count) {
  if (count >= 16) return load(source);
  f32x16 result = broadcast(0.0f);
  std::memcpy(&result, source, static_cast<size_t>(count) * sizeof(float));
  return result;
}

inline void store_partial(float* destination, const f32x16& value, int64_t count) {
  if (count >= 16) return store(destination, value);
  std::memcpy(destination, &value, static_cast<size_t>(count) * sizeof(float));
}

inline f32x16 operator+(const f32x16& a, const f32x16& b) {
  SPECDEC_PARTS(f32x16, a.part[p] + b.part[p]);
}
inline f32x16 operator-(const f32x16& a, const f32x16& b) {
  SPECDEC_PARTS(f32x16, a.part[p] - b.part[p]);
}
inline f32x16 operator*(const f32x16& a, const f32x16& b) {
  SPECDEC_PARTS(f32x16, a.part[p] * b.part[p]);
}
inline f32x16 operator/(const f32x16& a, const f32x16& b) {
  SPECDEC_PARTS(f32x16, a.part[p] / b.part[p]);
}
inline i32x16 broadcast_int(int32_t value) { SPECDEC_PARTS(i32x16, value - i32_lanes{}); }
inline f32x16 max(const f32x16& a, const f32x16& b) {
  SPECDEC_PARTS(f32x16, a.part[p] > b.part[p] ? a.part[p] : b.part[p]);
}
inline f32x16 min(const f32x16& a, const f32x16& b) {
  SPECDEC_PARTS(f32x16, a.part[p] < b.part[p] ? a.part[p] : b.part[p]);
}

inline f32_lanes fma_lanes(f32_lanes a, f32_lanes b, f32_lanes c) {
#if defined(__AVX512F__)
  return (f32_lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(SPECDEC_AVX2)
  return (f32_lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (f32_lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// a * b + c, fused where the machine can: never left to the compiler's choice.
inline f32x16 fma(const f32x16& a, const f32x16& b, const f32x16& c) {
  SPECDEC_PARTS(f32x16, fma_lanes(a.part[p], b.part[p], c.part[p]));
}

// Asks for memory that is read soon; `count` bytes. LEVEL: 3 = into the first cache, 2 = the second.
template <int LEVEL>
inline void prefetch(const uint8_t* source, int64_t count) {
  for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(source + i, 0, LEVEL);
}

// Sixteen bytes as integers.
inline i32x16 load_u8(const uint8_t* source) {
  i32x16 result;
#if defined(__AVX512F__)
  result.part[0] = (i32_lanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)source));
#elif defined(SPECDEC_AVX2)
  for (int p = 0; p < PARTS; p++)
    result.part[p] =
        (i32_lanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(source + 8 * p)));
#else
  for (int p = 0; p < PARTS; p++) {
    u8_lanes bytes;
    std::memcpy(&bytes, source + p * LANES, sizeof bytes);
    result.part[p] = __builtin_convertvector(bytes, i32_lanes);
  }
#endif
  return result;
}

inline i32x16 operator+(const i32x16& a, const i32x16& b) {
  SPECDEC_PARTS(i32x16, a.part[p] + b.part[p]);
}
inline i32x16 operator-(const i32x16& a, const i32x16& b) {
  SPECDEC_PARTS(i32x16, a.part[p] - b.part[p]);
}
inline i32x16 shift_left(const i32x16& a, int n) { SPECDEC_PARTS(i32x16, a.part[p] << n); }
inline i32x16 shift_right(const i32x16& a, int n) { SPECDEC_PARTS(i32x16, a.part[p] >> n); }

inline int32_t sum(const i32x16& value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)value.part[0]);
#else
  int32_t total = 0;
  for (int i = 0; i < 16; i++) total += value.part[i / LANES][i % LANES];
  return total;
#endif
}

inline int32_t largest(const i32x16& value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)value.part[0]);
#else
  int32_t result = value.part[0][0];
  for (int i = 1; i < 16; i++) {
    const int32_t lane = value.part[i / LANES][i % LANES];
    result = lane > result ? lane : result;
  }
  return result;
#endif
}

inline float largest(const f32x16& value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value.part[0]);
#else
  float result = value.part[0][0];
  for (int i = 1; i < 16; i++) {
    const float lane = value.part[i / LANES][i % LANES];
    result = lane > result ? lane : result;
  }
  return result;
#endif
}

// The lowest eight bits of each.
inline void store_i8(int8_t* destination, const i32x16& value) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)destination, _mm512_cvtepi32_epi8((__m512i)value.part[0]));
#else
  for (int i = 0; i < 16; i++)
    destination[i] = static_cast<int8_t>(value.part[i / LANES][i % LANES]);
#endif
}

// Sixteen signed bytes as integers.
inline i32x16 load_i8(const uint8_t* source) {
#if defined(__AVX512F__)
  return {{(i32_lanes)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)source))}};
#else
  const i32x16 bytes = load_u8(source);
  SPECDEC_PARTS(i32x16, (bytes.part[p] ^ 128) - 128);
#endif
}

inline f32x16 to_float(const i32x16& a) {
  SPECDEC_PARTS(f32x16, __builtin_convertvector(a.part[p], f32_lanes));
}
inline f32x16 load_bf16(const uint8_t* source) {
  f32x16 result;
  for (int p = 0; p < PARTS; p++) {
    u16_lanes bits;
    std::memcpy(&bits, source + p * LANES * 2, sizeof bits);
    result.part[p] = (f32_lanes)(__builtin_convertvector(bits, i32_lanes) << 16);
  }
  return result;
}

// One number of IEEE half precision, by its bits.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  uint32_t bits;
  if (rest >= 0x7c00u) {
    bits = 0x7f800000u | (rest & 0x3ffu) << 13;
  } else if (rest >= 0x400u) {
    bits = (rest << 13) + (112u << 23);
  } else {
    const float tiny = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&bits, &tiny, sizeof bits);
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline f32x16 load_f16(const uint8_t* source) {
  f32x16 result;
#if defined(__AVX512F__)
  result.part[0] = (f32_lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(SPECDEC_AVX2)
  for (int p = 0; p < PARTS; p++)
    result.part[p] = (f32_lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source + p));
#elif defined(__aarch64__)
  for (int p = 0; p < PARTS; p++) {
    float16x4_t halves;
    std::memcpy(&halves, source + p * 8, sizeof halves);
    result.part[p] = (f32_lanes)vcvt_f32_f16(halves);
  }
#else
  float values[16];
  for (int i = 0; i < 16; i++) {
    uint16_t half;
    std::memcpy(&half, source + 2 * i, sizeof half);
    values[i] = half_to_float(half);
  }
  result = load(values);
#endif
  return result;
}

#if defined(__AVX512F__)
inline __m256 sum_of_halves(const f32x16& value) {
  const __m512 all = (__m512)value.part[0];
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(all), upper);
}
#elif defined(SPECDEC_AVX2)
inline __m256 sum_of_halves(const f32x16& value) {
  return _mm256_add_ps((__m256)value.part[0], (__m256)value.part[1]);
}
#endif

// One number in half precision, rounded to the nearest, of two equally near ones to the even one.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (size >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (size < 0x38800000u) {  // below 2^-14: a sum with 1/2 has the steps of the smallest numbers
    float sum;
    std::memcpy(&sum, &size, sizeof sum);
    sum += 0.5f;
    std::memcpy(&size, &sum, sizeof size);
    return static_cast<uint16_t>(sign | (size - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | (size + 0xfffu + (size >> 13 & 1u) - (112u << 23)) >> 13);
}

inline void store_f16(uint8_t* destination, const f32x16& value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)destination, _mm512_cvtps_ph((__m512)value.part[0], 0));
#elif defined(SPECDEC_AVX2)
  for (int p = 0; p < PARTS; p++)
    _mm_storeu_si128((__m128i*)destination + p, _mm256_cvtps_ph((__m256)value.part[p], 0));
#elif defined(__aarch64__)
  for (int p = 0; p < PARTS; p++) {
    const float16x4_t halves = vcvt_f16_f32((float32x4_t)value.part[p]);
    std::memcpy(destination + p * 8, &halves, sizeof halves);
  }
#else
  for (int i = 0; i < 16; i++) {
    const uint16_t half = float_to_half(value.part[i / LANES][i % LANES]);
    std::memcpy(destination + 2 * i, &half, sizeof half);
  }
#endif
}

// To the nearest, of two equally near ones to the even one.
inline void store_bf16(uint8_t* destination, const f32x16& value) {
  for (int p = 0; p < PARTS; p++) {
    const i32_lanes bits = (i32_lanes)value.part[p];
    const i32_lanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const i32_lanes is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const u16_lanes result =
        __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), u16_lanes);
    std::memcpy(destination + p * LANES * 2, &result, sizeof result);
  }
}

// The sum of all sixteen, always by the same tree: lane i with i + 8, then + 4, + 2, + 1.
inline float sum(const f32x16& value) {
#if defined(__AVX512F__) || defined(SPECDEC_AVX2)
  const __m256 eight = sum_of_halves(value);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
#else
  float lanes[16];
  store(lanes, value);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

#if defined(__AVX512F__)
// Each step adds up halves of what is left of two vectors' lanes and puts both results in one.
template <int LOW, int HIGH>
inline __m512 add_quarters(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, LOW), _mm512_shuffle_f32x4(a, b, HIGH));
}
template <int LOW, int HIGH>
inline __m512 add_lanes(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, LOW), _mm512_shuffle_ps(a, b, HIGH));
}
#endif

// The sums of sixteen vectors, each by the tree of `sum`. Vector i stands at place `sum_place(i)`:
// the last shuffles stay within quarters of a vector, so the sum of the vector at place 4 l + q comes
// out in lane l of quarter q. From these places the sums come out in order.
constexpr int sum_place(int i) { return i % 4 * 4 + i / 4; }

inline f32x16 sum_sixteen(const f32x16* values) {
#if defined(__AVX512F__)
  __m512 four[4];
  for (int i = 0; i < 4; i++) {
    const f32x16* v = values + 4 * i;
    const __m512 first = add_quarters<0x44, 0xee>((__m512)v[0].part[0], (__m512)v[1].part[0]);
    const __m512 second = add_quarters<0x44, 0xee>((__m512)v[2].part[0], (__m512)v[3].part[0]);
    four[i] = add_quarters<0x88, 0xdd>(first, second);
  }
  const __m512 first = add_lanes<0x44, 0xee>(four[0], four[1]);
  const __m512 second = add_lanes<0x44, 0xee>(four[2], four[3]);
  return {{(f32_lanes)add_lanes<0x88, 0xdd>(first, second)}};
#else
  float sums[16];
  for (int i = 0; i < 16; i++) sums[i] = sum(values[sum_place(i)]);
  return load(sums);
#endif
}

// e^x within two units in the last place, x cut to [-87, 88.37]: powers of two times a polynomial
// of degree six on [-ln 2 / 2, ln 2 / 2] (coefficients: Cephes, expf). NaN stays NaN.
inline f32x16 exp(const f32x16& exponent) {
  // In this order: of a number and a NaN `min` and `max` give the second argument.
  const f32x16 x = max(broadcast(-87.0f), min(broadcast(88.37f), exponent));
  const f32x16 rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = fma(x, broadcast(1.44269504088896341f), rounder);
  const f32x16 power = shifted - rounder;
  const f32x16 r = fma(power, broadcast(2.12194440e-4f), fma(power, broadcast(-0.693359375f), x));
  f32x16 y = broadcast(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                            1.6666665459e-1f, 5.0000001201e-1f})
    y = fma(y, r, broadcast(coefficient));
  y = fma(y, r * r, r) + broadcast(1.0f);
  f32x16 result;
  for (int p = 0; p < PARTS; p++) {
    const i32_lanes exponent_bits =
        ((i32_lanes)shifted.part[p] - (i32_lanes)rounder.part[p]) << 23;
    result.part[p] = (f32_lanes)((i32_lanes)y.part[p] + exponent_bits);
  }
  return result;
}

// 1 / (1 + e^-x)
inline f32x16 logistic(const f32x16& x) {
  return broadcast(1.0f) / (broadcast(1.0f) + exp(broadcast(0.0f) - x));
}

}  // namespace specdec

// Sixty-four small integers at a time: four columns each of sixteen rows, a row's four side by side.
//
// Only the dot product and the table name instructions. Every variant is exact, so results do not
// depend on the machine.
#pragma once

#include "vector.h"

namespace specdec {

typedef uint8_t u8_quads __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16_pairs __attribute__((vector_size(LANES * 4)));

typedef uint8_t u8_memory __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

struct u8x64 {
  u8_quads part[PARTS];
};

inline u8x64 load_bytes(const uint8_t* source) {
  SPECDEC_PARTS(u8x64, (u8_quads)((const u8_memory*)source)[p]);
}

inline void store_bytes(uint8_t* destination, const u8x64& value) {
  for (int p = 0; p < PARTS; p++)
    ((u8_memory*)destination)[p] = (u8_memory)value.part[p];
}

// Bits moved within pairs of bytes: what crosses into the neighbour is for the mask to remove.
inline u8x64 shift_right(const u8x64& a, int n) {
  SPECDEC_PARTS(u8x64, (u8_quads)((u16_pairs)a.part[p] >> n));
}
inline u8x64 shift_left(const u8x64& a, int n) {
  SPECDEC_PARTS(u8x64, (u8_quads)((u16_pairs)a.part[p] << n));
}
inline u8x64 operator&(const u8x64& a, uint8_t mask) { SPECDEC_PARTS(u8x64, a.part[p] & mask); }
inline u8x64 operator|(const u8x64& a, const u8x64& b) {
  SPECDEC_PARTS(u8x64, a.part[p] | b.part[p]);
}

// Column k of four, of sixteen rows.
inline i32x16 column(const u8x64& a, int k) {
  SPECDEC_PARTS(i32x16, ((i32_lanes)a.part[p] >> (8 * k)) & 255);
}

// table[a], all elements of a below sixteen.
inline u8x64 lookup(const uint8_t* table, const u8x64& a) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128((const __m128i*)table);
  return {{(u8_quads)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)a.part[0])}};
#elif defined(SPECDEC_AVX2)
  const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  SPECDEC_PARTS(u8x64, (u8_quads)_mm256_shuffle_epi8(values, (__m256i)a.part[p]));
#elif defined(__aarch64__)
  const uint8x16_t values = vld1q_u8(table);
  SPECDEC_PARTS(u8x64, (u8_quads)vqtbl1q_u8(values, (uint8x16_t)a.part[p]));
#else
  u8x64 result;
  for (int p = 0; p < PARTS; p++)
    for (int i = 0; i < 4 * LANES; i++) result.part[p][i] = table[a.part[p][i]];
  return result;
#endif
}

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && defined(SPECDEC_AVX2))
#define SPECDEC_VNNI
#elif defined(__AVX512BW__) || defined(SPECDEC_AVX2)
#define SPECDEC_PAIRS
#endif

// Whether `dot<true>` takes 128 from every element of `a` first. Where instructions add up pairs of
// products in sixteen bits, that is what makes them fit; others multiply signed bytes alone.
#if defined(SPECDEC_PAIRS) || (defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8))
constexpr bool WIDE_IS_SIGNED = true;
#else
constexpr bool WIDE_IS_SIGNED = false;
#endif

// sum + the products of four unsigned bytes a lane with four signed ones, the same for all lanes.
// Without WIDE all of `a` is below 128.
template <bool WIDE>
inline i32_lanes dot_lanes(i32_lanes sum, u8_quads a, int32_t b) {
#if defined(SPECDEC_VNNI) && defined(__AVX512VNNI__)
  return (i32_lanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32(b));
#elif defined(SPECDEC_VNNI)
  return (i32_lanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, _mm256_set1_epi32(b));
#elif defined(SPECDEC_PAIRS) && defined(__AVX512BW__)
  __m512i size = (__m512i)a, four = _mm512_set1_epi32(b);
  if (WIDE) {  // |a| * (b with the sign of a)
    const __m512i difference = (__m512i)(a ^ 128);
    const __mmask64 negative = _mm512_movepi8_mask(difference);
    size = _mm512_abs_epi8(difference);
    four = _mm512_mask_sub_epi8(four, negative, _mm512_setzero_si512(), four);
  }
  const __m512i pairs = _mm512_maddubs_epi16(size, four);
  return sum + (i32_lanes)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(SPECDEC_PAIRS)
  __m256i size = (__m256i)a, four = _mm256_set1_epi32(b);
  if (WIDE) {
    const __m256i difference = (__m256i)(a ^ 128);
    size = _mm256_abs_epi8(difference);
    four = _mm256_sign_epi8(four, difference);
  }
  const __m256i pairs = _mm256_maddubs_epi16(size, four);
  return sum + (i32_lanes)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (i32_lanes)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, vreinterpretq_s8_s32(vdupq_n_s32(b)));
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t factors = (int8x16_t)(WIDE ? a ^ 128 : a);
  return (i32_lanes)vdotq_s32((int32x4_t)sum, factors, vreinterpretq_s8_s32(vdupq_n_s32(b)));
#else
  for (int k = 0; k < 4; k++) {
    const int32_t factor = static_cast<int8_t>(static_cast<uint32_t>(b) >> (8 * k));
    sum += (((i32_lanes)a >> (8 * k)) & 255) * factor;
  }
  return sum;
#endif
}

template <bool WIDE>
inline i32x16 dot(const i32x16& sum, const u8x64& a, int32_t b) {
  SPECDEC_PARTS(i32x16, dot_lanes<WIDE>(sum.part[p], a.part[p], b));
}

}  // namespace specdec

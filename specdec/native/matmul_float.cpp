// Products with activations in float32.
#include "products.h"

namespace specdec {
namespace {

// Activations in float32: two chains a block, for even and for odd columns.
template <class Format>
struct FloatProducts {
  static constexpr int TILE = MAX_TILE / 2;  // larger ones take long to compile and win little

  template <int T>
  static void add(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                  f32x16* total) {
    const float *x[T], *sums[T];
    for (int t = 0; t < T; t++) {
      x[t] = input.row(input.within(t0 + t));
      sums[t] = input.sums(input.within(t0 + t));
    }
    for_blocks<Format>(group, cols, [&](const uint8_t* header, const uint8_t* block, int64_t b) {
      const Factors factors = Format::factors(header, block, b);
      for (int h = 0; h < Format::SCALES; h++) {
        f32x16 even[T], odd[T];
        for (int t = 0; t < T; t++) even[t] = odd[t] = broadcast(0.0f);
        add_half<T>(block + Format::FACTORS, h, x, even, odd);
        for (int t = 0; t < T; t++) total[t] = fma(factors.scale[h], even[t] + odd[t], total[t]);
      }
      for (int t = 0; t < T; t++) {
        const float* halves = sums[t] + 2 * b;
        if (Format::MINIMA == 1)
          total[t] = fma(factors.minimum[0], broadcast(halves[0] + halves[1]), total[t]);
        for (int h = 0; h < 2 && Format::MINIMA == 2; h++)
          total[t] = fma(factors.minimum[h], broadcast(halves[h]), total[t]);
        x[t] += BLOCK;
      }
    });
  }

  template <int T>
  static void add_half(const uint8_t* quants, int h, const float* const* x, f32x16* even,
                       f32x16* odd) {
    constexpr int count = QUADS / Format::SCALES;
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const int quad = h * count + i;
      const u8x64 weights = Format::Quants::at(quants, quad);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        f32x16 weight = to_float(column(weights, k));
        if (Format::OFFSET) weight = weight - broadcast(Format::OFFSET);
        f32x16* sums = k % 2 ? odd : even;
        for (int t = 0; t < T; t++) sums[t] = fma(weight, broadcast(x[t][4 * quad + k]), sums[t]);
      }
    }
  }

  static int64_t bytes(int64_t cols) { return group_bytes<Format>(cols); }
};

// Plain numbers, any count of columns. Sums over 32 columns keep rounding errors small.
template <class Numbers>
struct PlainProducts {
  static constexpr int TILE = MAX_TILE;

  template <int T>
  static void add(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                  f32x16* total) {
    constexpr int64_t step = Numbers::bytes * GROUP;
    const float* x[T];
    for (int t = 0; t < T; t++) x[t] = input.row(input.within(t0 + t));
    for (int64_t start = 0; start < cols; start += BLOCK) {
      const int64_t end = start + BLOCK < cols ? start + BLOCK : cols;
      prefetch<2>(group + start * step + AHEAD, BLOCK * step);
      f32x16 even[T], odd[T];
      for (int t = 0; t < T; t++) even[t] = odd[t] = broadcast(0.0f);
      int64_t c = start;
      for (; c + 1 < end; c += 2) {
        const f32x16 first = Numbers::read(group + c * step);
        const f32x16 second = Numbers::read(group + (c + 1) * step);
        for (int t = 0; t < T; t++) {
          even[t] = fma(first, broadcast(x[t][c]), even[t]);
          odd[t] = fma(second, broadcast(x[t][c + 1]), odd[t]);
        }
      }
      if (c < end) {
        const f32x16 last = Numbers::read(group + c * step);
        for (int t = 0; t < T; t++) even[t] = fma(last, broadcast(x[t][c]), even[t]);
      }
      for (int t = 0; t < T; t++) total[t] = total[t] + (even[t] + odd[t]);
    }
  }

  static int64_t bytes(int64_t cols) { return cols * Numbers::bytes * GROUP; }
};

struct FloatWork {
  const Call& call;

  template <class Format>
  void blocks() const {
    call.run<FloatProducts<Format>>();
  }
  template <class Numbers>
  void plain() const {
    call.run<PlainProducts<Numbers>>();
  }
};

}  // namespace

void multiply_float(const Call& call) { for_kind(call.matrix.kind, FloatWork{call}); }

}  // namespace specdec

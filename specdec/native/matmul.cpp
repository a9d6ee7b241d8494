// See matmul.h. One inner loop per storage kind and number of rows; a row's arithmetic is the same
// in all of them: products of a block in two chains, then scale and minimum once a block.
#include "matmul.h"

#include "vector.h"

namespace specdec {
namespace {

constexpr int AHEAD = 4096;  // bytes that are asked for before their turn
constexpr int64_t CHUNK = 1 << 18;  // bytes of weights that meet all rows before the next
constexpr int MAX_TILE = LANES == 16 ? 8 : 2;  // rows whose sums fit the registers

struct HalfScale {
  static constexpr int bytes = 32;
  static f32x16 read(const uint8_t* source) { return load_f16(source); }
};

struct FloatScale {
  static constexpr int bytes = 64;
  static f32x16 read(const uint8_t* source) {
    f32x16 result;
    std::memcpy(&result, source, sizeof result);
    return result;
  }
};

// Weight of column c = scale * q + minimum.
template <class Scale>
struct ScaleOnly {
  static constexpr int bytes = Scale::bytes;
  static constexpr bool has_minimum = false;
  static f32x16 minimum(const uint8_t*, const f32x16& scale) { return scale; }
};

template <class Scale>
struct ScaleAndMinimum {
  static constexpr int bytes = 2 * Scale::bytes;
  static constexpr bool has_minimum = true;
  static f32x16 minimum(const uint8_t* block, const f32x16&) {
    return Scale::read(block + Scale::bytes);
  }
};

template <class Scale>
struct Centred {
  static constexpr int bytes = Scale::bytes;
  static constexpr bool has_minimum = true;
  static f32x16 minimum(const uint8_t*, const f32x16& scale) { return scale * broadcast(-8.0f); }
};

// Columns c (low nibbles) and c + 16 (high nibbles) share a byte.
struct Nibbles {
  static constexpr int columns = 32;
  static constexpr int bytes = 16 * GROUP;
  template <int T>
  static void add_products(const uint8_t* quants, const float* const* x, f32x16* first,
                           f32x16* second) {
    for (int c = 0; c < 16; c++) {
      const i32x16 both = load_u8(quants + c * GROUP);
      const f32x16 low = to_float(low_nibbles(both)), high = to_float(high_nibbles(both));
      for (int t = 0; t < T; t++) {
        first[t] = fma(low, broadcast(x[t][c]), first[t]);
        second[t] = fma(high, broadcast(x[t][c + 16]), second[t]);
      }
    }
  }
};

template <int COLUMNS>
struct Bytes {
  static constexpr int columns = COLUMNS;
  static constexpr int bytes = COLUMNS * GROUP;
  template <int T>
  static void add_products(const uint8_t* quants, const float* const* x, f32x16* first,
                           f32x16* second) {
    for (int c = 0; c < COLUMNS; c += 2) {
      const f32x16 even = to_float(load_i8(quants + c * GROUP));
      const f32x16 odd = to_float(load_i8(quants + (c + 1) * GROUP));
      for (int t = 0; t < T; t++) {
        first[t] = fma(even, broadcast(x[t][c]), first[t]);
        second[t] = fma(odd, broadcast(x[t][c + 1]), second[t]);
      }
    }
  }
};

// Blocks of quants with scales. The products of a group of sixteen rows with T rows.
template <template <class> class Factors, class Scale, class Quants>
struct Quantised {
  template <int T>
  static void products(const uint8_t* group, int64_t cols, const float* const* rows,
                       const float* const* sums, f32x16* total) {
    using F = Factors<Scale>;
    const int64_t n_blocks = cols / Quants::columns;
    const float* x[T];
    for (int t = 0; t < T; t++) x[t] = rows[t];
    for (int64_t b = 0; b < n_blocks; b++) {
      prefetch(group + AHEAD, F::bytes + Quants::bytes);
      f32x16 first[T], second[T];
      for (int t = 0; t < T; t++) first[t] = second[t] = broadcast(0.0f);
      Quants::template add_products<T>(group + F::bytes, x, first, second);
      const f32x16 scale = Scale::read(group);
      const f32x16 minimum = F::minimum(group, scale);
      for (int t = 0; t < T; t++) {
        total[t] = fma(scale, first[t] + second[t], total[t]);
        if (F::has_minimum) total[t] = fma(minimum, broadcast(sums[t][b]), total[t]);
        x[t] += Quants::columns;
      }
      group += F::bytes + Quants::bytes;
    }
  }
  static int64_t group_bytes(int64_t cols) {
    return cols / Quants::columns * (Factors<Scale>::bytes + Quants::bytes);
  }
};

struct ReadF32 {
  static constexpr int bytes = 4;
  static f32x16 read(const uint8_t* source) { return FloatScale::read(source); }
};
struct ReadF16 {
  static constexpr int bytes = 2;
  static f32x16 read(const uint8_t* source) { return load_f16(source); }
};
struct ReadBF16 {
  static constexpr int bytes = 2;
  static f32x16 read(const uint8_t* source) { return load_bf16(source); }
};

// Plain numbers, any count of columns. Sums over 32 columns keep rounding errors small.
template <class Number>
struct Floating {
  template <int T>
  static void products(const uint8_t* group, int64_t cols, const float* const* rows,
                       const float* const*, f32x16* total) {
    constexpr int64_t step = Number::bytes * GROUP;
    for (int64_t start = 0; start < cols; start += SUM_BLOCK) {
      const int64_t end = start + SUM_BLOCK < cols ? start + SUM_BLOCK : cols;
      prefetch(group + start * step + AHEAD, SUM_BLOCK * step);
      f32x16 first[T], second[T];
      for (int t = 0; t < T; t++) first[t] = second[t] = broadcast(0.0f);
      int64_t c = start;
      for (; c + 1 < end; c += 2) {
        const f32x16 even = Number::read(group + c * step);
        const f32x16 odd = Number::read(group + (c + 1) * step);
        for (int t = 0; t < T; t++) {
          first[t] = fma(even, broadcast(rows[t][c]), first[t]);
          second[t] = fma(odd, broadcast(rows[t][c + 1]), second[t]);
        }
      }
      if (c < end) {
        const f32x16 last = Number::read(group + c * step);
        for (int t = 0; t < T; t++) first[t] = fma(last, broadcast(rows[t][c]), first[t]);
      }
      for (int t = 0; t < T; t++) total[t] = total[t] + (first[t] + second[t]);
    }
  }
  static int64_t group_bytes(int64_t cols) { return cols * Number::bytes * GROUP; }
};

struct Output {
  float* values;
  int64_t stride;
  const float* bias;
  int64_t rows;
};

template <class Format, int T>
void multiply_tile(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                   int64_t row, const Output& out) {
  const float *x[T], *sums[T];
  f32x16 total[T];
  for (int t = 0; t < T; t++) {
    x[t] = input.values + (t0 + t) * input.stride;
    sums[t] = input.sums + (t0 + t) * input.sums_stride;
    total[t] = broadcast(0.0f);
  }
  Format::template products<T>(group, cols, x, sums, total);
  const int64_t count = out.rows - row < GROUP ? out.rows - row : GROUP;
  const f32x16 bias = out.bias ? load_partial(out.bias + row, count) : broadcast(0.0f);
  for (int t = 0; t < T; t++) {
    float* destination = out.values + (t0 + t) * out.stride + row;
    const f32x16 value = out.bias ? total[t] + bias : total[t];
    if (count == GROUP) store(destination, value);
    else store_partial(destination, value, count);
  }
}

// Groups first ... last - 1 with all rows of the input from t0 on, in tiles of at most T rows: a tile
// stays in the first cache, the groups in the second.
template <class Format, int T>
void multiply_tiles(const Matrix& matrix, const Input& input, int64_t t0, int64_t first,
                    int64_t last, const Output& out) {
  const int64_t bytes = Format::group_bytes(matrix.cols);
  for (; t0 + T <= input.n; t0 += T)
    for (int64_t g = first; g < last; g++)
      multiply_tile<Format, T>(matrix.data + g * bytes, matrix.cols, input, t0, g * GROUP, out);
  if constexpr (T > 1) {
    if (t0 < input.n) multiply_tiles<Format, T / 2>(matrix, input, t0, first, last, out);
  }
}

template <class Format>
void multiply_format(const Matrix& matrix, const Input& input, int64_t first, int64_t last,
                     const Output& out) {
  const int64_t bytes = Format::group_bytes(matrix.cols);
  const int64_t step = bytes < CHUNK ? CHUNK / bytes : 1;
  for (int64_t g = first; g < last; g += step)
    multiply_tiles<Format, MAX_TILE>(matrix, input, 0, g, g + step < last ? g + step : last, out);
}

}  // namespace

void block_sums(const float* values, int64_t cols, float* sums) {
  for (int64_t start = 0; start < cols; start += SUM_BLOCK) {
    const int64_t count = cols - start < SUM_BLOCK ? cols - start : SUM_BLOCK;
    const int64_t half = count < 16 ? count : 16;
    const f32x16 low = load_partial(values + start, half);
    const f32x16 high = load_partial(values + start + half, count - half);
    *sums++ = sum(low + high);
  }
}

void multiply(const Matrix& matrix, const Input& input, int64_t first, int64_t last, float* values,
              int64_t stride) {
  const Output out{values, stride, matrix.bias, matrix.rows};
  switch (matrix.kind) {
    case F32: return multiply_format<Floating<ReadF32>>(matrix, input, first, last, out);
    case F16: return multiply_format<Floating<ReadF16>>(matrix, input, first, last, out);
    case BF16: return multiply_format<Floating<ReadBF16>>(matrix, input, first, last, out);
    case NIBBLES_CENTRED:
      return multiply_format<Quantised<Centred, HalfScale, Nibbles>>(matrix, input, first, last,
                                                                     out);
    case NIBBLES_F16:
      return multiply_format<Quantised<ScaleAndMinimum, HalfScale, Nibbles>>(matrix, input, first,
                                                                             last, out);
    case NIBBLES_F32:
      return multiply_format<Quantised<ScaleAndMinimum, FloatScale, Nibbles>>(matrix, input, first,
                                                                              last, out);
    case BYTES_F16:
      return multiply_format<Quantised<ScaleOnly, HalfScale, Bytes<32>>>(matrix, input, first, last,
                                                                         out);
    case BYTES_MIN_F16:
      return multiply_format<Quantised<ScaleAndMinimum, HalfScale, Bytes<32>>>(matrix, input, first,
                                                                               last, out);
    case BYTES_MIN_F32:
      return multiply_format<Quantised<ScaleAndMinimum, FloatScale, Bytes<32>>>(matrix, input,
                                                                                first, last, out);
    case BYTES16_F32:
      return multiply_format<Quantised<ScaleOnly, FloatScale, Bytes<16>>>(matrix, input, first,
                                                                          last, out);
  }
}

}  // namespace specdec

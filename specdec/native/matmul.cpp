// See matmul.h. One inner loop per format, type of activations and number of rows; a row's arithmetic
// is the same for all numbers of rows: products of a block first, then scale and minimum.
#include "matmul.h"

#include "formats.h"
#include "numbers.h"

namespace specdec {
namespace {

constexpr int AHEAD = 4096;  // bytes that are asked for before their turn
constexpr int64_t CHUNK = 1 << 18;  // bytes of weights that meet all rows before the next
constexpr int MAX_TILE = LANES == 16 ? 8 : 4;  // rows whose sums fit the registers

// Calls work(header, block, index) for the blocks of a group in order.
template <class Format, class Work>
inline void for_blocks(const uint8_t* group, int64_t cols, const Work& work) {
  constexpr int bytes = Format::FACTORS + Format::Quants::bytes;
  const uint8_t* header = group;
  for (int64_t b = 0; b < cols / BLOCK; b++) {
    if (b % Format::BLOCKS == 0) header = group, group += Format::HEADER;
    prefetch(group + AHEAD, bytes);
    work(header, group, b);
    group += bytes;
  }
}

// Rounded activations: products add up exactly, as integers.
template <class Format, int BYTES>
struct IntegerProducts {
  using Block = QuantisedBlock<BYTES>;

  template <int T>
  static void add(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                  f32x16* total) {
    const Block* rows[T];
    for (int t = 0; t < T; t++) rows[t] = input.blocks<BYTES>(t0 + t);
    for_blocks<Format>(group, cols, [&](const uint8_t* header, const uint8_t* block, int64_t b) {
      const Factors factors = Format::factors(header, block);
      for (int h = 0; h < Format::SCALES; h++) {
        i32x16 sums[T];
        add_half<T>(block + Format::FACTORS, h, rows, b, sums);
        for (int t = 0; t < T; t++)
          total[t] = total[t] + factors.scale[h] * broadcast(rows[t][b].scale) * to_float(sums[t]);
      }
      for (int h = 0; h < Format::MINIMA; h++)
        for (int t = 0; t < T; t++)
          total[t] = total[t] + factors.minimum[h] * broadcast(sum_of(rows[t][b], h));
    });
  }

  static float sum_of(const Block& x, int h) {
    return Format::MINIMA == 2 ? x.scale * static_cast<float>(x.halves[h]) : x.sum;
  }

  static_assert(!Format::Quants::wide || Format::OFFSET == 128, "see WIDE_IS_SIGNED");

  static int32_t offset(const Block& x, int h) {
    if (WIDE_IS_SIGNED && Format::Quants::wide) return 0;  // the product takes the offset itself
    return -Format::OFFSET * (Format::SCALES == 2 ? x.halves[h] : x.halves[0] + x.halves[1]);
  }

  // The sums of products with both bytes of the activations are taken apart until the end.
  template <int T>
  static void add_half(const uint8_t* quants, int h, const Block* const* rows, int64_t b,
                       i32x16* sums) {
    constexpr int count = QUADS / Format::SCALES;
    i32x16 upper[T];
    for (int t = 0; t < T; t++) {
      sums[t] = broadcast_int(offset(rows[t][b], h));
      upper[t] = broadcast_int(0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const int quad = h * count + i;
      const u8x64 weights = Format::Quants::at(quants, quad);
      for (int t = 0; t < T; t++) {
        const Block& x = rows[t][b];
        if (BYTES == 2) upper[t] = dot_four(upper[t], weights, x.values[0] + 4 * quad);
        sums[t] = dot_four(sums[t], weights, x.values[BYTES - 1] + 4 * quad);
      }
    }
    if (BYTES == 2)
      for (int t = 0; t < T; t++) sums[t] = sums[t] + shift_left(upper[t], 7);
  }

  static i32x16 dot_four(const i32x16& sum, const u8x64& weights, const int8_t* values) {
    int32_t four;
    std::memcpy(&four, values, sizeof four);
    return dot<Format::Quants::wide>(sum, weights, four);
  }

  static int64_t bytes(int64_t cols) { return group_bytes<Format>(cols); }
};

// Activations in float32: two chains a block, for even and for odd columns.
template <class Format>
struct FloatProducts {
  template <int T>
  static void add(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                  f32x16* total) {
    const float *x[T], *sums[T];
    for (int t = 0; t < T; t++) {
      x[t] = input.row(t0 + t);
      sums[t] = input.sums(t0 + t);
    }
    for_blocks<Format>(group, cols, [&](const uint8_t* header, const uint8_t* block, int64_t b) {
      const Factors factors = Format::factors(header, block);
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
  template <int T>
  static void add(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                  f32x16* total) {
    constexpr int64_t step = Numbers::bytes * GROUP;
    const float* x[T];
    for (int t = 0; t < T; t++) x[t] = input.row(t0 + t);
    for (int64_t start = 0; start < cols; start += BLOCK) {
      const int64_t end = start + BLOCK < cols ? start + BLOCK : cols;
      prefetch(group + start * step + AHEAD, BLOCK * step);
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

struct Output {
  float* values;
  int64_t stride;
  const float* bias;
  int64_t rows;
};

template <class Products, int T>
void multiply_tile(const uint8_t* group, int64_t cols, const Input& input, int64_t t0,
                   int64_t row, const Output& out) {
  f32x16 total[T];
  for (int t = 0; t < T; t++) total[t] = broadcast(0.0f);
  Products::template add<T>(group, cols, input, t0, total);
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
template <class Products, int T>
void multiply_tiles(const Matrix& matrix, const Input& input, int64_t t0, int64_t first,
                    int64_t last, const Output& out) {
  const int64_t bytes = Products::bytes(matrix.cols);
  for (; t0 + T <= input.n; t0 += T)
    for (int64_t g = first; g < last; g++)
      multiply_tile<Products, T>(matrix.data + g * bytes, matrix.cols, input, t0, g * GROUP, out);
  if constexpr (T > 1) {
    if (t0 < input.n) multiply_tiles<Products, T / 2>(matrix, input, t0, first, last, out);
  }
}

struct Call {
  const Matrix& matrix;
  const Input& input;
  int64_t first, last;
  Output out;

  template <class Products>
  void run() const {
    const int64_t bytes = Products::bytes(matrix.cols);
    const int64_t step = bytes < CHUNK ? CHUNK / bytes : 1;
    for (int64_t g = first; g < last; g += step)
      multiply_tiles<Products, MAX_TILE>(matrix, input, 0, g, g + step < last ? g + step : last,
                                         out);
  }

  template <class Numbers>
  void plain() const {
    run<PlainProducts<Numbers>>();
  }

  template <class Format>
  void blocks() const {
    switch (input.bytes) {
      case 0: return run<FloatProducts<Format>>();
      case 1: return run<IntegerProducts<Format, 1>>();
      case 2: return run<IntegerProducts<Format, 2>>();
    }
  }
};

// One row of a matrix as float32, every weight computed as ggml does it.
struct Row {
  const Matrix& matrix;
  int64_t row;
  float* out;

  template <class Numbers>
  void plain() const {
    const uint8_t* group = start(matrix.cols * Numbers::bytes * GROUP);
    for (int64_t c = 0; c < matrix.cols; c++)
      out[c] = lane(Numbers::read(group + c * Numbers::bytes * GROUP));
  }

  template <class Format>
  void blocks() const {
    const uint8_t* group = start(group_bytes<Format>(matrix.cols));
    for_blocks<Format>(group, matrix.cols, [&](const uint8_t* header, const uint8_t* block,
                                               int64_t b) {
      const Factors factors = Format::factors(header, block);
      for (int quad = 0; quad < QUADS; quad++) {
        const u8x64 quants = Format::Quants::at(block + Format::FACTORS, quad);
        const int half = quad / (QUADS / 2);
        for (int k = 0; k < 4; k++) {
          f32x16 weight = to_float(column(quants, k)) - broadcast(Format::OFFSET);
          weight = weight * factors.scale[Format::SCALES == 2 ? half : 0];
          if (Format::MINIMA) weight = weight + factors.minimum[Format::MINIMA == 2 ? half : 0];
          out[b * BLOCK + 4 * quad + k] = lane(weight);
        }
      }
    });
  }

  const uint8_t* start(int64_t bytes) const { return matrix.data + row / GROUP * bytes; }
  float lane(const f32x16& values) const {
    float all[GROUP];
    store(all, values);
    return all[row % GROUP];
  }
};

template <class Work>
void for_kind(int64_t kind, const Work& work) {
  switch (kind) {
    case F32: return work.template plain<F32Numbers>();
    case F16: return work.template plain<F16Numbers>();
    case BF16: return work.template plain<BF16Numbers>();
    case Q4_0: return work.template blocks<Scaled<Nibbles, 8>>();
    case Q4_1: return work.template blocks<ScaledWithMinimum<Nibbles>>();
    case Q5_0: return work.template blocks<Scaled<FiveBits, 16>>();
    case Q5_1: return work.template blocks<ScaledWithMinimum<FiveBits>>();
    case Q8_0: return work.template blocks<Scaled<Bytes, 128>>();
    case Q4_K: return work.template blocks<KScaled<Nibbles>>();
    case Q5_K: return work.template blocks<KScaled<FiveBits>>();
    case Q6_K: return work.template blocks<SignedHalvesScaled<SixBits, 32>>();
    case IQ4_NL: return work.template blocks<Scaled<Table, 128>>();
    case Q2_K: return work.template blocks<KHalvesScaled<TwoBits>>();
    case Q3_K: return work.template blocks<SignedHalvesScaled<ThreeBits, 4>>();
    case IQ4_XS: return work.template blocks<SignedScaled<Table, 128>>();
  }
}

}  // namespace

void multiply(const Matrix& matrix, const Input& input, int64_t first, int64_t last, float* out,
              int64_t stride) {
  const Output output{out, stride, matrix.bias, matrix.rows};
  for_kind(matrix.kind, Call{matrix, input, first, last, output});
}

void read_row(const Matrix& matrix, int64_t row, float* out) {
  for_kind(matrix.kind, Row{matrix, row, out});
}

}  // namespace specdec

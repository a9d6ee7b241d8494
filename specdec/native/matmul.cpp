#include "matmul.h"

#include "products.h"

namespace specdec {
namespace {

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
      const Factors factors = Format::factors(header, block, b);
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

}  // namespace

void multiply(const Matrix& matrix, const Input& input, int64_t first, int64_t last, float* out,
              int64_t stride) {
  const Call call{matrix, input, first, last, {out, stride, matrix.bias, matrix.rows}};
  if (matrix.kind <= BF16 || !input.bytes) multiply_float(call);
  else if (input.bytes == 1) multiply_int8(call);
  else multiply_int16(call);
}

void read_row(const Matrix& matrix, int64_t row, float* out) {
  for_kind(matrix.kind, Row{matrix, row, out});
}

}  // namespace specdec

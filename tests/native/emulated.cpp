// Runs kernels for a processor that this machine emulates: problems on stdin, float32 results on stdout.
//
// `products` reads packed matrices and activations. `layer` makes a small layer of its own and passes
// some rows through it, first all at once, then one by one; its arguments are whether it uses GELU and
// the type of its cache. emulated_arm.py compares the results.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "../../specdec/native/layer.h"

using namespace specdec;

extern "C" {
int64_t specdec_kept(int64_t cols, int64_t bytes);
void specdec_multiply(const Matrix* matrix, const float* x, int64_t n, int64_t bytes, float* kept,
                      float* out, int64_t n_threads);
int64_t specdec_scratch(const Pass* pass);
int64_t specdec_layers(const Pass* pass);
}

namespace {

struct Problem {
  int64_t kind, rows, cols, n, activation_bytes, matrix_bytes;
};

void write(const std::vector<float>& values) {
  std::fwrite(values.data(), sizeof(float), values.size(), stdout);
}

template <class Value>
bool read(Value* values, size_t count) {
  return std::fread(values, sizeof(Value), count, stdin) == count;
}

int products() {
  for (Problem problem; read(&problem, 1);) {
    std::vector<uint8_t> data(problem.matrix_bytes);
    std::vector<float> x(problem.n * problem.cols), out(problem.n * problem.rows);
    if (!read(data.data(), data.size()) || !read(x.data(), x.size())) return 1;
    std::vector<float> kept(problem.n * specdec_kept(problem.cols, problem.activation_bytes));
    const Matrix matrix{data.data(), nullptr, problem.rows, problem.cols, problem.kind};
    specdec_multiply(&matrix, x.data(), problem.n, problem.activation_bytes, kept.data(), out.data(), 2);
    write(out);
  }
  return 0;
}

// The same numbers on every machine, from -1 to 1.
std::vector<float> numbers(int64_t count) {
  static uint32_t state = 1;
  std::vector<float> values(count);
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state) >> 8) * 0x1p-23f;
  }
  return values;
}

constexpr int64_t N_EMBD = 80, N_HEAD = 4, N_HEAD_KV = 2, HEAD_DIM = 20, N_FF = 112, N_ROWS = 9;

// The weights stand in groups of sixteen rows, so any numbers are a matrix.
Matrix matrix(int64_t rows, int64_t cols) {
  static std::deque<std::vector<float>> kept;
  kept.push_back(numbers((rows + GROUP - 1) / GROUP * GROUP * cols));
  return {reinterpret_cast<const uint8_t*>(kept.back().data()), nullptr, rows, cols, F32};
}

void run(const Layer& layer, int64_t cache_type, std::vector<float>& hidden, int64_t step) {
  const std::vector<float> angles(N_ROWS * HEAD_DIM / 2, 0.7f);
  std::vector<float> keys(N_HEAD_KV * N_ROWS * HEAD_DIM), values(keys.size());
  for (int64_t start = 0; start < N_ROWS; start += step) {
    LayerCall call{};
    call.layer = &layer, call.keys = keys.data(), call.values = values.data();
    call.key_type = call.value_type = cache_type;
    call.capacity = N_ROWS, call.cos = call.sin = angles.data(), call.n_rot = HEAD_DIM;
    Pass pass{};
    pass.calls = &call, pass.n_layers = 1, pass.n = step, pass.start = start, pass.n_threads = 2;
    pass.hidden = hidden.data() + start * N_EMBD;
    std::vector<float> scratch(specdec_scratch(&pass));
    pass.scratch = scratch.data();
    specdec_layers(&pass);
  }
}

int layer(int64_t uses_gelu, int64_t cache_type) {
  const std::vector<float> norm = numbers(N_EMBD);
  Layer one{};
  one.n_embd = N_EMBD, one.n_head = N_HEAD, one.n_head_kv = N_HEAD_KV, one.n_ff = N_FF;
  one.head_dim = one.head_dim_v = HEAD_DIM, one.uses_gelu = uses_gelu;
  one.rms_eps = 1e-5f, one.attention_scale = 0.2f, one.value_scale = one.output_scale = 1.0f;
  one.q = matrix(N_HEAD * HEAD_DIM, N_EMBD), one.output = matrix(N_EMBD, N_HEAD * HEAD_DIM);
  one.k = matrix(N_HEAD_KV * HEAD_DIM, N_EMBD), one.v = matrix(N_HEAD_KV * HEAD_DIM, N_EMBD);
  one.gate = matrix(N_FF, N_EMBD), one.up = matrix(N_FF, N_EMBD), one.down = matrix(N_EMBD, N_FF);
  one.attn_norm = one.ffn_norm = norm.data();
  const std::vector<float> rows = numbers(N_ROWS * N_EMBD);
  for (const int64_t step : {N_ROWS, int64_t{1}}) {
    std::vector<float> hidden = rows;
    run(one, cache_type, hidden, step);
    write(hidden);
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && !std::strcmp(arguments[1], "products")) return products();
  if (count == 4 && !std::strcmp(arguments[1], "layer"))
    return layer(std::atoi(arguments[2]), std::atoi(arguments[3]));
  return 2;
}

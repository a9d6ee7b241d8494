#include "attention.h"

#include <cmath>

#include "numbers.h"
#include "vector.h"

namespace specdec {
namespace {

constexpr int KEYS = 16;  // whose scores are computed together

template <class Numbers>
float dot(const float* a, const uint8_t* b, int64_t count) {
  f32x16 total = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += 16)
    total = fma(load_partial(a + i, count - i), read_some<Numbers>(b + i * Numbers::bytes, count - i),
                total);
  return sum(total);
}

// The products of sixteen keys with R queries, lanes not added up yet.
template <class Numbers, int R>
void multiply_keys(const Query* queries, const uint8_t* keys, int64_t width,
                   f32x16 (*products)[KEYS]) {
  const int64_t step = width * Numbers::bytes;
  for (int j = 0; j < KEYS; j += 4) {
    f32x16 total[R][4];
    for (int r = 0; r < R; r++)
      for (int k = 0; k < 4; k++) total[r][k] = broadcast(0.0f);
    const auto add = [&](const f32x16* key, const auto& read_query) {
      for (int r = 0; r < R; r++) {
        const f32x16 q = read_query(queries[r].q);
        for (int k = 0; k < 4; k++) total[r][k] = fma(q, key[k], total[r][k]);
      }
    };
    f32x16 key[4];
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
      for (int k = 0; k < 4; k++)
        key[k] = Numbers::read(keys + (j + k) * step + i * Numbers::bytes);
      add(key, [i](const float* q) { return load(q + i); });
    }
    if (i < width) {
      for (int k = 0; k < 4; k++)
        key[k] = read_some<Numbers>(keys + (j + k) * step + i * Numbers::bytes, width - i);
      add(key, [i, width](const float* q) { return load_partial(q + i, width - i); });
    }
    for (int r = 0; r < R; r++)
      for (int k = 0; k < 4; k++) products[r][sum_place(j + k)] = total[r][k];
  }
}

// rows[r][j] = query r times key j, for keys first ... end - 1.
template <class Numbers, int R>
void score(const Query* queries, const uint8_t* keys, int64_t width, int64_t first, int64_t end,
           float* const* rows) {
  const int64_t step = width * Numbers::bytes;
  int64_t j = first;
  for (; j + KEYS <= end; j += KEYS) {
    f32x16 products[R][KEYS];
    multiply_keys<Numbers, R>(queries, keys + j * step, width, products);
    for (int r = 0; r < R; r++) store(rows[r] + j, sum_sixteen(products[r]));
  }
  for (; j < end; j++)
    for (int r = 0; r < R; r++) rows[r][j] = dot<Numbers>(queries[r].q, keys + j * step, width);
}

// Turns scores into e^(score - largest); returns their sum and that of e^(sink - largest).
float exponentials(float* scores, int64_t count, const float* sink) {
  f32x16 highest = broadcast(sink ? *sink : scores[0]);
  for (int64_t j = count; j % 16; j++) scores[j] = scores[0];
  for (int64_t j = 0; j < count; j += 16) highest = max(load(scores + j), highest);
  float lanes[16];
  store(lanes, highest);
  float largest = lanes[0];
  for (int i = 1; i < 16; i++) largest = lanes[i] > largest ? lanes[i] : largest;

  const f32x16 shift = broadcast(largest);
  f32x16 total = broadcast(0.0f);
  for (int64_t j = 0; j < count; j += 16) {
    const f32x16 weights = exp(load(scores + j) - shift);
    store(scores + j, weights);
    total = total + load_partial(scores + j, count - j);
  }
  return sum(total) + (sink ? std::exp(*sink - largest) : 0.0f);
}

// What queries have added up over 16 * N columns of the values, of which `width` exist.
template <class Numbers, int R, int N>
struct Mix {
  const uint8_t* values;  // of key 0, the first of the columns
  int64_t step, width;
  const float* const* weights;
  f32x16 sums[R][N];

  f32x16 read(int64_t j, int i) const {
    const uint8_t* place = values + j * step + 16 * i * Numbers::bytes;
    return N > 1 ? Numbers::read(place) : read_some<Numbers>(place, width);
  }
  void add(int r, int64_t j, const f32x16* value) {
    const f32x16 weight = broadcast(weights[r][j]);
    for (int i = 0; i < N; i++) sums[r][i] = fma(weight, value[i], sums[r][i]);
  }
  // Keys first ... end - 1 for rows r ... r + count - 1.
  template <int COUNT>
  void add_keys(int r, int64_t first, int64_t end) {
    for (int64_t j = first; j < end; j++) {
      f32x16 value[N];
      for (int i = 0; i < N; i++) value[i] = read(j, i);
      for (int k = 0; k < COUNT; k++) add(r + k, j, value);
    }
  }
};

// out = sum of weights[j] * value j / total, over some of the columns, for R queries. Every query adds
// up its keys in order; those that not all of them see it reads by itself.
template <class Numbers, int R, int N>
void mix(const Query* queries, const uint8_t* values, int64_t stride, const float* const* weights,
         const float* totals, int64_t column) {
  Mix<Numbers, R, N> part{values + column * Numbers::bytes, stride * Numbers::bytes,
                          stride - column, weights, {}};
  const int64_t end = queries[0].end;
  const int64_t first = queries[R - 1].first < end ? queries[R - 1].first : end;
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) part.template add_keys<1>(r, queries[r].first, first);
  part.template add_keys<R>(0, first, end);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    part.template add_keys<1>(r, end > queries[r].first ? end : queries[r].first, queries[r].end);
    const f32x16 factor = broadcast(1.0f / totals[r]);
    for (int i = 0; i < N; i++)
      store_partial(queries[r].out + column + 16 * i, part.sums[r][i] * factor,
                    N > 1 ? 16 : part.width);
  }
}

template <class Numbers, int R>
void mix_columns(const Query* queries, const uint8_t* values, int64_t stride,
                 const float* const* weights, const float* totals) {
  int64_t column = 0;
  for (; column + 64 <= stride; column += 64)
    mix<Numbers, R, 4>(queries, values, stride, weights, totals, column);
  for (; column < stride; column += 16)
    mix<Numbers, R, 1>(queries, values, stride, weights, totals, column);
}

// Calls work with the reader of a cache's numbers.
template <class Work>
void with_numbers(int64_t type, const Work& work) {
  switch (type) {
    case CACHE_F32: return work(F32Numbers());
    case CACHE_F16: return work(F16Numbers());
    case CACHE_BF16: return work(BF16Numbers());
  }
}

// Where numbers of key or value 0 of a head stand.
uint8_t* head_of(void* cache, const LayerCall& call, int64_t kv_head, int64_t width,
                 int64_t bytes) {
  return static_cast<uint8_t*>(cache) + kv_head * call.capacity * width * bytes;
}

// Numbers before and behind the scores of a row. Rows that attend together are multiplied with the
// keys of all of them, so each row also gets scores of keys that only its neighbours see: up to
// ATTEND_TILE - 1 on either side. Sixteen, so that this keeps whole vectors whole.
constexpr int64_t MARGIN = 16;
static_assert(MARGIN >= ATTEND_TILE - 1 && MARGIN % 16 == 0, "scores of one row reach into another's");

template <int R>
void attend_together(const LayerCall& call, int64_t head, const Query* queries, float* scores) {
  const Layer& layer = *call.layer;
  const int64_t kv_head = head / (layer.n_head / layer.n_head_kv);
  const int64_t first = queries[0].first, end = queries[R - 1].end;
  float *rows[R], totals[R];
  for (int r = 0; r < R; r++)  // rows[r][j] belongs to key j
    rows[r] = scores + r * score_floats(end - first) / ATTEND_TILE + MARGIN - queries[r].first;
  with_numbers(call.key_type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const uint8_t* keys = head_of(call.keys, call, kv_head, layer.head_dim, Numbers::bytes);
    score<Numbers, R>(queries, keys, layer.head_dim, first, end, rows);
  });
  for (int r = 0; r < R; r++)
    totals[r] = exponentials(rows[r] + queries[r].first, queries[r].end - queries[r].first,
                             layer.sinks ? layer.sinks + head : nullptr);
  with_numbers(call.value_type, [&](auto numbers) {
    using Numbers = decltype(numbers);
    const uint8_t* values = head_of(call.values, call, kv_head, layer.head_dim_v, Numbers::bytes);
    mix_columns<Numbers, R>(queries, values, layer.head_dim_v, rows, totals);
  });
}

template <int R>
void attend_tiles(const LayerCall& call, int64_t head, const Query* queries, int64_t count,
                  float* scores) {
  for (; count >= R; count -= R, queries += R) attend_together<R>(call, head, queries, scores);
  if constexpr (R > 1) {
    if (count) attend_tiles<R / 2>(call, head, queries, count, scores);
  }
}

}  // namespace

int64_t score_floats(int64_t n_keys) {
  return ATTEND_TILE * ((n_keys + 15) / 16 * 16 + 2 * MARGIN);
}

void attend(const LayerCall& call, int64_t head, const Query* queries, int64_t count,
            float* scores) {
  attend_tiles<ATTEND_TILE>(call, head, queries, count, scores);
}

void write_cache(const LayerCall& call, int64_t kv_head, int64_t position, const float* key,
                 const float* value) {
  const auto write = [&](void* cache, int64_t type, int64_t width, const float* source) {
    with_numbers(type, [&](auto numbers) {
      using Numbers = decltype(numbers);
      uint8_t* row = head_of(cache, call, kv_head, width, Numbers::bytes) +
                     position * width * Numbers::bytes;
      for (int64_t i = 0; i < width; i += 16)
        write_some<Numbers>(row + i * Numbers::bytes, load_partial(source + i, width - i),
                            width - i);
    });
  };
  write(call.keys, call.key_type, call.layer->head_dim, key);
  write(call.values, call.value_type, call.layer->head_dim_v, value);
}

void rotate(float* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

}  // namespace specdec

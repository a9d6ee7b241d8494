// Which experts a row uses is known only when the rows have been scored, so the steps behind that
// find out themselves what their items are. A number still depends on one row alone: products do not
// depend on the rows beside it, and a row adds up its experts in the order in which it chose them.
#include "experts.h"

#include "vector.h"

namespace specdec {
namespace {

// Applies `function` to `count` numbers, sixteen at a time.
template <class Function>
void transform(float* x, int64_t count, const Function& function) {
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t width = smallest_of(count - i, 16);
    store_partial(x + i, function(load_partial(x + i, width)), width);
  }
}

// Scores to probabilities, in place.
void softmax(float* scores, int64_t count) {
  float largest_score = scores[0];
  for (int64_t i = 1; i < count; i++)
    largest_score = scores[i] > largest_score ? scores[i] : largest_score;
  transform(scores, count, [&](const f32x16& x) { return exp(x - broadcast(largest_score)); });
  f32x16 total = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += 16)
    total = total + load_partial(scores + i, smallest_of(count - i, 16));
  const f32x16 divisor = broadcast(sum(total));
  transform(scores, count, [&](const f32x16& x) { return x / divisor; });
}

// The index of the largest of `ranks` that is not among the `n_taken` indices; the first of equals.
int32_t largest_but(const float* ranks, int64_t count, const int32_t* taken, int64_t n_taken) {
  int32_t best = -1;
  for (int32_t i = 0; i < count; i++) {
    if (best >= 0 && !(ranks[i] > ranks[best])) continue;
    bool is_free = true;
    for (int64_t j = 0; j < n_taken; j++) is_free = is_free && taken[j] != i;
    if (is_free) best = i;
  }
  return best;
}

}  // namespace

ExpertBranch::ExpertBranch(const Layer& layer, const Pass& pass, const Stream& stream,
                           Scratch& scratch)
    : layer_(layer),
      experts_(*layer.experts),
      x_{stream.x, layer.n_embd, pass.n, stream.kept, layer.quantises},
      n_pairs_(pass.n * experts_.n_used),
      addition_(stream.addition),
      scores_(scratch.take(pass.n * experts_.n_expert)),
      ranks_(scratch.take(experts_.bias ? pass.n * experts_.n_expert : 0)),
      weights_(scratch.take(n_pairs_)),
      chosen_(scratch.take_ints(n_pairs_)),
      place_(scratch.take_ints(n_pairs_)),
      rows_(scratch.take_ints(n_pairs_)),
      first_(scratch.take_ints(experts_.n_expert + 1)),
      used_(scratch.take_ints(experts_.n_expert + 1)),
      inner_(n_pairs_, layer.n_ff, layer, scratch),
      outputs_(scratch.take(n_pairs_ * layer.n_embd)),
      shared_(pass.n, experts_.n_ff_shared, layer, scratch),
      shared_output_(scratch.take(experts_.n_ff_shared ? pass.n * layer.n_embd : 0)) {}

void ExpertBranch::add_steps(Steps& steps) const {
  const Experts& e = experts_;
  const int64_t blocks = blocks_of(layer_.n_ff), shared_blocks = blocks_of(e.n_ff_shared);
  const int64_t out_groups = groups(e.down.first);
  const int64_t shared_groups = e.n_ff_shared ? groups(e.shared_down) : 0;
  Product{e.router, x_, scores_}.add_step(steps);
  steps.add(x_.n, [this](Range range, int) {
    for (int64_t t = range.first; t < range.last; t++) choose(t);
  });
  steps.add(1, [this](Range, int) { sort_pairs(); });
  steps.add_late([=] { return shared_blocks + used_[0] * blocks; }, [=](Range range, int) {
    const Range own = take_items(range, shared_blocks);
    if (own.first < own.last) shared_.fill(experts_.shared_gate, experts_.shared_up, x_, own);
    for_experts(range, blocks, [this](int64_t expert, Range part) { fill_inner(expert, part); });
  });
  steps.add_late([=] { return shared_groups + used_[0] * out_groups; }, [=](Range range, int) {
    const Range own = take_items(range, shared_groups);
    if (own.first < own.last) Product{experts_.shared_down, shared_.input(), shared_output_}.run(own);
    for_experts(range, out_groups,
                [this](int64_t expert, Range part) { fill_outputs(expert, part); });
  });
}

// The experts of row t and their weights, from its scores.
void ExpertBranch::choose(int64_t t) const {
  const Experts& e = experts_;
  float* probabilities = scores_ + t * e.n_expert;
  float* ranks = e.bias ? ranks_ + t * e.n_expert : probabilities;
  float* weights = weights_ + t * e.n_used;
  int32_t* chosen = chosen_ + t * e.n_used;
  if (e.uses_sigmoid) transform(probabilities, e.n_expert, logistic);
  else softmax(probabilities, e.n_expert);
  if (e.bias)
    for (int64_t i = 0; i < e.n_expert; i++) ranks[i] = probabilities[i] + e.bias[i];
  float total = 0.0f;
  for (int64_t j = 0; j < e.n_used; j++) {
    chosen[j] = largest_but(ranks, e.n_expert, chosen, j);
    weights[j] = probabilities[chosen[j]];
    total += weights[j];
  }
  const float divisor = total < e.min_weight_sum ? e.min_weight_sum : total;
  for (int64_t j = 0; j < e.n_used; j++)
    weights[j] = (e.is_normalised ? weights[j] / divisor : weights[j]) * e.weight_scale;
}

// Counts the rows of every expert, and gives every pair its place.
void ExpertBranch::sort_pairs() const {
  const int64_t n_expert = experts_.n_expert;
  for (int64_t e = 0; e <= n_expert; e++) first_[e] = 0;
  for (int64_t pair = 0; pair < n_pairs_; pair++) first_[chosen_[pair]]++;
  int32_t end = 0;
  used_[0] = 0;
  for (int32_t e = 0; e < n_expert; e++) {
    if (first_[e]) used_[++used_[0]] = e;
    end += first_[e];
    first_[e] = end;
  }
  first_[n_expert] = end;
  for (int64_t pair = n_pairs_; pair-- > 0;) {
    place_[pair] = --first_[chosen_[pair]];
    rows_[place_[pair]] = static_cast<int32_t>(pair / experts_.n_used);
  }
}

// Calls work(expert, its items) for items counted through all experts in use.
template <class Work>
void ExpertBranch::for_experts(Range items, int64_t items_each, const Work& work) const {
  while (items.first < items.last) {
    const int64_t slot = items.first / items_each, start = slot * items_each;
    const Range part{items.first - start, smallest_of(items.last - start, items_each)};
    work(used_[1 + slot], part);
    items.first = start + part.last;
  }
}

void ExpertBranch::fill_inner(int64_t expert, Range blocks) const {
  const int64_t first = first_[expert], count = first_[expert + 1] - first;
  Input x = x_;
  x.index = rows_ + first, x.n = count;
  inner_.part(first, count).fill(experts_.gate.of(expert), experts_.up.of(expert), x, blocks);
}

void ExpertBranch::fill_outputs(int64_t expert, Range some_groups) const {
  const int64_t first = first_[expert], count = first_[expert + 1] - first;
  multiply(experts_.down.of(expert), inner_.part(first, count).input(), some_groups.first,
           some_groups.last, outputs_ + first * layer_.n_embd, layer_.n_embd);
}

// The weighted sum of the row's experts, and the shared one.
void ExpertBranch::finish_row(int64_t t) const {
  const int64_t n_used = experts_.n_used, n_embd = layer_.n_embd;
  const int32_t* place = place_ + t * n_used;
  for (int64_t i = 0; i < n_embd; i += 16) {
    const int64_t width = smallest_of(n_embd - i, 16);
    f32x16 total = broadcast(0.0f);
    for (int64_t j = 0; j < n_used; j++) {
      const f32x16 output = load_partial(outputs_ + place[j] * n_embd + i, width);
      total = fma(broadcast(weights_[t * n_used + j]), output, total);
    }
    if (experts_.n_ff_shared)
      total = total + load_partial(shared_output_ + t * n_embd + i, width);
    store_partial(addition_ + t * n_embd + i, total, width);
  }
}

}  // namespace specdec

// Layers and passes over them; the functions that Python calls. Every step of a layer is shared out
// among the threads by rows, by heads or by groups of output columns; a number is always computed by
// one thread, in one order.
#include "layer.h"

#include <cstring>
#include <deque>
#include <memory>
#include <optional>

#include "attention_branch.h"
#include "delta_net.h"
#include "experts.h"
#include "logits.h"
#include "norms.h"

namespace specdec {
namespace {

// Columns of the widest input of a product by the matrices of a layer, but those behind inner rows.
int64_t widest_input(const Layer& layer) {
  return largest_of(largest_of(layer.n_embd, layer.k.cols), layer.output.cols);
}

// Row t as layer `index` finds it, for those who want it.
void store_taps(const Pass& pass, int64_t index, int64_t t) {
  const int64_t n_embd = pass.calls[0].layer->n_embd;
  for (int64_t slot = 0; slot < pass.n_taps; slot++)
    if (pass.taps[slot] == index)
      std::memcpy(pass.tapped + (t * pass.n_taps + slot) * n_embd, pass.hidden + t * n_embd,
                  static_cast<size_t>(n_embd) * sizeof(float));
}

class LayerPass {
 public:
  LayerPass(int64_t index, const Pass& pass, const Stream& stream, Scratch scratch)
      : index(index),
        layer(*pass.calls[index].layer),
        pass(pass),
        stream(stream),
        scratch(scratch),
        mixer(new_mixer(pass.calls[index])),
        feed_forward(new_feed_forward()) {}

  int64_t scratch_size() const { return scratch.size; }

  // The steps of the layer. What comes first, `start_row`, belongs to the last step of the layer
  // before; `next` is the layer behind this one or null.
  void add_steps(Steps& steps, const LayerPass* next) const {
    mixer->add_steps(steps);
    steps.add(pass.n, [this](Range range, int) {
      for (int64_t t = range.first; t < range.last; t++) {
        add_row(t, pass.hidden, layer.post_attention_norm, layer.value_scale, 1.0f, stream.middle);
        norm_row(t, stream.middle, layer.ffn_norm);
      }
    });
    feed_forward->add_steps(steps);
    steps.add(pass.n, [this, next](Range range, int) {
      for (int64_t t = range.first; t < range.last; t++) {
        feed_forward->finish_row(t);
        add_row(t, stream.middle, layer.post_ffw_norm, 1.0f, layer.output_scale, pass.hidden);
        next ? next->start_row(t) : store_taps(pass, index + 1, t);
      }
    });
  }

  void start_row(int64_t t) const {
    store_taps(pass, index, t);
    const int64_t blocks = blocks_of(layer.k.cols);
    if (pass.inputs)
      input(pass.inputs, layer.k.cols).prepare(t * blocks, (t + 1) * blocks);
    else
      norm_row(t, pass.hidden, layer.attn_norm);
  }

 private:
  const int64_t index;
  const Layer& layer;
  const Pass& pass;
  const Stream& stream;
  Scratch scratch;
  const std::unique_ptr<const Branch> mixer, feed_forward;

  std::unique_ptr<const Branch> new_mixer(const LayerCall& call) {
    if (layer.delta_net) return std::make_unique<DeltaNetBranch>(call, pass, stream, scratch);
    return std::make_unique<AttentionBranch>(call, pass, stream, scratch);
  }

  std::unique_ptr<const Branch> new_feed_forward() {
    if (layer.experts) return std::make_unique<ExpertBranch>(layer, pass, stream, scratch);
    return std::make_unique<FeedForward>(layer, pass, stream, scratch);
  }

  Input input(const float* values, int64_t cols) const {
    return {values, cols, pass.n, stream.kept, layer.quantises};
  }

  // Row t of stream.x = the normed row, prepared for products.
  void norm_row(int64_t t, const float* rows, const float* weight) const {
    const int64_t place = t * layer.n_embd, blocks = blocks_of(layer.n_embd);
    rms_norm(rows + place, weight, layer.n_embd, layer.rms_eps, stream.x + place);
    input(stream.x, layer.n_embd).prepare(t * blocks, (t + 1) * blocks);
  }

  // out = (rows + norm(addition * factor)) * scale, for row t
  void add_row(int64_t t, const float* rows, const float* norm, float factor, float scale,
               float* out) const {
    float* addition = stream.addition + t * layer.n_embd;
    const int64_t place = t * layer.n_embd;
    if (factor != 1.0f)
      for (int64_t i = 0; i < layer.n_embd; i++) addition[i] *= factor;
    if (norm) rms_norm(addition, norm, layer.n_embd, layer.rms_eps, addition);
    for (int64_t i = 0; i < layer.n_embd; i++) out[place + i] = rows[place + i] + addition[i];
    if (scale != 1.0f)
      for (int64_t i = 0; i < layer.n_embd; i++) out[place + i] *= scale;
  }
};

}  // namespace

Stream::Stream(const Pass& pass, Scratch& scratch) {
  const int64_t n_embd = pass.calls[0].layer->n_embd;
  int64_t kept_each = 0;
  for (int64_t i = 0; i < pass.n_layers; i++) {
    const Layer& layer = *pass.calls[i].layer;
    kept_each = largest_of(kept_each, kept_floats(widest_input(layer), layer.quantises));
  }
  x = scratch.take(pass.n * n_embd), kept = scratch.take(pass.n * kept_each);
  addition = scratch.take(pass.n * n_embd), middle = scratch.take(pass.n * n_embd);
}

namespace {

void embed(const Pass& pass, int64_t t) {
  const Embedding& embedding = *pass.embedding;
  float* row = pass.hidden + t * embedding.table.cols;
  read_row(embedding.table, pass.tokens[t], row);
  for (int64_t i = 0; i < embedding.table.cols; i++) row[i] *= embedding.scale;
}

}  // namespace
}  // namespace specdec

using namespace specdec;

extern "C" {

// Sizes of the structures, to be compared with Python's.
int64_t specdec_experts_size() { return sizeof(Experts); }
int64_t specdec_delta_net_size() { return sizeof(DeltaNet); }
int64_t specdec_layer_size() { return sizeof(Layer); }
int64_t specdec_call_size() { return sizeof(LayerCall); }
int64_t specdec_head_size() { return sizeof(Head); }
int64_t specdec_pass_size() { return sizeof(Pass); }
int64_t specdec_embedding_size() { return sizeof(Embedding); }

// Logits of a row that are given in order.
int64_t specdec_n_best() { return N_BEST; }

// Floats of scratch memory that a pass needs; its own scratch is null.
int64_t specdec_scratch(const Pass* pass) {
  Scratch scratch{nullptr};
  const Stream stream(*pass, scratch);
  int64_t size = 0;
  for (int64_t i = 0; i < pass->n_layers; i++)
    size = largest_of(size, LayerPass(i, *pass, stream, scratch).scratch_size());
  return pass->n_logits ? largest_of(size, LogitsPass(*pass, {nullptr}).scratch_size()) : size;
}

// The layers one after the other, then the logits if they are wanted; 0 if there is no such token.
int64_t specdec_layers(const Pass* pass) {
  for (int64_t t = 0; pass->embedding && t < pass->n; t++)
    if (pass->tokens[t] < 0 || pass->tokens[t] >= pass->embedding->table.rows) return 0;
  Scratch scratch{pass->scratch};
  const Stream stream(*pass, scratch);
  std::deque<LayerPass> layers;
  for (int64_t i = 0; i < pass->n_layers; i++)
    layers.emplace_back(i, *pass, stream, scratch);
  Steps steps(static_cast<int>(pass->n_threads));
  steps.add(pass->n, [&](Range range, int) {
    for (int64_t t = range.first; t < range.last; t++) {
      if (pass->embedding) embed(*pass, t);
      layers[0].start_row(t);
    }
  });
  for (size_t i = 0; i < layers.size(); i++)
    layers[i].add_steps(steps, i + 1 < layers.size() ? &layers[i + 1] : nullptr);
  std::optional<LogitsPass> logits;
  if (pass->n_logits) logits.emplace(*pass, Scratch{pass->scratch}).add_steps(steps);
  run_steps(std::move(steps));
  return 1;
}

// Keys and values of every layer from the same rows, which stay as they are and are as wide as the
// matrices of keys, in all layers.
void specdec_keys_values(const Pass* pass) {
  Scratch scratch{pass->scratch};
  const Stream stream(*pass, scratch);
  const Layer& first = *pass->calls[0].layer;
  const Input given{pass->hidden, first.k.cols, pass->n, stream.kept, first.quantises};
  std::deque<AttentionBranch> branches;
  Steps steps(static_cast<int>(pass->n_threads));
  steps.add(pass->n * blocks_of(given.cols),
            [&](Range range, int) { given.prepare(range.first, range.last); });
  for (int64_t i = 0; i < pass->n_layers; i++) {
    Scratch own = scratch;
    branches.emplace_back(pass->calls[i], *pass, stream, own).add_key_value_steps(steps, given);
  }
  run_steps(std::move(steps));
}

}  // extern "C"

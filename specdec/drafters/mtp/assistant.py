"""The Gemma 4 assistant: an MTP head that reads keys and values of the target's last two layers.

It sees what the target has read, which ends before the last token; only the hidden row h carries
the last token and the tokens drafted since. So all steps stand at one position n:

    x = pre_projection [sqrt(D) embd t ; h]
    per layer: queries, rotated at n, attend to keys and values of the target's layer n_layer - 2
               (sliding layers) or n_layer - 1; norms, feed-forward, output scale as in the target
    y = rms(x) * output_norm;   logits = token_embd y;   hidden output = post_projection y

The target's cache belongs to the loop. Keys and values depend on a layer's input alone, so they are
computed here once more, from taps, and nothing is shared but weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.drafters.mtp.model import MTPModel
from specdec.errors import MismatchError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models import gemma4
from specdec.models.base import Target
from specdec.models.layers import DecoderLayer, LayerSpec, RotaryEmbedding, attention
from specdec.models.loading import check_names, load_weights
from specdec.models.rows import Rows
from specdec.native import find_library
from specdec.native.modules import Packer
from specdec.options import Activations, Kernels, RopeOptions


class AssistantLayer(DecoderLayer):
    """A decoder layer that attends to keys and values it is given."""

    def add_attention(self, spec: LayerSpec) -> None:
        """See `DecoderLayer.add_attention`; there are no keys and values."""
        n_q = spec.n_head * spec.head_dim
        self.attn_q = nn.Linear(spec.n_embd, n_q, bias=False)
        self.attn_q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_eps)
        self.attn_output = nn.Linear(spec.n_head * spec.head_dim_v, spec.n_embd, bias=False)

    def run(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor
    ) -> Tensor:
        """[1, D] -> [1, D] at the position behind ``keys`` and ``values`` [Hkv, n, Dh]."""
        spec = self.spec
        q = self.queries(self.attn_norm(hidden), rotary)
        first = max(0, keys.shape[1] - spec.window + 1) if spec.window else 0
        mixed = attention(q, keys[:, first:], values[:, first:]).flatten(1)
        hidden = hidden + self.project_attention(mixed)
        x = self.ffn_norm(hidden)
        return self.finish(hidden, self.feed_forward(x, Rows(0, 1, exact=False)))


class Assistant(nn.Module):
    """The tensors of the file, under their names there."""

    def __init__(self, specs: Sequence[LayerSpec], n_vocab: int, n_embd_target: int) -> None:
        super().__init__()
        n_embd = specs[0].n_embd
        self.layers = [AssistantLayer(spec) for spec in specs]
        self.blk = nn.ModuleList(self.layers)
        self.token_embd = nn.Linear(n_embd, n_vocab, bias=False)  # embeds nothing, only scores
        self.output_norm = nn.RMSNorm(n_embd, eps=specs[0].rms_eps)
        self.nextn = nn.ModuleDict(
            {
                "pre_projection": nn.Linear(2 * n_embd_target, n_embd, bias=False),
                "post_projection": nn.Linear(n_embd, n_embd_target, bias=False),
            }
        )


class AssistantModel(MTPModel):
    """The assistant together with what it uses of its target."""

    def __init__(self, assistant: Assistant, target: Target, device: torch.device) -> None:
        last = target.config.n_layer - 1
        self.assistant = assistant
        self.target = target
        self.device = device
        self.sources = (last - 1, last)
        self.taps = (*self.sources, target.config.final_tap)
        self.n_embd = target.config.n_embd
        self.n_max = None
        self.cache_shapes = [target.cache_shape(layer) for layer in self.sources]
        self._rotary = [RotaryEmbedding(layer.spec.rope) for layer in assistant.layers]

    def read(self, tokens: Tensor, taps: Tensor, before: Tensor, cache: KVCache) -> None:
        """See `MTPModel.read`: makes the keys and values that the target has of these rows."""
        for slot, layer in enumerate(self.sources):
            rows = taps[:, slot].to(self.target.device)
            k, v = self.target.keys_values(layer, rows, cache.length)
            cache.append(slot, k.to(self.device), v.to(self.device))
        cache.advance(tokens.shape[0])

    def step(self, tokens: Tensor, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """See `MTPModel.step`: one row, whatever was drafted before, at the cache's length."""
        model, scale = self.assistant, self.target.config.embedding_scale
        embedding = self.target.embed(tokens[-1:].to(self.target.device)).to(self.device) * scale
        x = model.nextn["pre_projection"](torch.cat((embedding, hidden[-1:]), dim=-1))
        position = torch.tensor([cache.length], device=self.device)
        for layer, rotary in zip(model.layers, self._rotary, strict=True):
            keys, values = cache.committed(0 if layer.spec.window else 1, x.dtype)
            x = layer.run(x, rotary(position), keys, values)
        normed = model.output_norm(x)[0]
        return model.token_embd(normed).float(), model.nextn["post_projection"](normed)


def load_assistant(
    file: GGUFFile,
    target: Target,
    rope: RopeOptions,
    device: torch.device,
    *,
    kernels: Kernels = "torch",
    activations: Activations = "int8",
) -> AssistantModel:
    """The assistant in ``file`` for ``target``, whose rotary overrides ``rope`` it shares.

    ``kernels``: see `specdec.models.load_target`; native ones have its matrices and norms.
    Raises `MismatchError` if its heads do not fit the target's keys and values, `ModelFileError`
    for a missing, left-over or misshapen tensor.
    """
    n_block = file.get_int(file.key("block_count"))
    specs = [gemma4.read_spec(file, rope, layer) for layer in range(n_block)]
    with torch.device("meta"):
        assistant = Assistant(specs, target.config.n_vocab, target.config.n_embd)
    model = AssistantModel(assistant, target, device)
    for index, spec in enumerate(specs):
        source = model.cache_shapes[0 if spec.window else 1]
        if spec.cache_shape != source:
            raise MismatchError(
                f"{file.path}: block {index} reads {spec.cache_shape.describe()}, the target's "
                f"layer {model.sources[0 if spec.window else 1]} keeps {source.describe()}; use a "
                "draft made for this target"
            )
    ignored = ["rope_freqs.weight"]
    check_names([assistant], file, ignored=ignored)
    library = find_library(kernels, device)
    if library is not None:
        Packer(library, file, activations).pack(assistant)
        ignored = list(file.tensors)
    load_weights(assistant, file, ignored=ignored)
    assistant.to(device).requires_grad_(False).eval()
    return model

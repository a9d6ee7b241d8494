"""draft-eagle3: one decoder layer that reads hidden states of the target.

An encoder turns three taps x_P of position P into ``g_P = fc x_P``. The decoder's row at position P
is the pair (token at P + 1, g_P), so the newest observed row waits for its token. A draft continues
with its own states in place of g. References: EAGLE-3 (arXiv 2503.01840), llama.cpp's
`src/models/eagle3.cpp` and `common/speculative.cpp`.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from specdec.drafters.base import N_BEST, Draft, DraftSampler, Pick, as_candidates, to_host
from specdec.drafters.eagle3_layer import NativePairLayer, PairLayer
from specdec.drafters.eagle3_validate import N_TAPS
from specdec.drafters.selection import DraftContext
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache
from specdec.models.base import Target, read_layer_spec
from specdec.models.layers import LayerSpec, RotaryEmbedding
from specdec.models.loading import check_names, load_modules, rotary_to_halves
from specdec.native import find_library, knows
from specdec.native.modules import Packer
from specdec.options import Activations, DraftOptions, Kernels, RopeOptions, SamplingOptions

log = logging.getLogger(__name__)

NORMED_FINAL = ("qwen35", "qwen35moe", "qwen3next", "gemma4", "nemotron_h_moe", "bailingmoe3")
"""Targets whose final state llama.cpp gives after the output norm; drafts are trained on it."""


class Eagle3Decoder(nn.Module):
    """Encoder and decoder, without embeddings and output matrix; parameters carry GGUF names."""

    def __init__(self, file: GGUFFile, target: Target) -> None:
        """The modules for a file, built on the meta device; weights come later."""
        super().__init__()
        spec = read_block(file)
        n_features = N_TAPS * file.get_int(file.key("target_hidden_size"))
        self.spec = spec
        self.taps = read_taps(file, target)
        self.fc = nn.Linear(n_features, spec.n_embd, bias=False)
        if file.get_bool(file.key("norm_before_fc"), default=False):
            self.enc = nn.ModuleDict({"output_norm": nn.RMSNorm(n_features, eps=spec.rms_eps)})
        before = file.get_bool(file.key("norm_before_residual"), default=False)
        self.blk = nn.ModuleList([PairLayer(spec, norm_before_residual=before)])
        self.output_norm = nn.RMSNorm(spec.n_embd, eps=spec.rms_eps)
        self._rotary = [RotaryEmbedding(spec.rope)]  # a list: its tables stay on the host

    @property
    def layer(self) -> PairLayer | NativePairLayer:
        """The decoder's one layer."""
        return self.blk[0]  # type: ignore[return-value]

    def encode(self, hidden: Tensor) -> Tensor:
        """The states g [T, D] of the target's taps [T, 3, D_target]."""
        features = hidden.flatten(1)
        if hasattr(self, "enc"):
            features = self.enc["output_norm"](features)
        return self.fc(features)  # type: ignore[no-any-return]

    def remember(self, embeddings: Tensor, states: Tensor, cache: KVCache) -> None:
        """Appends keys and values of pairs [T, D], [T, D] at positions ``cache.length`` ..."""
        rotary = self._angles(cache.length, states)
        self.layer.write_pairs(embeddings, states, rotary, cache)
        cache.advance(states.shape[0])

    def forward(self, embeddings: Tensor, states: Tensor, cache: KVCache) -> Tensor:
        """The state [1, D] before the output norm of one pair [1, D], [1, D] behind the cache."""
        rotary = self._angles(cache.length, states)
        hidden = self.layer.run(embeddings, states, rotary, cache)
        cache.advance(1)
        return hidden

    def _angles(self, start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary[0](torch.arange(start, start + rows.shape[0]))
        return cos.to(rows.device), sin.to(rows.device)


@dataclass(frozen=True, slots=True)
class Eagle3Model:
    """A loaded draft."""

    decoder: Eagle3Decoder
    vocabulary: DraftVocabulary
    n_ctx_train: int
    device: torch.device


class Eagle3Drafter:
    """Drafts token by token with ``model`` over a context of ``n_ctx`` tokens.

    Between calls the cache holds the pairs of all observed tokens but the newest, whose g waits
    for its token as the last row of ``_states``. Rows of drafting are dropped after each draft and
    written again from the target's states, so that nothing of a rejected token is left.
    """

    name = "draft-eagle3"

    def __init__(
        self,
        model: Eagle3Model,
        options: DraftOptions,
        n_ctx: int,
        *,
        dtype_k: torch.dtype = torch.float32,
        dtype_v: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.taps = model.decoder.taps
        self.options = options
        self.n_max = options.n_max
        self.n_ctx = n_ctx
        self._dtypes = (dtype_k, dtype_v)
        self._warned = False
        self._cache, self._states = self._new_caches()
        self._sampler = DraftSampler(options, SamplingOptions())

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        """See `Drafter.begin`."""
        if kept:
            self._states.truncate(kept)
            self._cache.truncate(kept - 1)
        else:
            self._cache, self._states = self._new_caches()
        self._sampler = DraftSampler(self.options, sampling)
        return kept

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        """Encodes the taps [T, 3, D_target] of T tokens and writes the pairs they complete."""
        assert hidden is not None
        model, waiting = self.model, self._waiting()
        states = model.decoder.encode(hidden.to(model.device))
        completing = tokens[1 - waiting.shape[0] :]
        if completing.shape[0]:
            embeddings = model.vocabulary.embed(completing.to(model.device))
            model.decoder.remember(embeddings, torch.cat((waiting, states[:-1])), self._cache)
        self._states.append(0, states[:, None], states[:, None, :0])
        self._states.advance(states.shape[0])

    def draft(self, last_token: int, room: int) -> Draft:
        """Up to `n_max` tokens; ends before the first one whose confidence is below `p_min`.

        Drafts shorter than `n_min` are dropped if they are greedy and it is not for lack of room. A
        drawn draft stands: to drop it for what was drawn would favour the other tokens.
        """
        length, state = min(self.n_max, room), self._waiting()
        if not state.shape[0]:
            return Draft()
        self._warn_past_training(length)
        start, token = self._cache.length, last_token
        end = "n_max" if length == self.n_max else "room"
        picks: list[Pick] = []
        while len(picks) < length:
            logits, state = self.step(token, state)
            pick = self._pick(logits)
            if pick.confidence < self.options.p_min:
                end = "p_min"
                break
            picks.append(pick)
            token = pick.token
        self._cache.truncate(start)
        is_short = end != "room" and len(picks) < self.options.n_min
        if is_short and not self._sampler.samples:
            return Draft(end="n_min")
        return Draft([pick.token for pick in picks], as_candidates(picks), end)

    def step(self, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the pair (token, state [1, D]) behind the cache and leaves its row there.

        Gives the logits [VD] of the next token and the state [1, D] that stands in for its g.
        """
        model = self.model
        embeddings = model.vocabulary.embed(torch.tensor([token], device=model.device))
        hidden = model.decoder(embeddings, state, self._cache)
        return model.vocabulary.logits(model.decoder.output_norm(hidden))[0], hidden

    def accept(self, accepted: int) -> None:
        """Nothing: a draft leaves no trace, and accepted tokens are observed like all others."""

    def _waiting(self) -> Tensor:
        """The newest g, [1, D]; [0, D] before the first observed token."""
        return self._states.committed(0, torch.float32)[0][0, -1:]

    def _pick(self, logits: Tensor) -> Pick:
        best, rows = logits.topk(min(N_BEST, logits.shape[-1]))
        scores, ids = to_host(best, self.model.vocabulary.to_target(rows))
        return self._sampler.pick(scores, ids)

    def _new_caches(self) -> tuple[KVCache, KVCache]:
        """The decoder's keys and values, and the states g of all observed tokens."""
        (dtype_k, dtype_v), device = self._dtypes, self.model.device
        spec = self.model.decoder.spec
        pairs = KVCache(
            [spec.cache_shape], self.n_ctx, device=device, dtype_k=dtype_k, dtype_v=dtype_v
        )
        return pairs, KVCache([CacheShape(1, spec.n_embd, 0)], self.n_ctx, device=device)

    def _warn_past_training(self, length: int) -> None:
        n_train = self.model.n_ctx_train
        if self._warned or not n_train or self._cache.length + length <= n_train:
            return
        self._warned = True
        log.warning(
            "%s: the draft model was trained for a context of %d tokens; "
            "fewer of its drafts may be accepted past it",
            self.name,
            n_train,
        )


def read_taps(file: GGUFFile, target: Target) -> tuple[int, ...]:
    """The three taps of the target; the id behind its last layer is its final state."""
    layers = file.get_ints(file.key("target_layers"), length=N_TAPS)
    n_layer, is_normed = target.config.n_layer, target.config.architecture in NORMED_FINAL
    if n_layer in layers:
        log.info(
            "%s: layer %d is the target's final state, %s its output norm",
            file.path,
            n_layer,
            "after" if is_normed else "before",
        )
    return tuple(-1 if is_normed and layer == n_layer else layer for layer in layers)


def read_block(file: GGUFFile) -> LayerSpec:
    """The decoder layer of a draft; raises `ModelFileError` for impossible sizes."""
    with torch.device("cpu"):  # reads `rope_freqs`, while modules are built on the meta device
        spec = read_layer_spec(file, RopeOptions())
    if spec.head_dim_v != spec.head_dim:
        raise ModelFileError(
            f"{file.path}: {file.key('attention.value_length')} is {spec.head_dim_v}, expected "
            f"{spec.head_dim} as {file.key('attention.key_length')}"
        )
    return replace(
        spec,
        attention_scale=1.0 / math.sqrt(spec.head_dim),
        has_qkv_bias=False,
        has_output_bias=False,
        n_expert=0,
    )


def load(
    file: GGUFFile,
    target: Target,
    device: torch.device | str = "cpu",
    *,
    kernels: Kernels = "torch",
    activations: Activations = "int8",
) -> Eagle3Model:
    """The draft in ``file`` on ``device``, with float32 weights or packed ones (native kernels).

    ``kernels``: see `specdec.models.load_target`. Raises `ModelFileError` for a missing, left-over
    or misshapen tensor.
    """
    with torch.device("meta"):
        decoder = Eagle3Decoder(file, target)
        vocabulary = DraftVocabulary(file, decoder.spec.n_embd, target)
    # llama.cpp reads the layer's factors and does not apply them.
    scales = [name for name in file.tensors if re.fullmatch(r"blk\.0\.\w+\.scale", name)]
    if scales:
        log.warning("%s: %s and the like are ignored, as in llama.cpp", file.path, scales[0])
    modules, transform = [decoder, vocabulary], rotary_to_halves([decoder.spec])
    ignored = ["rope_freqs.weight", *scales]
    check_names(modules, file, ignored=ignored)
    library = find_library(kernels, device)
    if library is not None:
        packer = Packer(library, file, activations, transform)
        if isinstance(decoder.layer, PairLayer) and knows(decoder.spec):
            decoder.blk[0] = NativePairLayer(library, decoder.layer, packer)
        for module in modules:
            packer.pack(module)
        ignored = list(file.tensors)
    load_modules(modules, file, ignored=ignored, transform=transform)
    for module in modules:
        module.to(device).requires_grad_(False).eval()
    n_ctx_train = file.get_int(file.key("context_length"))
    return Eagle3Model(decoder, vocabulary, n_ctx_train, torch.device(device))


def build(context: DraftContext) -> Eagle3Drafter:
    """The drafter for the draft file of ``context``."""
    assert context.draft_file is not None
    model = load(
        context.draft_file,
        context.target,
        context.device,
        kernels=context.kernels,
        activations=context.activations,
    )
    return Eagle3Drafter(
        model,
        context.draft_options(),
        context.n_ctx,
        dtype_k=context.dtype_k,
        dtype_v=context.dtype_v,
    )

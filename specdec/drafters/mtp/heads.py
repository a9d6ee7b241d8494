"""MTP heads with keys and values of their own: one that is repeated, or several in a chain.

For a pair (token t, hidden row h) at position P a head computes

    x  = eh_proj [rms(embd t) * enorm ; rms(h) * hnorm]
    x' = decoder layer (x)                        rotated at P, with a cache of its own
    y  = rms(x') * shared_head_norm               logits = head y

and its hidden output, the next step's h, is y or x', of the same kind as the target's own h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.drafters.mtp.model import MTPModel
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models import MTP_ARCHITECTURES
from specdec.models.base import Target, count_mtp_layers
from specdec.models.layers import DecoderLayer, LayerSpec, RotaryEmbedding, new_embedding
from specdec.models.loading import block_of, check_names, load_modules
from specdec.models.rows import Rows
from specdec.native import find_library
from specdec.native.modules import Packer
from specdec.options import Activations, Kernels, RopeOptions


class NextN(nn.Module):
    """What a head has besides its decoder layer; files store it as ``blk.N.nextn``."""

    def __init__(self, file: GGUFFile, block: int, n_vocab: int, spec: LayerSpec) -> None:
        super().__init__()
        n_embd, eps = spec.n_embd, spec.rms_eps
        self.eh_proj = nn.Linear(2 * n_embd, n_embd, bias=False)
        self.enorm = nn.RMSNorm(n_embd, eps=eps)
        self.hnorm = nn.RMSNorm(n_embd, eps=eps)
        if f"blk.{block}.nextn.embed_tokens.weight" in file.tensors:
            self.embed_tokens = new_embedding(n_vocab, n_embd)
        if f"blk.{block}.nextn.shared_head_head.weight" in file.tensors:
            self.shared_head_head = nn.Linear(n_embd, n_vocab, bias=False)
        if f"blk.{block}.nextn.shared_head_norm.weight" in file.tensors:
            self.shared_head_norm = nn.RMSNorm(n_embd, eps=eps)


class Ends(nn.Module):
    """Embeddings, norm and output matrix of a separate file; else they are the target's."""

    output: nn.Module

    def __init__(self, file: GGUFFile, n_vocab: int, spec: LayerSpec) -> None:
        super().__init__()
        self.token_embd = new_embedding(n_vocab, spec.n_embd)
        self.output_norm = nn.RMSNorm(spec.n_embd, eps=spec.rms_eps)
        if "output.weight" in file.tensors:
            self.output = nn.Linear(spec.n_embd, n_vocab, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `Target.embed`."""
        return self.token_embd(tokens)  # type: ignore[no-any-return]

    def lm_head(self, hidden: Tensor) -> Tensor:
        """See `Target.lm_head`."""
        if hasattr(self, "output"):
            return self.output(hidden).float()  # type: ignore[no-any-return]
        return F.linear(hidden, self.token_embd.weight).float()


class MTPBlocks(nn.Module):
    """The heads' decoder layers, each with its `NextN`, under the names that files use."""

    def __init__(
        self, file: GGUFFile, first: int, n_vocab: int, specs: Sequence[LayerSpec]
    ) -> None:
        super().__init__()
        layers = [spec.new_layer() for spec in specs]
        self.nextn = [
            NextN(file, block, n_vocab, spec) for block, spec in enumerate(specs, start=first)
        ]
        self.blk = nn.ModuleDict()
        for block, (layer, nextn) in enumerate(zip(layers, self.nextn, strict=True), first):
            layer.add_module("nextn", nextn)
            if f"blk.{block}.layer_output_norm.weight" in file.tensors:
                norm = nn.RMSNorm(layer.spec.n_embd, eps=layer.spec.rms_eps)
                layer.add_module("layer_output_norm", norm)
            self.blk[str(block)] = layer

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder layers in order."""
        return list(self.blk.values())  # type: ignore[arg-type]


class MTPHeads(MTPModel):
    """The heads of one file and the ends that they share."""

    def __init__(
        self, blocks: MTPBlocks, ends: Ends | Target, final_tap: int, device: torch.device
    ) -> None:
        self._layers, self._nextn = blocks.layers, blocks.nextn
        specs = [layer.spec for layer in self._layers]
        self.ends = ends
        self.device = device
        self.taps = (final_tap,)
        self.n_embd = specs[0].n_embd
        self.n_max = len(specs) if len(specs) > 1 else None
        self.cache_shapes = [spec.cache_shape for spec in specs]
        self._rotary = [RotaryEmbedding(spec.rope) for spec in specs]

    def read(self, tokens: Tensor, taps: Tensor, before: Tensor, cache: KVCache) -> None:
        """See `MTPModel.read`: every head reads every pair, of which only its keys are needed."""
        for head, layer in enumerate(self._layers):
            x = self._join(head, tokens, before)
            layer.remember(x, cache, head, self._angles(head, cache.length, tokens.shape[0]))
        cache.advance(tokens.shape[0])

    def step(self, tokens: Tensor, hidden: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """See `MTPModel.step`.

        A single head has read the earlier pairs in the steps before. In a chain every step has its
        own head, which reads the whole draft.
        """
        if self.n_max is None:
            head = 0
            out = self._run(head, tokens[-1:], hidden[-1:], cache)
            cache.advance(1)
        else:
            head = tokens.shape[0] - 1
            out = self._run(head, tokens, hidden, cache)
        normed = self._norm(head, out[-1])
        return self._logits(head, normed), normed if self.taps == (-1,) else out[-1]

    def _run(self, head: int, tokens: Tensor, hidden: Tensor, cache: KVCache) -> Tensor:
        """x' [T, D] of T pairs behind the committed ones; appends them to the head's layer."""
        rows = Rows(cache.length, tokens.shape[0], exact=False)
        rotary = self._angles(head, rows.start, rows.count)
        return self._layers[head](self._join(head, tokens, hidden), cache, head, rotary, rows)  # type: ignore[no-any-return]

    def _join(self, head: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """x [T, D], what a head's decoder layer reads of pairs [T], [T, D]."""
        nextn = self._nextn[head]
        own = getattr(nextn, "embed_tokens", None)
        embeddings = self.ends.embed(tokens) if own is None else own(tokens)
        embeddings = embeddings.to(self.device)
        joined = torch.cat((nextn.enorm(embeddings), nextn.hnorm(hidden)), dim=-1)
        return nextn.eh_proj(joined)  # type: ignore[no-any-return]

    def _angles(self, head: int, start: int, n: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + n, device=self.device)
        return self._rotary[head](positions)  # type: ignore[no-any-return]

    def _norm(self, head: int, x: Tensor) -> Tensor:
        nextn, layer = self._nextn[head], self._layers[head]
        own = getattr(nextn, "shared_head_norm", None) or getattr(layer, "layer_output_norm", None)
        return (own or self.ends.output_norm)(x)  # type: ignore[no-any-return]

    def _logits(self, head: int, normed: Tensor) -> Tensor:
        own = getattr(self._nextn[head], "shared_head_head", None)
        return self.ends.lm_head(normed) if own is None else own(normed).float()


def load_heads(
    file: GGUFFile,
    target: Target,
    rope: RopeOptions,
    device: torch.device,
    *,
    is_separate: bool = False,
    kernels: Kernels = "torch",
    activations: Activations = "int8",
) -> MTPHeads:
    """The MTP layers in ``file``, the target's own (on its device) or a separate one.

    ``rope`` are the user's overrides for the target; ``kernels``: see `specdec.models.load_target`.
    Layers that native kernels do not know run on torch, with packed matrices. Raises
    `ModelFileError` for a missing, left-over or misshapen tensor.
    """
    read_spec = MTP_ARCHITECTURES.load(file.architecture)
    end = file.get_int(file.key("block_count"))
    first = end - count_mtp_layers(file)
    specs = [read_spec(file, rope, layer) for layer in range(first, end)]
    n_vocab = target.config.n_vocab
    with torch.device("meta"):
        blocks = MTPBlocks(file, first, n_vocab, specs)
        ends = Ends(file, n_vocab, specs[0]) if is_separate else target
    device = device if is_separate else target.device
    modules = [blocks, ends] if isinstance(ends, Ends) else [blocks]
    ignored = [name for name in file.tensors if block_of(name) < first]
    check_names(modules, file, ignored=ignored)
    library = find_library(kernels, device)
    if library is not None:
        packer = Packer(library, file, activations)
        if isinstance(ends, Ends) and not hasattr(ends, "output"):
            ends.output = packer.linear("token_embd.weight")
        for module in modules:
            packer.pack(module)
        ignored = list(file.tensors)
    load_modules(modules, file, ignored=ignored)
    for module in modules:
        module.to(device).requires_grad_(False).eval()
    return MTPHeads(blocks, ends, target.config.final_tap, device)

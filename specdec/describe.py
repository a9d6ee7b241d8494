"""What is inside a GGUF file, and whether a draft fits a target; headers only, no weights read.

The answer of `describe` is plain data for a command or a script to show. The verdict of `judge` is
made by the very checks that loading runs. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from specdec.chat import TEMPLATE_KEY, find_template
from specdec.describe_draft import DraftDescription, describe_draft
from specdec.drafters.selection import choose_types, draft_type
from specdec.errors import MismatchError, ModelFileError, UnsupportedError, UsageError
from specdec.gguf_file import GGUFFile, TensorInfo
from specdec.models import ARCHITECTURES, check_architecture
from specdec.options import DraftOptions, SpecOptions

Sizes = int | tuple[int, ...] | None
Kind = Literal["target", "draft", "vocabulary"]
Fault = Literal["mismatch", "damaged", "unsupported"]

INTEGER_BYTES = {"I8": 1, "I16": 2, "I32": 4, "I64": 8}
"""Tensor types that stay integers when loaded; all others become float32."""


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The tensors of one GGML type."""

    ggml_type: str
    n_tensors: int
    n_elements: int
    n_bytes: int
    """Size in the file; 0 for a type that is not known."""


@dataclass(frozen=True, slots=True)
class TokenizerDescription:
    """The vocabulary of a file."""

    model: str | None
    pre: str | None
    n_vocab: int
    bos_id: int | None
    bos_text: str | None
    eos_id: int | None
    eos_text: str | None
    adds_bos: bool | None
    """None: the file leaves it to the pre-tokenizer."""
    has_chat_template: bool
    chat_templates: tuple[str, ...]
    """Names of further templates."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a run needs here."""

    weights: int
    """All tensors, float32."""
    cache_per_1k: int | None
    """Keys and values of 1000 tokens in float32; None if the tensors do not say."""


@dataclass(frozen=True, slots=True)
class Description:
    """What one model, whole or split, says about itself."""

    path: Path
    kind: Kind
    architecture: str
    name: str | None
    is_supported: bool
    """Whether specdec runs it as what it is."""
    n_bytes: int
    """Size of all files."""
    n_tensors: int
    n_parameters: int
    types: tuple[TypeShare, ...]
    """The quantisation mix, largest share first."""
    n_layer: int | None
    n_embd: int | None
    n_ctx_train: int | None
    n_head: Sizes
    n_head_kv: Sizes
    head_dim: Sizes
    n_ff: Sizes
    n_expert: int | None
    n_expert_used: int | None
    rope_freq_base: float | None
    rope_scaling: str | None
    sliding_window: int | None
    tokenizer: TokenizerDescription | None
    draft: DraftDescription | None
    """What it drafts with: a draft file, or a target with prediction layers of its own."""
    memory: Memory

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file per parameter; 0 without tensors."""
        n_bytes = sum(share.n_bytes for share in self.types)
        return 8 * n_bytes / self.n_parameters if self.n_parameters else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a draft can be used with a target."""

    target: Path
    draft: Path
    fits: bool
    spec_type: str | None
    """The spec type that would run; None if it does not fit."""
    fault: Fault | None = None
    reason: str | None = None
    """What differs, with both values, and what to do."""


def describe(file: GGUFFile) -> Description:
    """What ``file`` is. Raises `ModelFileError` for metadata of a wrong type."""
    draft = describe_draft(file)
    kind: Kind = "draft" if draft is not None and draft.is_standalone else "target"
    kind = kind if file.tensors else "vocabulary"
    return Description(
        path=file.path,
        kind=kind,
        architecture=file.architecture,
        name=file.get_str("general.name", default=None),
        is_supported=_is_supported(file, kind, draft),
        n_bytes=file.n_bytes,
        n_tensors=len(file.tensors),
        n_parameters=sum(
            info.n_elements for info in file.tensors.values() if info.ggml_type not in INTEGER_BYTES
        ),
        types=_type_shares(file.tensors.values()),
        n_layer=_integer(file, "block_count"),
        n_embd=_integer(file, "embedding_length"),
        n_ctx_train=_integer(file, "context_length"),
        n_head=_sizes(file, "attention.head_count"),
        n_head_kv=_sizes(file, "attention.head_count_kv"),
        head_dim=_head_dim(file),
        n_ff=_sizes(file, "feed_forward_length"),
        n_expert=_integer(file, "expert_count"),
        n_expert_used=_integer(file, "expert_used_count"),
        rope_freq_base=file.get_float(file.key("rope.freq_base"), default=None),
        rope_scaling=file.get_str(file.key("rope.scaling.type"), default=None),
        sliding_window=_integer(file, "attention.sliding_window"),
        tokenizer=_describe_tokenizer(file),
        draft=draft,
        memory=Memory(_loaded_bytes(file), _cache_per_1k(file)),
    )


def judge(target: GGUFFile, draft: GGUFFile) -> Verdict:
    """Whether ``draft`` can be used with ``target``, by the checks that loading runs."""
    try:
        check_architecture(target)
        spec_type = draft_type(draft)
        spec = SpecOptions(types=(spec_type,), draft=DraftOptions(path=draft.path))
        choose_types(spec, target, draft)
    except MismatchError as error:
        return Verdict(target.path, draft.path, False, None, "mismatch", str(error))
    except (UnsupportedError, UsageError) as error:
        return Verdict(target.path, draft.path, False, None, "unsupported", str(error))
    except ModelFileError as error:
        return Verdict(target.path, draft.path, False, None, "damaged", str(error))
    return Verdict(target.path, draft.path, True, spec_type)


def _is_supported(file: GGUFFile, kind: Kind, draft: DraftDescription | None) -> bool:
    if kind == "draft":
        return draft is not None and draft.is_supported
    return kind == "vocabulary" or file.architecture in ARCHITECTURES


def _integer(file: GGUFFile, suffix: str) -> int | None:
    return file.get_int(file.key(suffix), default=None)


def _sizes(file: GGUFFile, suffix: str) -> Sizes:
    """A number, or one a layer where layers differ."""
    key = file.key(suffix)
    if not isinstance(file.metadata.get(key), np.ndarray):
        return file.get_int(key, default=None)
    values = tuple(file.get_ints(key))
    return values[0] if len(set(values)) == 1 else values


def _head_dim(file: GGUFFile) -> Sizes:
    """``key_length``, or the width divided among the heads."""
    stated = _sizes(file, "attention.key_length")
    n_embd, n_head = _integer(file, "embedding_length"), _sizes(file, "attention.head_count")
    if stated is not None or n_embd is None or not isinstance(n_head, int) or n_head < 1:
        return stated
    return n_embd // n_head


def _type_shares(tensors: Iterable[TensorInfo]) -> tuple[TypeShare, ...]:
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in tensors:
        counts[info.ggml_type] += 1
        elements[info.ggml_type] += info.n_elements
        sizes[info.ggml_type] += info.n_bytes
    shares = [TypeShare(name, counts[name], elements[name], sizes[name]) for name in counts]
    return tuple(sorted(shares, key=lambda share: (-share.n_bytes, share.ggml_type)))


def _describe_tokenizer(file: GGUFFile) -> TokenizerDescription | None:
    prefix = "tokenizer.ggml."
    if prefix + "tokens" not in file.metadata:
        return None
    bos = file.get_int(prefix + "bos_token_id", default=None)
    eos = file.get_int(prefix + "eos_token_id", default=None)
    texts = file.get_strs(prefix + "tokens")
    named = f"{TEMPLATE_KEY}."
    return TokenizerDescription(
        model=file.get_str(prefix + "model", default=None),
        pre=file.get_str(prefix + "pre", default=None),
        n_vocab=len(texts),
        bos_id=bos,
        bos_text=_text(texts, bos),
        eos_id=eos,
        eos_text=_text(texts, eos),
        adds_bos=file.get_bool(prefix + "add_bos_token", default=None),
        has_chat_template=find_template(file.metadata) is not None,
        chat_templates=tuple(
            key.removeprefix(named) for key in file.metadata if key.startswith(named)
        ),
    )


def _text(texts: Sequence[str], token: int | None) -> str | None:
    return texts[token] if token is not None and 0 <= token < len(texts) else None


def _loaded_bytes(file: GGUFFile) -> int:
    return sum(
        info.n_elements * INTEGER_BYTES.get(info.ggml_type, 4) for info in file.tensors.values()
    )


def _cache_per_1k(file: GGUFFile) -> int | None:
    """Bytes that attention keeps of 1000 tokens, from the shapes of the projections.

    Layers without keys (recurrent ones, assistants) keep nothing per token.
    """
    n_head, head_dim = _sizes(file, "attention.head_count"), _head_dim(file)
    width = 0
    for name, info in file.tensors.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if not layer.startswith("blk.") or len(info.shape) != 2:
            continue
        if part in ("attn_kv", "attn_kv_a_mqa"):
            width += info.shape[0]
        elif part == "attn_k":
            values = file.tensors.get(f"{layer}.attn_v.weight", info)
            width += info.shape[0] + values.shape[0]
        elif part == "attn_qkv" and f"{layer}.ssm_out.weight" not in file.tensors:
            if not isinstance(n_head, int) or not isinstance(head_dim, int):
                return None
            width += max(info.shape[0] - n_head * head_dim, 0)
    return 4 * 1000 * width if file.tensors else None

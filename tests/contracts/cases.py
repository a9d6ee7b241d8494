"""The table behind the contract tests: one row per spec type, and how a row becomes a drafter.

A new spec type is added with one row; if it needs a draft file, the row names a function that
writes it.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tiny
import tiny_drafts
import tiny_mtp
import torch
from fakes import ForcedVerifier
from torch import Tensor

from specdec.drafters.base import Draft, Drafter, FirstOf
from specdec.drafters.selection import DraftContext, build_drafters, choose_types
from specdec.generate import Limits, Round, decode
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import (
    DraftOptions,
    NgramMapK4VOptions,
    NgramMapKOptions,
    NgramModOptions,
    NgramSimpleOptions,
    SamplingOptions,
    SpecOptions,
)

N_CTX = 256
PROMPT = [70, 71, 72, 73, 74] * 3 + [75, 70, 71, 72, 73, 74, 70, 71]


@dataclass(frozen=True)
class Case:
    """One spec type, or several, over the tiny target."""

    id: str
    types: tuple[str, ...]
    write_draft: Callable[[Path], Path] | None = None
    """Writes the draft file for the tiny target; None = the type needs none."""
    target: str = "llama"
    """Architecture of the tiny target."""
    sampled: bool = False
    """Drafts are sampled and verified by rejection."""
    follows_rounds: bool = False
    """By design its drafts depend on earlier rounds or requests, not on the history alone."""


def _perfect(path: Path) -> Path:
    return tiny.write_target(path)


def _liar(path: Path) -> Path:
    return tiny.write_target(path, negated=True)


def _dflash(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, window=6)


def _dflash_lucky(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, d2t=_common_tokens())


def _dflash2(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-dflash2", block_size=6)


def _dflash2_lucky(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-dflash2", d2t=_common_tokens(), window=9)


def _eagle3(path: Path) -> Path:
    return tiny_drafts.write_eagle3(path, norm_before_fc=True)


def _eagle3_lucky(path: Path) -> Path:
    return tiny_drafts.write_eagle3(path, n_embd=24, d2t=_common_tokens())


def _dspark(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-dspark")


def _dspark_bonus(path: Path) -> Path:
    """Drafts from the second slot on and says nothing about its confidence."""
    return tiny_drafts.write_dflash(
        path,
        head="draft-dspark",
        block_size=4,
        metadata={"dflash.sample_from_anchor": False},
        tensors={"conf_proj.weight": None, "conf_proj.bias": None},
    )


def _dspark_gated(path: Path) -> Path:
    return tiny_drafts.write_dflash(
        path, head="draft-dspark", block_size=7, tensors=tiny_drafts.joint_projection("joint_proj")
    )


def _dspark_lucky(path: Path) -> Path:
    return tiny_drafts.write_dflash(
        path, head="draft-dspark", d2t=_common_tokens(), window=5, seed=2
    )


def _dspark_deepseek4(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-dspark", backbone="deepseek4")


def _dspark_deepseek41(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-dspark", backbone="deepseek4.1")


def _dspark_mistral_large4(path: Path) -> Path:
    return tiny_drafts.write_dflash(
        path,
        head="draft-dspark",
        backbone="mistral-large4",
        d2t=_common_tokens(),
        metadata={"dflash.final_logit_softcapping": 2.0},
        tensors=tiny_drafts.joint_projection("joint_proj"),
    )


def _lilicorr(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-lilicorr", window=6)


def _lilicorr_lucky(path: Path) -> Path:
    return tiny_drafts.write_dflash(path, head="draft-lilicorr", block_size=4, d2t=_common_tokens())


def _assistant(path: Path) -> Path:
    return tiny_mtp.write_assistant(path)


def _common_tokens() -> tuple[int, ...]:
    """The two tokens that plain decoding emits most: a draft of these is right now and then."""
    target, cache = tiny_target(), tiny_target().new_cache(N_CTX)
    text = list(PROMPT)
    with torch.inference_mode():
        for _ in range(60):
            logits = target(torch.tensor(text[cache.length :]), cache, logit_rows=1).logits
            text.append(int(logits[0].argmax()))
    common = Counter(text[len(PROMPT) :]).most_common(2)
    return tuple(token for token, _ in common)


CASES = (
    Case("ngram-simple", ("ngram-simple",)),
    Case("ngram-map-k", ("ngram-map-k",), follows_rounds=True),
    Case("ngram-map-k4v", ("ngram-map-k4v",), follows_rounds=True),
    Case("ngram-mod", ("ngram-mod",), follows_rounds=True),
    Case("ngram-cache", ("ngram-cache",)),
    Case("draft-simple-perfect", ("draft-simple",), _perfect),
    Case("draft-simple-liar", ("draft-simple",), _liar),
    Case("draft-simple-sampled", ("draft-simple",), _perfect, sampled=True),
    Case("draft-dflash", ("draft-dflash",), _dflash),
    Case("draft-dflash-lucky", ("draft-dflash",), _dflash_lucky),
    Case("draft-dflash2", ("draft-dflash2",), _dflash2),
    Case("draft-dflash2-lucky", ("draft-dflash",), _dflash2_lucky),
    Case("draft-dflash2-sampled", ("draft-dflash2",), _dflash2, sampled=True),
    Case("draft-eagle3-lucky", ("draft-eagle3",), _eagle3_lucky),
    Case("draft-eagle3-sampled", ("draft-eagle3",), _eagle3, sampled=True),
    Case("draft-dspark", ("draft-dspark",), _dspark),
    Case("draft-dspark-bonus", ("draft-dspark",), _dspark_bonus),
    Case("draft-dspark-gated", ("draft-dspark",), _dspark_gated),
    Case("draft-dspark-lucky", ("draft-dflash",), _dspark_lucky),
    Case("draft-dspark-sampled", ("draft-dspark",), _dspark_gated, sampled=True),
    Case("draft-dspark-deepseek4", ("draft-dspark",), _dspark_deepseek4),
    Case("draft-dspark-deepseek4.1", ("draft-dspark",), _dspark_deepseek41),
    Case("draft-dspark-mistral-large4", ("draft-dflash",), _dspark_mistral_large4),
    Case("draft-lilicorr", ("draft-lilicorr",), _lilicorr),
    Case("draft-lilicorr-lucky", ("draft-dflash",), _lilicorr_lucky),
    Case("draft-lilicorr-sampled", ("draft-lilicorr",), _lilicorr, sampled=True),
    Case("draft-mtp-hybrid", ("draft-mtp",), target="qwen35"),
    Case("draft-mtp-chained", ("draft-mtp",), target="mimo2"),
    Case("draft-mtp-assistant", ("draft-mtp",), _assistant, target="gemma4"),
    Case("draft-mtp-sampled", ("draft-mtp",), target="hy_v3", sampled=True),
    Case("mixed", ("draft-simple", "ngram-cache", "ngram-mod"), _liar, follows_rounds=True),
)
DETERMINISTIC = tuple(case for case in CASES if not case.sampled)
WITHOUT_FILE = tuple(case for case in CASES if case.types[0].startswith("ngram"))


def name(value: object) -> str | None:
    """How pytest shows a row."""
    return value.id if isinstance(value, Case) else None


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def _target_file(architecture: str) -> GGUFFile:
    path = Path(_folder().name) / f"{architecture}.gguf"
    if architecture in tiny_mtp.BLOCKS:
        n_heads = 3 if architecture == "mimo2" else 1
        return GGUFFile.open(tiny_mtp.write_mtp(path, architecture, n_heads=n_heads))
    return GGUFFile.open(tiny.write_target(path, architecture=architecture))


@functools.cache
def tiny_target(architecture: str = "llama") -> Target:
    """A real target, loaded once."""
    return load_target(_target_file(architecture))


@functools.cache
def _draft_file(write: Callable[[Path], Path]) -> GGUFFile:
    return GGUFFile.open(write(Path(_folder().name) / f"draft-{write.__name__}.gguf"))


def spec_options(case: Case, n_max: int) -> SpecOptions:
    """Short keys, so that short texts have matches; ``n_max`` for every type."""
    return SpecOptions(
        types=case.types,
        draft=DraftOptions(n_max=n_max, sampling="probabilistic" if case.sampled else "greedy"),
        ngram_simple=NgramSimpleOptions(size_n=1, size_m=n_max),
        ngram_map_k=NgramMapKOptions(size_n=1, size_m=n_max),
        ngram_map_k4v=NgramMapK4VOptions(size_n=1, size_m=n_max),
        ngram_mod=NgramModOptions(n_match=2, n_min=0, n_max=n_max),
    )


def build(case: Case, n_max: int = 4) -> FirstOf:
    """The drafters of a row, ready for `begin`, made for its tiny target."""
    spec, target_file = spec_options(case, n_max), _target_file(case.target)
    draft_file = None if case.write_draft is None else _draft_file(case.write_draft)
    context = DraftContext(
        spec=replace(spec),
        target=tiny_target(case.target),
        target_file=target_file,
        draft_file=draft_file,
        n_ctx=N_CTX,
        cache_types=(torch.float32, torch.float32),
        dtype_k=torch.float32,
        dtype_v=torch.float32,
        device=torch.device("cpu"),
    )
    return build_drafters(choose_types(spec, target_file, draft_file), context)


class Recorder:
    """Passes everything on to a drafter; keeps its drafts; may cut up what it is shown."""

    def __init__(self, inner: Drafter, piece: int = N_CTX) -> None:
        self.inner = inner
        self.piece = piece
        self.name, self.taps, self.n_max = inner.name, inner.taps, inner.n_max
        self.drafts: list[Draft] = []

    def begin(self, sampling: SamplingOptions, kept: int = 0) -> int:
        return self.inner.begin(sampling, kept)

    def observe(self, tokens: Tensor, hidden: Tensor | None) -> None:
        for start in range(0, len(tokens), self.piece):
            part = slice(start, start + self.piece)
            self.inner.observe(tokens[part], None if hidden is None else hidden[part])

    def draft(self, last_token: int, room: int) -> Draft:
        self.drafts.append(self.inner.draft(last_token, room))
        return self.drafts[-1]

    def accept(self, accepted: int) -> None:
        self.inner.accept(accepted)


def forced_rounds(
    case: Case,
    drafter: Drafter,
    accepted: Sequence[int],
    prompt: Sequence[int] = PROMPT,
    n_batch: int = N_CTX,
    kept: int = 0,
) -> list[int]:
    """The text after one round per entry of ``accepted`` over a row's target, prompt included.

    ``drafter`` has begun and holds the first ``kept`` tokens.
    """
    target = tiny_target(case.target)
    cache = target.new_cache(N_CTX)
    if kept:
        target(torch.tensor(prompt[:kept]), cache, logit_rows=0)
    text = list(prompt)
    verifier = ForcedVerifier(accepted)
    rounds: Iterator[Round] = decode(
        target, cache, drafter, verifier, prompt, Limits(N_CTX, n_batch=n_batch)
    )
    for _ in accepted:
        text += next(rounds).tokens
    return text


def show(case: Case, drafter: Drafter, text: Sequence[int], start: int = 0) -> None:
    """``drafter`` observes the tokens of ``text`` from ``start`` on, with the target's taps."""
    tokens, target = torch.tensor(text), tiny_target(case.target)
    output = target(tokens, target.new_cache(N_CTX), taps=drafter.taps, logit_rows=0)
    drafter.observe(tokens[start:], None if output.hidden is None else output.hidden[start:])


def assert_same_draft(found: Draft, expected: Draft) -> None:
    """Tokens, author and q of two drafts agree.

    Drawn tokens depend on how far the random stream has come, so of sampled drafts the first
    distribution is compared, which both drew from.
    """
    assert found.drafter == expected.drafter
    if found.q is None or expected.q is None:
        assert (found.tokens, found.q) == (expected.tokens, expected.q)
        return
    assert found.q.ids[0].tolist() == expected.q.ids[0].tolist()
    torch.testing.assert_close(found.q.probs[0], expected.q.probs[0], rtol=1e-4, atol=1e-6)

"""Sampled drafts, verified by rejection, leave the target's distribution exactly as it is.

The target is memoryless: its next token has the same distribution p everywhere, so one long reply
is a sample of independent tokens, and the target need not be run again for each round.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch

from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.model import load
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions
from specdec.sampling import build_chain
from specdec.verify import Verifier

PROMPT = [70, 71, 72, 73]
N_TOKENS, N_CTX = 1200, 64
N_BINS = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("t") / "t.gguf"
    file = tiny.write_target(path, memoryless=True, sharpness=1.2, n_ctx=N_CTX)
    return load_target(GGUFFile.open(file))


def chi_square(tokens: list[int], p: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom over the likeliest tokens, the others in one bin."""
    order = p.argsort(descending=True)[:N_BINS]
    order = order[p[order] * len(tokens) >= 5]
    counts = torch.bincount(torch.tensor(tokens), minlength=len(p)).double()
    found = [*counts[order].tolist(), float(counts.sum() - counts[order].sum())]
    expected = [*(p[order] * len(tokens)).tolist(), float((1 - p[order].sum()) * len(tokens))]
    terms = [(f - e) ** 2 / e for f, e in zip(found, expected, strict=True) if e > 1e-6]
    assert all(f == 0 for f, e in zip(found, expected, strict=True) if e <= 1e-6)
    return sum(terms), len(terms) - 1


def quantile(freedom: int) -> float:
    """What chi-square exceeds once in ten thousand (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("has_reduced_vocabulary", [False, True])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("head", tiny_drafts.HEADS)
@torch.inference_mode()
def test_emitted_tokens_have_the_targets_distribution(
    target: Target, tmp_path: Path, head: str, top_k: int, has_reduced_vocabulary: bool
) -> None:
    sampling = SamplingOptions(temp=0.9, seed=17, top_k=top_k, top_p=1.0, min_p=0.0)
    chain = build_chain(sampling, n_vocab=tiny.N_VOCAB, end_tokens=frozenset())
    output = target(torch.tensor(PROMPT), target.new_cache(N_CTX), taps=(0, 2))
    p = chain.distribution(output.logits[-1]).double()
    likely = p.argsort(descending=True)[:12].tolist()
    path = tiny_drafts.write_dflash(
        tmp_path / "d.gguf",
        head=head,
        d2t=tuple(sorted(likely[::2])) if has_reduced_vocabulary else (),
    )
    options = DraftOptions(n_max=3, sampling="probabilistic")
    drafter = DFlashDrafter(load(GGUFFile.open(path), target), options, N_CTX)
    drafter.begin(sampling)
    drafter.observe(torch.tensor(PROMPT), output.hidden)
    chain.begin(PROMPT)
    verifier = Verifier(chain, frozenset())
    tokens, accepted, drafted = [PROMPT[-1]], 0, 0
    while len(tokens) <= N_TOKENS:
        draft = drafter.draft(tokens[-1], 3)
        emitted = verifier.verify(draft, output.logits[-1].expand(len(draft.tokens) + 1, -1))
        tokens += emitted
        accepted += len(emitted) - 1
        drafted += len(draft.tokens)
    statistic, freedom = chi_square(tokens[1:], p)
    assert statistic < quantile(freedom)
    assert drafted >= len(tokens)
    if has_reduced_vocabulary and top_k == 0:
        assert 0 < accepted < drafted


@pytest.mark.parametrize(("n_min", "top_k"), [(0, 0), (2, 3)])
@torch.inference_mode()
def test_lengths_that_depend_on_drawn_tokens(
    target: Target, tmp_path: Path, n_min: int, top_k: int
) -> None:
    """Two tokens are drafted with equal probability, and a draft ends behind one of them. If short
    drafts were dropped, the other one would be emitted too often."""
    sampling = SamplingOptions(temp=0.9, seed=23, top_k=top_k, top_p=1.0, min_p=0.0)
    chain = build_chain(sampling, n_vocab=tiny.N_VOCAB, end_tokens=frozenset())
    output = target(torch.tensor(PROMPT), target.new_cache(N_CTX), taps=(0, 2))
    p = chain.distribution(output.logits[-1]).double()
    rank, drafted = tiny_drafts.DSPARK_RANK, p.argsort(descending=True)[:2].tolist()
    tensors = {
        "output.weight": np.zeros((2, 32), np.float32),
        "markov_w1.weight": np.ones((tiny.N_VOCAB, rank), np.float32),
        "markov_w2.weight": np.zeros((2, rank), np.float32),
        "conf_proj.weight": np.repeat(np.float32([[0, 1]]), (32, rank), axis=1),
        "conf_proj.bias": None,
    }
    tensors["markov_w1.weight"][drafted[0]] = -1
    path = tiny_drafts.write_dflash(
        tmp_path / "d.gguf", head="draft-dspark", d2t=tuple(drafted), tensors=tensors
    )
    options = DraftOptions(n_max=3, n_min=n_min, p_min=0.5, sampling="probabilistic")
    drafter = DFlashDrafter(load(GGUFFile.open(path), target), options, N_CTX)
    drafter.begin(sampling)
    drafter.observe(torch.tensor(PROMPT), output.hidden)
    chain.begin(PROMPT)
    verifier = Verifier(chain, frozenset())
    tokens, lengths = [PROMPT[-1]], set()
    while len(tokens) <= N_TOKENS:
        draft = drafter.draft(tokens[-1], 3)
        lengths.add(len(draft.tokens))
        tokens += verifier.verify(draft, output.logits[-1].expand(len(draft.tokens) + 1, -1))
    statistic, freedom = chi_square(tokens[1:], p)
    assert statistic < quantile(freedom)
    assert lengths == {0, 1, 2, 3}

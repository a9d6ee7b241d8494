"""The driver: the waiting pair, lengths, cut-offs, sampling, and that no state is left behind."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor

from specdec.drafters.base import Draft
from specdec.drafters.eagle3 import Eagle3Drafter, load
from specdec.errors import ModelFileError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions

TEXT = [70, 71, 72, 73, 74, 75, 76, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103]
GREEDY = SamplingOptions(temp=0)
K = 4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf")))


@pytest.fixture
def make(tmp_path: Path, target: Target) -> Any:
    """A drafter that has begun, from draft options and from what the file shall contain."""

    def run(options: DraftOptions, n_ctx: int = 256, **draft: Any) -> Eagle3Drafter:
        file = GGUFFile.open(tiny_drafts.write_eagle3(tmp_path / "d.gguf", **draft))
        drafter = Eagle3Drafter(load(file, target), options, n_ctx)
        drafter.begin(GREEDY)
        return drafter

    return run


def taps(target: Target, drafter: Eagle3Drafter, text: list[int]) -> Tensor:
    output = target(torch.tensor(text), target.new_cache(256), taps=drafter.taps, logit_rows=0)
    assert output.hidden is not None
    return output.hidden


def show(target: Target, drafter: Eagle3Drafter, text: list[int], start: int = 0) -> None:
    drafter.observe(torch.tensor(text[start:]), taps(target, drafter, text)[start:])


def next_logits(drafter: Eagle3Drafter, token: int) -> Tensor:
    """Logits of the first step of a draft; the drafter stays as it was."""
    start = drafter._cache.length
    logits, _ = drafter.step(token, drafter._waiting())
    drafter._cache.truncate(start)
    return logits


def step_by_step(drafter: Eagle3Drafter, token: int, n: int) -> list[tuple[int, float]]:
    """Best token and its softmax over the ten best logits, for n steps of a greedy draft."""
    start, state, found = drafter._cache.length, drafter._waiting(), []
    for _ in range(n):
        logits, state = drafter.step(token, state)
        token = int(logits.argmax())
        found.append((token, float(logits.topk(10).values.softmax(0)[0])))
    drafter._cache.truncate(start)
    return found


def test_the_newest_row_waits_for_its_token(make: Any, target: Target) -> None:
    drafter = make(DraftOptions(n_max=K))
    assert drafter.draft(70, 8) == Draft()
    for n_seen in range(1, 5):
        show(target, drafter, TEXT[:n_seen], n_seen - 1)
        assert drafter._cache.length == n_seen - 1
        assert len(drafter.draft(TEXT[n_seen], 8).tokens) == K
        assert drafter._cache.length == n_seen - 1


@pytest.mark.parametrize("accepted", list(itertools.product(range(K + 1), repeat=2)))
def test_after_every_accept_count_logits_are_those_of_a_fresh_drafter(
    make: Any, target: Target, accepted: tuple[int, int]
) -> None:
    drafter, text = make(DraftOptions(n_max=K)), TEXT[:12]
    show(target, drafter, text[:-1])
    for n_accepted in accepted:
        n_seen = len(text) - 1
        tokens = drafter.draft(text[-1], 8).tokens
        drafter.accept(n_accepted)
        text = [*text, *tokens[:n_accepted], 105 + n_accepted]
        show(target, drafter, text[:-1], n_seen)
    fresh = make(DraftOptions(n_max=K))
    show(target, fresh, text[:-1])
    expected = next_logits(fresh, text[-1])
    torch.testing.assert_close(next_logits(drafter, text[-1]), expected, atol=1e-5, rtol=1e-5)


def test_no_pair_of_a_rejected_token_stays(make: Any, target: Target) -> None:
    """A partial rejection, then a round without a draft: llama.cpp leaves the rejected token's pair
    at the waiting position and goes on with its keys and values."""
    drafter, fresh = make(DraftOptions(n_max=K)), make(DraftOptions(n_max=K))
    show(target, drafter, TEXT[:8])
    draft = drafter.draft(TEXT[8], 8).tokens
    drafter.accept(1)
    text = [*TEXT[:9], draft[0], 200, 201, 202]
    show(target, drafter, text[:10], 8)  # the last token and one accepted one
    show(target, drafter, text[:11], 10)  # a round without a draft
    show(target, drafter, text[:12], 11)
    show(target, fresh, text[:12])
    keys, values = drafter._cache.committed(0, torch.float32)
    expected_keys, expected_values = fresh._cache.committed(0, torch.float32)
    torch.testing.assert_close(keys, expected_keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, expected_values, atol=1e-5, rtol=1e-5)
    found, expected = next_logits(drafter, 202), next_logits(fresh, 202)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("n_max", "room", "length", "end"),
    [
        (4, 9, 4, "n_max"),
        (4, 4, 4, "n_max"),
        (4, 2, 2, "room"),
        (1, 1, 1, "n_max"),
        (0, 3, 0, "n_max"),
    ],
)
def test_lengths(make: Any, target: Target, n_max: int, room: int, length: int, end: str) -> None:
    drafter = make(DraftOptions(n_max=n_max))
    show(target, drafter, TEXT)
    draft = drafter.draft(105, room)
    assert (len(draft.tokens), draft.end, draft.q) == (length, end, None)
    assert draft.tokens == [token for token, _ in step_by_step(drafter, 105, length)]


def test_p_min_and_n_min(make: Any, target: Target) -> None:
    """A draft ends before the first unlikely token, and is dropped if it is too short."""
    drafter = make(DraftOptions(n_max=K))
    show(target, drafter, TEXT)
    picks = step_by_step(drafter, 105, K)
    confidences = [confidence for _, confidence in picks]
    assert len(set(confidences)) == K
    for p_min in [*confidences, 0.999]:
        kept = next((i for i, value in enumerate(confidences) if value < p_min), K)
        drafter.options = DraftOptions(n_max=K, p_min=p_min)
        draft = drafter.draft(105, 8)
        assert draft.tokens == [token for token, _ in picks[:kept]]
        assert draft.end == ("p_min" if kept < K else "n_max")
        drafter.options = DraftOptions(n_max=K, p_min=p_min, n_min=K)
        draft = drafter.draft(105, 8)
        assert (len(draft.tokens), draft.end) == ((K, "n_max") if kept == K else (0, "n_min"))


def test_n_min_counts_before_the_cut_to_the_room(make: Any, target: Target) -> None:
    drafter = make(DraftOptions(n_max=K, n_min=3))
    show(target, drafter, TEXT)
    assert len(drafter.draft(105, 2).tokens) == 2


def test_drawn_drafts_are_not_dropped_for_being_short(make: Any, target: Target) -> None:
    options = DraftOptions(n_max=8, n_min=8, p_min=0.3, sampling="probabilistic")
    drafter, lengths = make(options), set()
    for seed in range(8):
        drafter.begin(SamplingOptions(temp=0.8, seed=seed))
        show(target, drafter, TEXT)
        lengths |= {len(drafter.draft(token, 8).tokens) for token in range(20, 40)}
    assert lengths & set(range(1, 8))


def test_sampled_drafts_carry_the_distribution_they_were_drawn_from(
    make: Any, target: Target
) -> None:
    drafter = make(DraftOptions(n_max=3, sampling="probabilistic"))
    drafts = []
    for seed in range(4):
        drafter.begin(SamplingOptions(temp=0.7, seed=seed))
        show(target, drafter, TEXT)
        draft = drafter.draft(105, 8)
        assert draft.q is not None
        assert draft.q.ids.shape == draft.q.probs.shape == (3, 10)
        assert all(t in ids for t, ids in zip(draft.tokens, draft.q.ids.tolist(), strict=True))
        best = next_logits(drafter, 105).topk(10)
        assert draft.q.ids[0].tolist() == best.indices.tolist()
        torch.testing.assert_close(draft.q.probs[0], (best.values / 0.7).softmax(0))
        drafts.append(draft.tokens)
    assert len({tuple(tokens) for tokens in drafts}) > 1
    drafter.begin(GREEDY)
    show(target, drafter, TEXT)
    assert drafter.draft(105, 8).q is None


def test_reduced_vocabulary(make: Any, target: Target) -> None:
    d2t = (200, 7, 103, 90)
    drafter = make(DraftOptions(n_max=8, sampling="probabilistic"), d2t=d2t)
    drafter.begin(SamplingOptions(temp=1.0, seed=1))
    show(target, drafter, TEXT)
    draft = drafter.draft(105, 8)
    assert set(draft.tokens) <= set(d2t)
    assert draft.q is not None
    assert sorted(draft.q.ids[0].tolist()) == sorted(d2t)


def test_ends_are_borrowed_from_the_target(make: Any, target: Target) -> None:
    """A draft with copies of the target's tables drafts as one that borrows them."""
    ours = make(DraftOptions(n_max=K))
    config = target.config
    copies = {
        "token_embd.weight": target.embed(torch.arange(config.n_vocab)).numpy(),
        "output.weight": target.lm_head(torch.eye(config.n_embd)).T.contiguous().numpy(),
    }
    drafts = []
    for drafter in (ours, make(DraftOptions(n_max=K), tensors=copies)):
        show(target, drafter, TEXT)
        drafts.append(drafter.draft(105, 8).tokens)
    assert drafts[0] == drafts[1]


def test_past_the_trained_context_it_goes_on_and_says_so_once(
    make: Any, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make(DraftOptions(n_max=2), metadata={"eagle3.context_length": 8})
    for n_seen in (4, 10, 12):
        drafter.begin(GREEDY)
        show(target, drafter, TEXT[:n_seen])
        assert len(drafter.draft(105, 8).tokens) == 2
        assert caplog.text.count("trained for a context of 8 tokens") == (n_seen > 4)


def test_factors_of_matrices_are_ignored_with_a_warning(
    make: Any, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make(DraftOptions(n_max=K))
    scale = {"blk.0.attn_q.scale": np.array([0.5], np.float32)}
    scaled = make(DraftOptions(n_max=K), tensors=scale)
    assert "blk.0.attn_q.scale and the like are ignored" in caplog.text
    for drafter in (plain, scaled):
        show(target, drafter, TEXT)
    assert torch.equal(next_logits(plain, 105), next_logits(scaled, 105))


@pytest.mark.parametrize(
    "name", ["fc.scale", "output.scale", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"]
)
def test_other_tensors_are_errors(make: Any, name: str) -> None:
    with pytest.raises(ModelFileError, match=rf"not part of a eagle3 model, first {name}"):
        make(DraftOptions(), tensors={name: np.ones(1, np.float32)})


def test_ignored_metadata(make: Any, target: Target) -> None:
    plain = make(DraftOptions(n_max=K))
    metadata = {
        "eagle3.attention.scale": 0.3,
        "eagle3.attention.sliding_window": 3,
        "eagle3.embedding_scale": 2.0,
        "eagle3.logit_scale": 0.5,
    }
    other = make(DraftOptions(n_max=K), metadata=metadata)
    for drafter in (plain, other):
        show(target, drafter, TEXT)
    assert torch.equal(next_logits(plain, 105), next_logits(other, 105))


def test_keys_and_values_differ_in_width(make: Any) -> None:
    with pytest.raises(ModelFileError, match=r"attention.value_length is 4, expected 8"):
        make(DraftOptions(), metadata={"eagle3.attention.value_length": 4})


def test_the_final_state_is_what_the_target_gives_its_own_heads(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the output norm, or after it for targets where llama.cpp takes it there."""
    caplog.set_level(logging.INFO)
    path = tiny_drafts.write_eagle3(tmp_path / "d.gguf", target_layers=(2, 0, 2))
    with GGUFFile.open(path) as file:
        plain = load(file, target)
        assert "layer 2 is the target's final state, before its output norm" in caplog.text
        relabelled = copy.copy(target)
        relabelled.config = replace(target.config, architecture="gemma4")
        normed = load(file, relabelled)
        assert "layer 2 is the target's final state, after its output norm" in caplog.text
    assert plain.decoder.taps == (2, 0, 2)
    assert normed.decoder.taps == (-1, 0, -1)
    hidden = target(torch.tensor(TEXT), target.new_cache(32), taps=(2, -1), logit_rows=0).hidden
    assert hidden is not None
    torch.testing.assert_close(hidden[:, 1], target.output_norm(hidden[:, 0]))

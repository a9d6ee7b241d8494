"""The driver: lengths, cut-offs, sampling, and that no state is left behind."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafts
import torch
from torch import Tensor

from specdec.drafters.base import Candidates
from specdec.drafters.dflash.dflash2 import DFlash2Head
from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.dspark import DSparkHead
from specdec.drafters.dflash.lilicorr import LiliCorrHead
from specdec.drafters.dflash.model import load
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import KVCache
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions

TEXT = [70, 71, 72, 73, 74, 75, 76, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103]
BLOCK = 5
HEADS = list(tiny_drafts.HEADS)
GREEDY = SamplingOptions(temp=0)


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

    def run(options: DraftOptions, n_ctx: int = 256, **draft: Any) -> DFlashDrafter:
        file = GGUFFile.open(tiny_drafts.write_dflash(tmp_path / "d.gguf", **draft))
        drafter = DFlashDrafter(load(file, target), options, n_ctx)
        drafter.begin(GREEDY)
        return drafter

    return run


def taps(target: Target, drafter: DFlashDrafter, text: list[int]) -> Tensor:
    output = target(torch.tensor(text), target.new_cache(256), taps=drafter.taps, logit_rows=0)
    assert output.hidden is not None
    return output.hidden


def show(target: Target, drafter: DFlashDrafter, text: list[int], start: int = 0) -> None:
    drafter.observe(torch.tensor(text[start:]), taps(target, drafter, text)[start:])


def scores(drafter: DFlashDrafter, last_token: int, n_draft: int) -> Tensor:
    """What the head compares: logits, or the lattice."""
    block = drafter.run(last_token, n_draft)
    head = drafter.model.head
    if isinstance(head, DFlash2Head):
        return head.lattice(block.hidden[1:], last_token)[1]
    if isinstance(head, DSparkHead):
        return head.chain(block, n_draft)[0]
    if isinstance(head, LiliCorrHead):
        return head.lattice(block.hidden[1:], block.anchor)[1]
    return drafter.model.vocabulary.logits(block.hidden)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("n_max", range(BLOCK + 3))
def test_drafts_are_clamped_to_the_block(
    make: Any, target: Target, head: str, n_max: int, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make(DraftOptions(n_max=n_max), head=head, block_size=BLOCK)
    show(target, drafter, TEXT)
    longest = drafter.model.head.n_max
    draft = drafter.draft(105, room=50)
    assert len(draft.tokens) == drafter.n_max == min(n_max, longest)
    assert draft.end == "n_max"
    warned = [r.message for r in caplog.records if "exceeds the trained block size" in r.message]
    wanted = f"(n_max={n_max}, n_min=0) exceeds the trained block size 5 -- clamping to {longest}"
    assert len(warned) == (n_max > longest)
    assert all(wanted in message for message in warned)


@pytest.mark.parametrize("head", HEADS)
def test_n_min_is_clamped_too(make: Any, head: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = make(DraftOptions(n_max=2, n_min=9), head=head, block_size=BLOCK)
    assert drafter.options.n_min == drafter.model.head.n_max
    assert "n_max=2, n_min=9" in caplog.text


@pytest.mark.parametrize("head", HEADS)
def test_room_shortens_the_draft(make: Any, target: Target, head: str) -> None:
    drafter = make(DraftOptions(n_max=4), head=head, block_size=BLOCK)
    show(target, drafter, TEXT)
    for room in range(1, 4):
        draft = drafter.draft(105, room)
        assert (len(draft.tokens), draft.end) == (room, "room")


@pytest.mark.parametrize("head", HEADS)
def test_p_min_ends_a_draft_before_the_first_unlikely_token(
    make: Any, target: Target, head: str
) -> None:
    whole = make(DraftOptions(n_max=4), head=head)
    show(target, whole, TEXT)
    block = whole.run(105, 4)
    picks = whole.model.head.propose(block, 4, whole._sampler)
    confidences = [pick.confidence for pick in picks]
    assert len(set(confidences)) == 4
    for p_min in confidences:
        drafter = make(DraftOptions(n_max=4, p_min=p_min), head=head)
        show(target, drafter, TEXT)
        kept = next((i for i, value in enumerate(confidences) if value < p_min), 4)
        draft = drafter.draft(105, 4)
        assert draft.tokens == [pick.token for pick in picks[:kept]]
        assert draft.end == ("p_min" if kept < 4 else "n_max")
        picky = make(DraftOptions(n_max=4, p_min=p_min, n_min=4), head=head)
        show(target, picky, TEXT)
        assert len(picky.draft(105, 4).tokens) == (4 if kept == 4 else 0)
        assert picky.draft(105, 4).end == ("n_max" if kept == 4 else "n_min")


def test_confidence_of_the_plain_head_is_over_the_ten_best(make: Any, target: Target) -> None:
    drafter = make(DraftOptions(n_max=3))
    show(target, drafter, TEXT)
    block = drafter.run(105, 3)
    picks = drafter.model.head.propose(block, 3, drafter._sampler)
    logits = drafter.model.vocabulary.logits(block.hidden)
    for pick, row in zip(picks, logits[1:], strict=True):
        assert pick.token == int(row.argmax())
        assert pick.confidence == pytest.approx(float(row.topk(10).values.softmax(0)[0]), rel=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_no_drafts_past_the_trained_context(
    make: Any, target: Target, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The block shrinks until its last slot is at the last trained position; that is said once."""
    n_train = 24
    metadata = {"dflash.context_length": n_train}
    drafter = make(DraftOptions(n_max=4), head=head, metadata=metadata)
    text = [70 + i for i in range(n_train + 4)]
    lengths = []
    for n_seen in range(18, n_train + 4):
        drafter.begin(GREEDY)
        show(target, drafter, text[:n_seen])
        draft = drafter.draft(105, 4)
        lengths.append(len(draft.tokens))
        assert not draft.tokens or n_seen + drafter.model.head.block_len(lengths[-1]) <= n_train
    assert lengths[0] == 4
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-4:] == [0, 0, 0, 0]
    assert caplog.text.count("trained for a context of 24 tokens") == 1


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_do_not_depend_on_what_was_drafted_before(
    make: Any, target: Target, head: str, window: int, causal: bool
) -> None:
    """After any accept counts the next block gives the numbers of a fresh drafter."""
    metadata = {"dflash.attention.causal": causal}
    options = DraftOptions(n_max=3)
    used = make(options, head=head, window=window, metadata=metadata)
    show(target, used, TEXT[:8])
    position = 8
    for accepted in (0, 3, 1, 2):
        assert len(used.draft(TEXT[position], 3).tokens) == 3
        used.accept(accepted)
        end = position + accepted + 1
        show(target, used, TEXT[:end], position)
        position = end
        fresh = DFlashDrafter(used.model, options, 256)
        fresh.begin(GREEDY)
        show(target, fresh, TEXT[:position])
        expected = scores(fresh, TEXT[position], 3)
        torch.testing.assert_close(scores(used, TEXT[position], 3), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_a_kept_prefix_and_a_copy(make: Any, target: Target, head: str) -> None:
    drafter = make(DraftOptions(n_max=3), head=head)
    show(target, drafter, TEXT)
    expected = scores(drafter, 105, 3)
    second = copy.copy(drafter)
    second.begin(GREEDY)
    show(target, second, TEXT[::-1])
    torch.testing.assert_close(scores(drafter, 105, 3), expected, rtol=0, atol=0)
    assert drafter.begin(GREEDY, 5) == 5
    show(target, drafter, TEXT, 5)
    torch.testing.assert_close(scores(drafter, 105, 3), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_the_first_token_of_a_text(make: Any, head: str) -> None:
    """Nothing has been observed yet: the block attends to itself alone."""
    drafter = make(DraftOptions(n_max=3), head=head)
    assert len(drafter.draft(70, 3).tokens) == 3


@pytest.mark.parametrize("head", HEADS)
def test_a_draft_is_one_pass_that_leaves_the_cache_alone(
    make: Any, target: Target, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(DraftOptions(n_max=4), head=head)
    show(target, drafter, TEXT)
    passes: list[int] = []
    trunk = drafter.model.trunk
    run = type(trunk).run

    def counted(self: Any, embeddings: Tensor, *rest: Any) -> Any:
        passes.append(embeddings.shape[0])
        return run(self, embeddings, *rest)

    def no_append(*_: Any) -> None:
        pytest.fail("a draft wrote to the cache")

    monkeypatch.setattr(type(trunk), "run", counted)
    monkeypatch.setattr(KVCache, "append", no_append)
    assert len(drafter.draft(105, 4).tokens) == 4
    assert passes == [drafter.model.head.block_len(4)]


def test_plain_drafts_have_no_distribution(
    make: Any, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    drafter = make(DraftOptions(n_max=4, sampling="probabilistic"))
    assert "draft-dflash has no draft distribution" in caplog.text
    drafter.begin(SamplingOptions(temp=1.0, seed=1))
    show(target, drafter, TEXT)
    greedy = make(DraftOptions(n_max=4))
    show(target, greedy, TEXT)
    draft = drafter.draft(105, 4)
    assert draft.q is None
    assert draft.tokens == greedy.draft(105, 4).tokens


def sampled(make: Any, target: Target, seed: int, temperature: float = 0.7) -> DFlashDrafter:
    options = DraftOptions(n_max=3, sampling="probabilistic")
    drafter: DFlashDrafter = make(options, head="draft-dflash2")
    drafter.begin(SamplingOptions(temp=temperature, seed=seed))
    show(target, drafter, TEXT)
    return drafter


def test_sampled_dflash2_drafts_follow_their_q(make: Any, target: Target) -> None:
    """q is the softmax of the walked lattice rows at the request's temperature, and tokens are
    drawn from it; the same seed gives the same drafts."""
    drafter = sampled(make, target, seed=3)
    again = sampled(make, target, seed=3)
    head = drafter.model.head
    assert isinstance(head, DFlash2Head)
    ids, table = head.lattice(drafter.run(105, 3).hidden[1:], 105)
    n_draws = 2000
    first = torch.zeros(ids.shape[1])
    for index in range(n_draws):
        draft = drafter.draft(105, 3)
        assert isinstance(draft.q, Candidates)
        assert torch.equal(draft.q.ids, ids)
        before = 0
        for step, token in enumerate(draft.tokens):
            expected = (table[step, before] / 0.7).softmax(-1)
            torch.testing.assert_close(draft.q.probs[step], expected)
            before = ids[step].tolist().index(token)
        first[ids[0].tolist().index(draft.tokens[0])] += 1
        if index < 20:
            assert again.draft(105, 3).tokens == draft.tokens
    expected = (table[0, 0] / 0.7).softmax(-1) * n_draws
    chi_square = float(((first - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # three degrees of freedom, one in a thousand

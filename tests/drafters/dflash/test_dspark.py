"""DSpark drafts: llama.cpp's own numbers, the gated chain against a plain one, sampled chains."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_drafts
import torch
from drafters.dflash.trace import Round, Trace, names, target_of
from tiny import N_VOCAB
from torch import Tensor

from specdec.drafters.base import FirstOf
from specdec.drafters.dflash.drafter import DFlashDrafter
from specdec.drafters.dflash.dspark import DSparkHead
from specdec.drafters.dflash.head import DraftBlock
from specdec.drafters.dflash.model import load
from specdec.drafters.dflash.names import SPELLINGS
from specdec.generate import Limits, decode
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions
from specdec.sampling import build_chain
from specdec.verify import Verifier

RECORDED = names("dspark")
ACCEPTED = "dspark_accepted"
JOINT_PROJECTIONS = SPELLINGS["joint projection"]
TEXT = [70, 71, 72, 73, 74, 75, 76, 90, 91, 92, 93]
LAST = 105
BLOCK = 5
VARIANTS = {
    "anchor": {},
    "bonus": {"metadata": {"dflash.sample_from_anchor": False}},
    "gated": {"tensors": tiny_drafts.joint_projection(JOINT_PROJECTIONS[0])},
    "without confidence": {"tensors": {"conf_proj.weight": None, "conf_proj.bias": None}},
    "reduced": {"d2t": tuple(range(200, 60, -3))},
}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def trace_of(name: str) -> Trace:
    return Trace(name)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_logits_confidences_and_drafts(name: str) -> None:
    trace = trace_of(name)
    head = trace.model.head
    assert isinstance(head, DSparkHead)

    def look(recorded: Round, block: DraftBlock) -> None:
        logits, tokens, confidences = head.chain(block, len(recorded.draft))
        assert tokens.tolist() == recorded.draft
        expected = recorded.tensor("draft_logits")
        close(trace.scattered(logits, expected.shape[1]), expected[head.first_slot :])
        if "confidence" in recorded.values:
            close(confidences, recorded.tensor("confidence")[head.first_slot :])
        else:
            assert not head.has_confidence
        if recorded.values["n_past"] == trace.rounds[0].values["n_past"]:
            close(block.hidden, trace.tensor("dbg_block_result_norm"))

    drafts = list(trace.replay(trace.drafter(), look))
    assert len(drafts) == (14 if name == ACCEPTED else 7)
    for recorded, tokens in drafts:
        assert tokens == recorded.draft


def test_drafts_are_accepted_as_recorded() -> None:
    """In this recording no acceptance is forced: what stands is what the target says itself."""
    trace = trace_of(ACCEPTED)
    final = trace.values["final_tokens"].tolist()
    counts = []
    for recorded, tokens in trace.replay(trace.drafter()):
        start = int(recorded.values["n_past"])
        assert recorded.last_token == final[start]
        follows = final[start + 1 : start + 1 + len(tokens)]
        right = [a == b for a, b in zip(tokens, follows, strict=True)]
        counts.append(([*right, False]).index(False))
        assert counts[-1] == recorded.values["n_accepted"]
    assert sum(counts) > 2 * len(counts)


def test_the_loop_ends_with_the_recorded_text() -> None:
    trace = trace_of(ACCEPTED)
    target, prompt = target_of(ACCEPTED), trace.values["prompt_ids"].tolist()
    n_predict = len(trace.values["final_tokens"]) - len(prompt)
    sampling = SamplingOptions(temp=0)
    chain = build_chain(sampling, n_vocab=target.config.n_vocab, end_tokens=frozenset())
    chain.begin(prompt)
    drafter = FirstOf([trace.drafter()])
    drafter.begin(sampling)
    text, limits, n_rounds = list(prompt), Limits(512, n_predict=n_predict), 0
    verifier = Verifier(chain, frozenset())
    for done in decode(target, target.new_cache(512), drafter, verifier, prompt, limits):
        text += done.tokens
        n_rounds += 1
    assert text == trace.values["final_tokens"].tolist()
    assert n_rounds < n_predict / 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(GGUFFile.open(tiny.write_target(tmp_path_factory.mktemp("t") / "t.gguf")))


@pytest.fixture
def make(tmp_path: Path, target: Target) -> Any:
    """A drafter that has observed `TEXT`, from draft options and what the file shall contain.

    The file is its attribute ``file``.
    """

    def run(options: DraftOptions, sampling: SamplingOptions | None = None, **draft: Any) -> Any:
        file = GGUFFile.open(write(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", **draft))
        drafter = DFlashDrafter(load(file, target), options, 256)
        drafter.file = file  # type: ignore[attr-defined]
        drafter.begin(sampling or SamplingOptions(temp=0))
        output = target(torch.tensor(TEXT), target.new_cache(64), taps=drafter.taps)
        drafter.observe(torch.tensor(TEXT), output.hidden)
        return drafter

    return run


def write(path: Path, **draft: Any) -> Path:
    return tiny_drafts.write_dflash(path, **({"head": "draft-dspark", "block_size": BLOCK} | draft))


def plain_chain(file: GGUFFile, block: DraftBlock, base: np.ndarray, draft: list[int]) -> Any:
    """Logits [K, VD] and confidences [K] of a given chain, in float64, written for reading."""
    weights = {name: file.load(name).double().numpy() for name in file.tensors}
    joint = next((name for name in JOINT_PROJECTIONS if f"{name}.weight" in weights), None)
    first = 0 if file.get_bool("dflash.sample_from_anchor", default=True) else 1
    state = np.zeros(tiny_drafts.DSPARK_RANK)
    before, logits, confidences = block.last_token, [], []
    for index, token in enumerate(draft):
        mixed = weights["markov_w1.weight"][before]
        hidden = block.hidden[first + index].double().numpy()
        if joint:
            z = weights[f"{joint}.weight"] @ np.concatenate((state, mixed, hidden))
            a, b, c = np.split(z + weights[f"{joint}.bias"], 3)
            gate = 1 / (1 + np.exp(-a))
            state = gate * state + (1 - gate) * np.tanh(b)
            mixed = np.tanh(c)
        logits.append(base[first + index] + weights["markov_w2.weight"] @ mixed)
        if "conf_proj.weight" in weights:
            score = weights["conf_proj.weight"] @ np.concatenate((hidden, mixed))
            score = score + weights.get("conf_proj.bias", 0.0)
            confidences.append(1 / (1 + np.exp(-score[0])))
        else:
            confidences.append(1.0)
        before = token
    return torch.tensor(np.array(logits)), torch.tensor(np.array(confidences))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_chain_is_that_of_a_plain_computation(make: Any, name: str) -> None:
    drafter = make(DraftOptions(n_max=BLOCK), **VARIANTS[name])
    head, n_draft = drafter.model.head, drafter.n_max
    assert n_draft == BLOCK - (name == "bonus")
    block = drafter.run(LAST, n_draft)
    assert block.hidden.shape[0] == head.block_len(n_draft) == BLOCK
    base = drafter.model.vocabulary.logits(block.hidden).double().numpy().copy()
    logits, tokens, confidences = head.chain(block, n_draft)
    assert tokens.tolist() == drafter.draft(LAST, n_draft).tokens
    expected, sure = plain_chain(drafter.file, block, base, tokens.tolist())
    close(logits.double(), expected)
    close(confidences.double(), sure)
    rows = expected.argmax(-1)
    assert tokens.tolist() == drafter.model.vocabulary.to_target(rows).tolist()


@pytest.mark.parametrize("spelling", JOINT_PROJECTIONS)
def test_every_spelling_of_the_joint_projection_is_read(make: Any, spelling: str) -> None:
    drafter = make(DraftOptions(n_max=BLOCK), tensors=tiny_drafts.joint_projection(spelling))
    plain = make(DraftOptions(n_max=BLOCK))
    gated = make(DraftOptions(n_max=BLOCK), **VARIANTS["gated"])
    found = drafter.model.head.chain(drafter.run(LAST, BLOCK), BLOCK)[0]
    assert torch.equal(found, gated.model.head.chain(gated.run(LAST, BLOCK), BLOCK)[0])
    other = plain.model.head.chain(plain.run(LAST, BLOCK), BLOCK)[0]
    assert (found - other).abs().max() > 0.1


def test_the_scale_of_the_second_table_multiplies_the_bias(make: Any) -> None:
    scale = {"markov_w2.scale": np.array([2.5], dtype=np.float32)}
    plain, scaled = make(DraftOptions(n_max=1)), make(DraftOptions(n_max=1), tensors=scale)
    block = plain.run(LAST, 1)
    base = plain.model.vocabulary.logits(block.hidden)
    bias = plain.model.head.chain(block, 1)[0] - base
    close(scaled.model.head.chain(block, 1)[0] - base, 2.5 * bias)


@pytest.mark.parametrize("name", ["anchor", "bonus", "gated"])
def test_sampled_chains_follow_their_q(make: Any, name: str) -> None:
    """Each q is the softmax of the ten best logits after the tokens really drawn."""
    sampling = SamplingOptions(temp=0.7, seed=3)
    options = DraftOptions(n_max=3, sampling="probabilistic")
    drafter, again = (make(options, sampling, **VARIANTS[name]) for _ in range(2))
    head, block = drafter.model.head, drafter.run(LAST, 3)
    base = drafter.model.vocabulary.logits(block.hidden).double().numpy().copy()
    firsts: list[int] = []
    for index in range(600):
        draft = drafter.draft(LAST, 3)
        assert draft.q is not None
        firsts.append(draft.tokens[0])
        if index < 20:
            assert again.draft(LAST, 3).tokens == draft.tokens
            logits, _ = plain_chain(drafter.file, block, base, draft.tokens)
            best, ids = logits.topk(10)
            assert torch.equal(draft.q.ids, ids)
            close(draft.q.probs.double(), (best / 0.7).softmax(-1))
    greedy, _ = plain_chain(drafter.file, block, base, firsts[:1])
    best, ids = greedy[0].topk(10)
    expected = (best / 0.7).softmax(-1) * len(firsts)
    found = torch.tensor([firsts.count(token) for token in ids.tolist()])
    assert float(((found - expected) ** 2 / expected.clamp(min=1e-9))[expected >= 5].sum()) < 30
    assert head.n_max >= 3


def test_confidence_cuts_sampled_drafts_too(make: Any) -> None:
    """The last step counts, whatever was drawn there."""
    sampling = SamplingOptions(temp=1.0, seed=5)
    whole = make(DraftOptions(n_max=BLOCK, sampling="probabilistic"), sampling)
    cut = make(DraftOptions(n_max=BLOCK, sampling="probabilistic", p_min=0.5), sampling)
    lengths = set()
    for _ in range(40):
        draft, block = cut.draft(LAST, BLOCK), cut.run(LAST, BLOCK)
        lengths.add(len(draft.tokens))
        head = cut.model.head
        picks = head.propose(block, BLOCK, whole._sampler)
        assert all(0 < pick.confidence < 1 for pick in picks)
    assert max(lengths) <= BLOCK
    assert N_VOCAB == whole.model.config.n_vocab


@pytest.mark.parametrize("name", VARIANTS)
def test_a_greedy_draft_is_fetched_once(
    make: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain itself never asks the device for a value."""
    drafter = make(DraftOptions(n_max=BLOCK), **VARIANTS[name])
    block, n_draft = drafter.run(LAST, drafter.n_max), drafter.n_max
    expected = drafter.draft(LAST, n_draft).tokens

    def refuse(*_: Any) -> None:
        pytest.fail("a value was asked for")

    with monkeypatch.context() as patched:
        for method in ("item", "tolist", "__int__", "__float__", "__bool__"):
            patched.setattr(Tensor, method, refuse)
        logits, tokens, confidences = drafter.model.head.chain(block, n_draft)
    assert tokens.tolist() == expected
    assert len(logits) == len(confidences) == n_draft

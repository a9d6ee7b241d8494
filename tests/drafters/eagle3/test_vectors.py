"""EAGLE-3 drafts against llama.cpp's own numbers, all rounds of each recording."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from drafters.dflash.trace import names, target_of
from drafters.eagle3.trace import Trace
from torch import Tensor

from specdec.drafters.base import FirstOf
from specdec.generate import Limits, decode
from specdec.models.layers import interleaved_to_halves
from specdec.options import Kernels, SamplingOptions
from specdec.sampling import build_chain
from specdec.verify import Verifier

NAMES = names("eagle3")
ACCEPTED = "eagle3_accepted"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def trace_of(name: str, kernels: Kernels = "torch") -> Trace:
    return Trace(name, kernels)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def halves(trace: Trace, recorded: Tensor) -> Tensor:
    """A recorded query or key [H, Dh] in the layout of this program."""
    spec = trace.model.decoder.spec
    heads = recorded.view(-1, spec.head_dim)
    return interleaved_to_halves(heads.flatten(), heads.shape[0], spec.rope.n_rot).view_as(heads)


def test_all_recordings_are_here() -> None:
    assert NAMES == [
        f"eagle3_{name}" for name in ("accepted", "d2t", "final", "opts", "plain", "wide", "yarn")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_taps_of_the_target(name: str) -> None:
    trace, target = trace_of(name), target_of(name)
    tokens = trace.tensor("prompt_ids").long()[:-1]
    taps = trace.model.decoder.taps
    output = target(tokens, target.new_cache(512), taps=taps, logit_rows=0)
    assert output.hidden is not None
    close(output.hidden.flatten(1), trace.tensor("prefill_features"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pieces", [None, [17], [1] * 17, [1, 16], [16, 1]])
def test_encoder_and_pairs_of_the_prompt(name: str, pieces: list[int] | None) -> None:
    """However the prompt is cut, all rows but the last have their pairs."""
    trace = trace_of(name)
    drafter = trace.drafter()
    trace.prefill(drafter, pieces or trace.values["prefill_split"].tolist())
    states = drafter._states.committed(0, torch.float32)[0][0]
    close(states, trace.tensor("prefill_g"))
    assert trace.values["prefill_write_pos"].tolist() == list(range(drafter._cache.length))
    whole = trace.drafter()
    trace.prefill(whole, [17])
    keys, values = drafter._cache.committed(0, torch.float32)
    expected_keys, expected_values = whole._cache.committed(0, torch.float32)
    close(keys, expected_keys)
    close(values, expected_values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_steps_and_drafts_of_all_rounds(name: str, kernels: Kernels) -> None:
    trace = trace_of(name, kernels)
    drafter = trace.drafter()
    trace.prefill(drafter, trace.values["prefill_split"].tolist())
    n_rounds = 0
    for recorded, tokens in trace.replay(drafter):
        n_rounds += 1
        assert tokens == recorded.draft
        assert drafter._states.length == recorded.number("n_past")
        assert drafter._cache.length == recorded.number("pending_pos")
        close(drafter._waiting()[0], recorded.tensor("pending_g"))
        verified = trace.taps(recorded.tensor("verify_features"))
        close(trace.model.decoder.encode(verified), recorded.tensor("verify_g"))
        if not recorded.draft:
            continue
        steps = recorded.steps
        assert [step.token for step in steps] == recorded.values["step_tokens"].tolist()
        assert [step.position for step in steps] == recorded.values["step_pos"].tolist()
        close(torch.stack([step.prenorm for step in steps]), recorded.tensor("prenorm"))
        logits = torch.stack([trace.scattered(step.logits) for step in steps])
        close(logits, recorded.tensor("draft_logits"))
        states = torch.cat((recorded.tensor("pending_g")[None], recorded.tensor("prenorm")[:-1]))
        close(torch.stack([step.state for step in steps]), states)
    assert n_rounds == (6 if name == ACCEPTED else 7)


@pytest.mark.parametrize("name", NAMES)
def test_inside_the_first_steps(name: str) -> None:
    """Embedding, norms, query, key, value and output of steps 0 and 1 of round 0."""
    trace = trace_of(name)
    drafter, decoder = trace.drafter(), trace.model.decoder
    trace.prefill(drafter, [17])
    token, state = trace.rounds[0].number("id_last"), drafter._waiting()
    for index in range(2):
        layer, rotary = decoder.layer, decoder._angles(drafter._cache.length, state)
        embedding = trace.model.vocabulary.embed(torch.tensor([token]))

        def recorded(name: str, index: int = index) -> Tensor:
            return trace.tensor(f"dbg_step{index}_{name}")

        close(embedding[0], recorded("inp_embd"))
        joined, _ = layer.pair(embedding, state)
        close(joined[0], recorded("concat_embd-0"))
        q = layer.queries(joined, rotary)[0] / layer.spec.attention_scale
        k, v = layer.keys_values(joined, rotary)
        close(q, halves(trace, recorded("Qcur_rope-0")))
        close(k[0], halves(trace, recorded("Kcur_rope-0")))
        close(v.flatten(), recorded("Vcur-0"))
        logits, state = drafter.step(token, state)
        close(state[0], recorded("eagle3_prenorm-0"))
        close(decoder.output_norm(state)[0], recorded("result_norm"))
        token = int(trace.scattered(logits).argmax())


def test_the_loop_ends_with_the_recorded_text() -> None:
    """In this recording no acceptance is forced: what stands is what the target says itself."""
    trace, target = trace_of(ACCEPTED), target_of(ACCEPTED)
    prompt = trace.values["prompt_ids"].tolist()
    n_predict = len(trace.values["final_tokens"]) - len(prompt)
    sampling = SamplingOptions(temp=0)
    chain = build_chain(sampling, n_vocab=target.config.n_vocab, end_tokens=frozenset())
    chain.begin(prompt)
    drafter = FirstOf([trace.drafter()])
    text, limits, counts = list(prompt), Limits(512, n_predict=n_predict), []
    verifier = Verifier(chain, frozenset())
    for done in decode(target, target.new_cache(512), drafter, verifier, prompt, limits):
        text += done.tokens
        counts.append(len(done.tokens) - 1)
    assert text == trace.values["final_tokens"].tolist()
    recorded = [one.number("n_accepted") for one in trace.rounds]
    assert counts[: len(recorded) - 1] == recorded[:-1]

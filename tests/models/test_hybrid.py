"""Targets with recurrent layers: a rejection selects a state, and nothing is read twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_mtp
import torch

from specdec.engine import Engine
from specdec.errors import CacheError
from specdec.gguf_file import GGUFFile
from specdec.kv_cache import CacheShape, KVCache
from specdec.models import load_target
from specdec.models.base import Target
from specdec.models.delta_net import DeltaRow, delta_chunk, delta_step
from specdec.options import (
    DraftOptions,
    GenerateOptions,
    ModelOptions,
    Options,
    SamplingOptions,
    SpecOptions,
)

K = 5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mtp.write_mtp(tmp_path_factory.mktemp("hybrid") / "target.gguf", "qwen35")


@pytest.fixture(scope="module")
def target(path: Path) -> Target:
    with GGUFFile.open(path) as file:
        return load_target(file)


@torch.inference_mode()
def test_no_drift_over_500_tokens_with_every_accept_count(target: Target) -> None:
    """After each round the logits are bit for bit those of a run without drafts."""
    random = torch.Generator().manual_seed(1)
    text = [70, 71, 72]
    cache, plain = target.new_cache(600), target.new_cache(600)
    target(torch.tensor(text[:-1]), cache)
    target(torch.tensor(text[:-1]), plain)
    accepted = 0
    while len(text) < 500:
        draft = torch.randint(3, 259, (K,), generator=random).tolist()
        start = cache.length
        rows = target(torch.tensor([text[-1], *draft]), cache).logits
        keep = accepted % (K + 1) + 1
        cache.truncate(start + keep)
        emitted = [*draft[: keep - 1], int(rows[keep - 1].argmax())]
        expected = [
            target(torch.tensor([token]), plain).logits for token in [text[-1], *emitted[:-1]]
        ]
        assert torch.equal(rows[:keep], torch.cat(expected))
        text += emitted
        accepted += 1
    assert cache.length == plain.length
    for state, same in zip(cache.state(0), plain.state(0), strict=True):
        assert torch.equal(state, same)


@torch.inference_mode()
@pytest.mark.parametrize("count", [3, 20])
def test_all_rows_of_the_last_forward_can_be_reached(target: Target, count: int) -> None:
    cache = target.new_cache(64)
    target(torch.arange(70, 80), cache)
    target(torch.arange(90, 90 + count), cache)
    assert [cache.reachable(n) for n in (5, 9, 10, 11, 10 + count)] == [0, 0, 10, 11, 10 + count]
    with pytest.raises(CacheError, match="recurrent state behind 9"):
        cache.truncate(9)
    cache.truncate(11)
    assert cache.reachable(64) == 11
    cache.truncate(0)
    assert all(not part.any() for part in cache.state(0))


@torch.inference_mode()
def test_prompt_chunks_keep_the_last_state_alone(target: Target) -> None:
    cache = target.new_cache(64)
    target(torch.arange(70, 90), cache, logit_rows=0)
    assert [cache.reachable(n) for n in (19, 20)] == [0, 20]


def test_more_states_are_kept_for_who_asks_for_them() -> None:
    cache = KVCache(
        [CacheShape(0, 0, 0, state=((2,),))], 64, device=torch.device("cpu"), n_states=3
    )
    for step in range(1, 9):
        cache.begin_pass()
        cache.put_state(0, 1, (torch.full((2,), float(step)),))
        cache.advance(1)
    assert [cache.reachable(n) for n in (4, 5, 6, 7, 8)] == [0, 5, 6, 7, 8]
    cache.truncate(6)
    assert cache.state(0)[0].tolist() == [6.0, 6.0]


def test_memory_of_dropped_states_is_used_again() -> None:
    """But never that of a state that can still be reached, nor the zeros at the start."""
    shape = CacheShape(0, 0, 0, state=((2,), (3,)))
    cache = KVCache([shape], 64, device=torch.device("cpu"), n_states=2)
    addresses = set()
    for step in range(1, 40):
        cache.begin_pass()
        for row in (1, 2, 3):
            state = cache.new_state(0)
            for part in state:
                part.fill_(float(cache.length + row))
            addresses.add(state[0].data_ptr())
            cache.put_state(0, row, state)
        cache.advance(3)
        cache.truncate(cache.length - 2)
        if step == 7:
            cache.checkpoint()
        assert [part[0].item() for part in cache.state(0)] == [float(step)] * 2
        if step > 8:
            held = [n for n in (7, step - 1, step) if cache.reachable(n) == n]
            assert held == [7, step - 1, step] or step == 9
    assert len(addresses) <= 8
    cache.truncate(7)
    assert cache.state(0)[1].tolist() == [7.0] * 3
    cache.truncate(0)
    assert not any(part.any() for part in cache.state(0))


def test_the_delta_rule_replaces_what_a_key_held() -> None:
    """With unit keys, beta 1 and no decay, a key reads back the value it was given last."""
    key = torch.nn.functional.normalize(torch.randn(2, 4), dim=-1)
    memory, one, half = torch.zeros(2, 4, 4), torch.ones(2), torch.full((2,), 0.5).log()
    for _ in range(3):
        value = torch.randn(2, 4)
        memory, out = delta_step(memory, DeltaRow(key, key, value, one * 0, one))
        torch.testing.assert_close(out, value)
    memory, out = delta_step(memory, DeltaRow(key, key, value, half, one * 0))
    torch.testing.assert_close(out, value / 2)


@pytest.mark.parametrize("count", [2, 64])
def test_rows_taken_together_agree_with_single_rows(count: int) -> None:
    random = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    unit = [torch.nn.functional.normalize(draw(count, 3, 8), dim=-1) for _ in range(2)]
    rows = DeltaRow(*unit, draw(count, 3, 8), -draw(count, 3).exp(), draw(count, 3).sigmoid())
    memory = expected = draw(3, 8, 8)
    found = delta_chunk(memory, rows)
    for row in range(count):
        expected, out = delta_step(expected, DeltaRow(*(part[row] for part in rows)))
        torch.testing.assert_close(found[1][row], out, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-4)


def options(path: Path, spec: SpecOptions) -> Options:
    return Options(
        model=ModelOptions(path=path, n_ctx=256, warmup=False),
        sampling=SamplingOptions(temp=0),
        generate=GenerateOptions(n_predict=12),
        spec=spec,
    )


@pytest.mark.parametrize("types", [("none",), ("draft-mtp",), ("ngram-simple", "draft-mtp")])
def test_a_session_reads_again_what_it_cannot_reach(path: Path, types: tuple[str, ...]) -> None:
    """Prompts that share a prefix with the last text, at places of all kinds."""
    with Engine.load(options(path, SpecOptions(types=types))) as engine:
        session = engine.session()
        first = session.generate("The quick brown fox jumps").text
        for prompt in (
            "The quick brown fox jumps" + first + " over",
            "The quick brown fox jumps",
            "The quick brown cat",
            "The",
        ):
            again = session.generate(prompt)
            assert again.token_ids == engine.generate(prompt).token_ids


def test_a_second_reply_to_a_prompt_starts_at_its_end(path: Path) -> None:
    """As in a conversation whose template drops part of the reply."""
    with Engine.load(options(path, SpecOptions(types=("draft-mtp",)))) as engine:
        session = engine.session()
        first, second = "The quick brown fox", "The quick brown fox jumps over"
        session.generate(first)
        again = session.generate(second)
        n_tokens = [len(engine.encode(prompt, {})) for prompt in (first, second)]
        assert again.statistics.n_prompt == n_tokens[1] - n_tokens[0]
        assert again.token_ids == engine.generate(second).token_ids


@pytest.mark.parametrize("n_min", [0, 3])
def test_a_hybrid_draft_model_takes_its_drafts_back(path: Path, tmp_path: Path, n_min: int) -> None:
    """A draft model runs row by row, so it needs states from before the last forward."""
    draft = tiny_mtp.write_mtp(tmp_path / "draft.gguf", "qwen35", n_heads=0, seed=3)
    spec = SpecOptions(
        types=("draft-simple",), draft=DraftOptions(path=draft, n_min=n_min, p_min=0.2)
    )
    plain = options(path, SpecOptions())
    with Engine.load(options(path, spec)) as engine, Engine.load(plain) as expected:
        for prompt in ("The quick brown fox", "The quick"):
            session = engine.session()
            found = [session.generate(prompt).token_ids for _ in range(2)]
            assert found == [expected.generate(prompt).token_ids] * 2

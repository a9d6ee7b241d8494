"""Requests from text to text: limits, end tokens, stop strings, seeds, reuse of a prefix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from specdec.engine import Engine
from specdec.errors import ContextFullError, UsageError
from specdec.generate import Finish
from specdec.options import Options
from specdec.session import Completion

PROMPT = "Hello,hello,hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


def load(folder: Path, *, eos_id: int = tiny.END, **values: Any) -> Engine:
    """An engine over a tiny target; a draft is written beside it if its kind is named."""
    path = folder / f"target-{eos_id}.gguf"
    if not path.exists():
        tiny.write_target(path, eos_id=eos_id)
    layer = {"model.path": path, "model.n_ctx": 200, "sampling.temp": 0.0, "generate.n_predict": 32}
    layer |= {name.replace("__", "."): value for name, value in values.items()}
    return Engine.load(Options().merge(layer))


def perfect(folder: Path, n_max: int = 16, **values: Any) -> Engine:
    """An engine whose draft is the target itself."""
    eos_id = values.get("eos_id", tiny.END)
    path = folder / f"draft-{eos_id}.gguf"
    if not path.exists():
        tiny.write_target(path, eos_id=eos_id)
    return load(folder, spec__draft__path=path, spec__draft__n_max=n_max, **values)


def liar(folder: Path, **values: Any) -> Engine:
    """An engine whose draft is always wrong."""
    path = folder / "liar.gguf"
    if not path.exists():
        tiny.write_target(path, negated=True)
    return load(folder, spec__draft__path=path, **values)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Completion:
    return load(folder).generate(PROMPT)


def test_drafts_do_not_change_the_text(folder: Path, plain: Completion) -> None:
    assert len(plain.token_ids) == 32
    for n_max in (1, 2, 5, 16, 40):
        assert perfect(folder, n_max).generate(PROMPT).token_ids == plain.token_ids
    wrong = liar(folder).generate(PROMPT)
    assert wrong.token_ids == plain.token_ids
    assert wrong.statistics.accepted == 0


@pytest.mark.parametrize("n_max", range(1, 17))
def test_an_end_token_anywhere_in_a_block(folder: Path, plain: Completion, n_max: int) -> None:
    """The token that plain decoding emits at some step becomes the end token."""
    end = next(t for i, t in enumerate(plain.token_ids) if i >= 5 and t not in plain.token_ids[:i])
    step = plain.token_ids.index(end)
    engine = perfect(folder, n_max, eos_id=end)
    done = engine.generate(PROMPT)
    assert done.token_ids == plain.token_ids[: step + 1]
    assert done.finish is Finish.STOP
    assert done.statistics.emitted == step + 1
    assert done.text == engine.tokenizer.decode(plain.token_ids[:step])
    assert engine.generate(PROMPT, sampling__ignore_eos=True).finish is Finish.LENGTH


@pytest.mark.parametrize("n_predict", [0, 1, 2, 3, 16, 17, 18])
def test_exact_limits(folder: Path, plain: Completion, n_predict: int) -> None:
    done = perfect(folder).generate(PROMPT, generate__n_predict=n_predict)
    assert done.token_ids == plain.token_ids[:n_predict]
    assert done.finish is Finish.LENGTH


@pytest.mark.parametrize("n_predict", [-1, -2])
@pytest.mark.parametrize("n_prompt", [48, 55, 61, 62, 63])
def test_the_end_of_the_context(folder: Path, n_prompt: int, n_predict: int) -> None:
    values = {"model__n_ctx": 64, "generate__n_predict": n_predict, "sampling__ignore_eos": True}
    prompt = "ab" * n_prompt
    expected = load(folder, **values).generate(prompt[:n_prompt])
    assert len(expected.token_ids) == 64 - n_prompt
    assert expected.finish is Finish.LENGTH
    done = perfect(folder, **values).generate(prompt[:n_prompt])
    assert done.token_ids == expected.token_ids
    assert done.finish is Finish.LENGTH


@pytest.mark.parametrize("n_prompt", [64, 65, 200])
def test_a_prompt_that_fills_the_context(folder: Path, n_prompt: int) -> None:
    with pytest.raises(ContextFullError, match=f"{n_prompt} tokens do not fit the context of 64"):
        load(folder, model__n_ctx=64).generate("x" * n_prompt)


def test_stop_strings(folder: Path, plain: Completion) -> None:
    engine = perfect(folder)
    text = engine.tokenizer.decode(plain.token_ids)
    for start in (0, 1, 7, 15, 16, 17, 20):
        for length in (1, 2, 3):
            stop = text[start : start + length]
            shown = "".join(chunk.text for chunk in engine.stream(PROMPT, generate__stop=(stop,)))
            assert shown == text[: text.index(stop)]
    session = engine.session()
    stops = (text[6:8], text[3:5])
    for order in (stops, stops[::-1]):
        done = session.generate(PROMPT, generate__stop=order)
        ends = [text.index(stop) + len(stop) for stop in stops]
        first = min(zip(ends, stops, strict=True))[1]
        assert done.text == text[: text.index(first)]
        assert done.finish is Finish.STOP
    assert session.generate(PROMPT, generate__stop=("not in there",)).text == text


def test_a_limit_in_the_block_of_a_stop_string(folder: Path, plain: Completion) -> None:
    engine = perfect(folder)
    text = engine.tokenizer.decode(plain.token_ids)
    shown = engine.tokenizer.decode(plain.token_ids[:12])
    stop = text[len(shown) - 1 : len(shown) + 2]
    done = engine.generate(PROMPT, generate__stop=(stop,), generate__n_predict=12)
    assert done.finish is Finish.LENGTH
    assert done.text == shown


def test_seeded_runs_repeat_and_matching_keeps_them(folder: Path) -> None:
    values = {"sampling__temp": 1.0, "sampling__seed": 7}
    plain = load(folder, **values)
    expected = plain.generate(PROMPT).token_ids
    plain.generate("something else")
    assert plain.generate(PROMPT).token_ids == expected
    assert perfect(folder, **values).generate(PROMPT).token_ids == expected
    assert liar(folder, **values).generate(PROMPT).token_ids == expected
    assert plain.generate(PROMPT, sampling__seed=8).token_ids != expected


def test_penalties_advance_inside_a_block(folder: Path) -> None:
    values = {"sampling__repeat_penalty": 1.3, "sampling__repeat_last_n": 8}
    expected = load(folder, **values).generate(PROMPT).token_ids
    ngram = {"spec__types": ("ngram-simple",), "spec__ngram_simple__size_n": 1}
    found = load(folder, **values, **ngram, spec__ngram_simple__size_m=6).generate(PROMPT)
    assert found.token_ids == expected


def test_a_session_reads_a_common_prefix_once(folder: Path) -> None:
    for engine in (load(folder), perfect(folder, 3)):
        session = engine.session()
        first = session.generate(PROMPT)
        assert first.statistics.n_prompt == len(PROMPT) - 1
        second = session.generate(PROMPT + "more")
        assert second.statistics.n_prompt == len("more") - 1
        assert second.token_ids == engine.generate(PROMPT + "more").token_ids
        changed = session.generate(PROMPT[:5] + "?")
        assert changed.statistics.n_prompt == 0
        assert changed.token_ids == engine.generate(PROMPT[:5] + "?").token_ids


def test_a_broken_off_request_leaves_a_usable_session(folder: Path, plain: Completion) -> None:
    session = perfect(folder, 3).session()
    stream = session.stream(PROMPT)
    next(stream)
    stream.close()
    assert 0 < session.last.statistics.emitted < 32
    assert session.generate(PROMPT).token_ids == plain.token_ids

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate("another prompt", progress=interrupt)
    assert (
        session.generate("another prompt").token_ids
        == load(folder).generate("another prompt").token_ids
    )


def test_prompts_in_chunks(folder: Path, plain: Completion) -> None:
    done = load(folder, model__n_ubatch=4).generate(PROMPT)
    assert done.token_ids == plain.token_ids


def test_an_empty_prompt(folder: Path) -> None:
    engine = load(folder)
    assert len(engine.generate("").token_ids) == 32
    engine.tokenizer._vocabulary = replace(engine.tokenizer._vocabulary, ids={})
    with pytest.raises(UsageError, match="--prompt is empty"):
        engine.generate("")


def test_messages_need_a_template(folder: Path) -> None:
    messages = [{"role": "user", "content": "<s>hi<end>"}]
    with pytest.raises(UsageError, match="has no chat template"):
        load(folder).generate(messages)
    engine = load(folder, chat__template="{{ messages[0].content }}<end>")
    tokens = engine.encode(messages, {})
    assert tokens[-1] == tiny.END
    assert engine.tokenizer.decode(tokens[:-1]) == "<s>hi<end>"


@pytest.mark.parametrize("name", ["mirostat", "adaptive"])
def test_stateful_samplers_fall_back_to_matching(folder: Path, name: str) -> None:
    values: dict[str, Any] = {"sampling__temp": 1.0, "sampling__seed": 3}
    if name == "mirostat":
        values["sampling__mirostat"] = 2
    else:
        values |= {"sampling__samplers": ("adaptive_p",), "sampling__adaptive_target": 0.3}
    expected = load(folder, **values).generate(PROMPT).token_ids
    sampled = perfect(folder, 4, spec__draft__sampling="probabilistic", **values)
    assert sampled.generate(PROMPT).token_ids == expected


def test_choices_that_cannot_act_are_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder, model__n_ctx=200)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    load(folder, model__n_ctx=4096, spec__ngram_cache__static_path=folder / "lookup.bin")
    assert "trained for 512 tokens" in caplog.text
    assert "only ngram-cache reads them" in caplog.text

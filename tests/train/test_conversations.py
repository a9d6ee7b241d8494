"""Conversations written by a target: ids as at run time, and a file that survives anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from specdec.engine import Engine
from specdec.errors import SpecdecError, UnsupportedError, UsageError
from specdec.options import Options
from specdec.train.conversations import (
    FILE,
    DataOptions,
    Record,
    RecordFile,
    check_folder,
    generate_data,
    read_records,
    repeated,
)

OPTIONS = DataOptions(prompts=("One two three?", "And four?"), n_tokens=60, n_lanes=2, n_ctx=512)
OPTIONS = replace(OPTIONS, answer_limit=20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tiny.write_target(tmp_path_factory.mktemp("conversations") / "target.gguf")
    options = {"model.path": path, "model.kernels": "torch", "chat.template": "chatml"}
    return Engine.load(Options().merge(options))


def record(serial: int, tokens: list[int]) -> Record:
    return Record(serial, f"prompt {serial}", "user", "user", True, False, 1.0, tokens, [[1, 3]])


def test_the_users_prompts_are_answered_as_at_run_time(engine: Engine, tmp_path: Path) -> None:
    done = generate_data(engine, tmp_path, OPTIONS)
    records = list(read_records(tmp_path / FILE))
    own = {(r.prompt, r.greedy): r for r in records if r.source == "user"}
    assert set(own) == {(p, greedy) for p in OPTIONS.prompts for greedy in (True, False)}
    assert done.n_tokens == sum(r.n_supervised for r in records) >= 60
    greedy = own["One two three?", True]
    (start, end), *_ = greedy.supervised
    messages = [{"role": "user", "content": "One two three?"}]
    assert greedy.tokens[:start] == engine.encode(messages, {})  # type: ignore[arg-type]
    reply = engine.generate(messages, sampling__temp=0.0, generate__n_predict=20)  # type: ignore[arg-type]
    assert len(greedy.tokens) == end
    assert greedy.tokens[start:end] == reply.token_ids[: end - start]


def test_a_stopped_generation_goes_on(engine: Engine, tmp_path: Path) -> None:
    steps = iter(range(30))
    generate_data(engine, tmp_path, OPTIONS, should_stop=lambda: next(steps, None) is None)
    first = list(read_records(tmp_path / FILE))
    assert first
    done = generate_data(engine, tmp_path, OPTIONS)
    both = list(read_records(tmp_path / FILE))
    assert both[: len(first)] == first
    assert len({r.serial for r in both}) == len(both)
    assert done.fraction == 1
    assert generate_data(engine, tmp_path, OPTIONS).n_conversations == len(both)


def test_an_interrupt_keeps_what_is_there(engine: Engine, tmp_path: Path) -> None:
    def interrupt() -> bool:
        nonlocal steps
        steps += 1
        if steps > 18:
            raise KeyboardInterrupt
        return False

    steps = 0
    with pytest.raises(KeyboardInterrupt):
        generate_data(engine, tmp_path, OPTIONS, should_stop=interrupt)
    assert [r.n_supervised for r in read_records(tmp_path / FILE)]


def test_self_written_prompts_need_no_user(engine: Engine, tmp_path: Path) -> None:
    reports = []
    options = replace(OPTIONS, prompts=(), n_tokens=100)
    generate_data(engine, tmp_path, options, progress=reports.append)
    records = list(read_records(tmp_path / FILE))
    assert {r.source for r in records} <= {"opening", "model"}
    assert len({r.prompt for r in records}) == len(records)
    assert reports


def test_a_budget_is_needed(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--minutes or --tokens"):
        generate_data(engine, tmp_path, replace(OPTIONS, n_tokens=None))


def test_a_folder_belongs_to_one_target(engine: Engine, tmp_path: Path) -> None:
    check_folder(engine.target, tmp_path / "work")
    check_folder(engine.target, tmp_path / "work")
    path = tiny.write_target(tmp_path / "other.gguf", seed=1)
    other = Engine.load(Options().merge({"model.path": path, "model.kernels": "torch"}))
    with pytest.raises(UsageError, match="another target"):
        check_folder(other.target, tmp_path / "work")


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with RecordFile(path) as file:
        file.append(record(0, [1, 2, 3]))
        file.append(record(1, [4, 5, 6]))
    path.write_bytes(path.read_bytes()[:-10])
    with RecordFile(path) as file:
        assert file.records == [record(0, [1, 2, 3])]
        file.append(record(2, [7, 8, 9]))
    assert [r.serial for r in read_records(path)] == [0, 2]
    path.write_text(json.dumps({"serial": 1}) + "\n")
    with pytest.raises(SpecdecError, match="line 1"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ([9] + [1] * 16, 0),
        ([9] + [1] * 17, 16),
        ([9, 8, *range(7), *range(7), *range(7)], 0),
        ([9, 8, *range(7), *range(7), *range(7), *range(7)], 21),
        ([*range(33)] * 4, 0),
        ([*range(32)] * 4, 96),
        ([], 0),
    ],
)
def test_repeats(tokens: list[int], expected: int) -> None:
    assert repeated(tokens) == expected


def test_a_follow_up_that_is_broken_off_is_no_answer(engine: Engine, tmp_path: Path) -> None:
    """All supervised ranges are answers: they begin where the template says."""
    start = engine.encode([{"role": "user", "content": "x"}], {})[-6:]
    options = replace(OPTIONS, prompts=(), n_tokens=10**6, n_lanes=16, seed=3)
    for n_steps in (25, 40, 55, 70):
        steps = iter(range(n_steps))
        folder = tmp_path / str(n_steps)
        generate_data(engine, folder, options, should_stop=lambda it=steps: next(it, None) is None)
        for one in read_records(folder / FILE):
            for first, _ in one.supervised:
                assert one.tokens[first - len(start) : first] == start


def test_a_full_disk_is_one_line_and_the_file_goes_on(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, room = RecordFile.append, iter(range(2))

    def full(self: RecordFile, one: Record) -> None:
        if next(room, None) is None:
            self._file.write(b'{"serial": 77')
            raise SpecdecError(f"{self.path}: No space left on device")
        append(self, one)

    monkeypatch.setattr(RecordFile, "append", full)
    with pytest.raises(SpecdecError, match="No space left"):
        generate_data(engine, tmp_path, OPTIONS)
    monkeypatch.undo()
    assert len(list(read_records(tmp_path / FILE))) == 2
    done = generate_data(engine, tmp_path, OPTIONS)
    assert done.n_conversations == len(list(read_records(tmp_path / FILE))) > 2


def test_a_target_without_a_template_or_bos_writes_from_nothing(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "target.gguf")
    bare = Engine.load(Options().merge({"model.path": path, "model.kernels": "torch"}))
    options = replace(OPTIONS, prompts=(), n_tokens=100, n_lanes=16)
    assert generate_data(bare, tmp_path / "work", options).n_tokens >= 100


@pytest.mark.parametrize(("n_ctx", "fits"), [(100, True), (60, False)])
def test_texts_fit_a_short_context(tmp_path: Path, n_ctx: int, fits: bool) -> None:
    path = tiny.write_target(tmp_path / "target.gguf", n_ctx=n_ctx)
    options = {"model.path": path, "model.kernels": "torch", "chat.template": "chatml"}
    engine = Engine.load(Options().merge(options))
    data = DataOptions(n_tokens=30, n_lanes=2)
    if not fits:
        with pytest.raises(UnsupportedError, match="the chat template takes"):
            generate_data(engine, tmp_path / "work", data)
        return
    generate_data(engine, tmp_path / "work", data)
    assert all(len(r.tokens) <= n_ctx for r in read_records(tmp_path / "work" / FILE))


def test_a_damaged_folder_is_one_line(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text("")
    with pytest.raises(SpecdecError, match=r"target\.json: is damaged; remove it"):
        check_folder(engine.target, tmp_path)

"""`specdec train` and `specdec eval` from end to end on a tiny target."""

from __future__ import annotations

import functools
import json
import pkgutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from specdec.drafters.dflash import head_of
from specdec.gguf_file import GGUFFile
from specdec.train.conversations import DataOptions
from specdec_cli.main import run

Capture = pytest.CaptureFixture[str]
WORDS = "one two three four five six seven eight nine ten eleven twelve".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and prompts to train with and to measure with."""
    folder = tmp_path_factory.mktemp("train")
    tiny.write_target(folder / "target.gguf")
    prompts = [f"{a} {b} {c}?" for a in WORDS for b in WORDS[:5] for c in "ab"]
    (folder / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    kinds = [{"prompt": f"what is {word}", "category": word[0]} for word in WORDS[:4]]
    (folder / "measure.jsonl").write_text("\n".join(map(json.dumps, kinds)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _short_texts() -> Iterator[None]:
    """Few lanes and short answers, so that a training takes seconds."""
    sizes = {"n_lanes": 16, "answer_limit": 32, "prompt_limit": 16, "text_limit": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.train.run.DataOptions", functools.partial(DataOptions, **sizes))
        patch.setattr("specdec.train.alignment.N_STEPS", 40)
        yield


def words(folder: Path, output: str, *more: str) -> list[str]:
    sizes = "--tokens 1000 --block-size 4 --layers 1 --draft-vocab 0 --mask-token 0"
    return [
        *["train", "-m", str(folder / "target.gguf"), "-o", str(folder / output)],
        *["--prompts", str(folder / "prompts.txt"), "--chat-template", "chatml"],
        *sizes.split(),
        *["--learning-rate", "1e-2"],
        *more,
    ]


def test_two_heads_from_one_data_set_and_an_evaluation(folder: Path, capsys: Capture) -> None:
    assert run(words(folder, "plain.gguf", "--head", "dflash")) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder / 'plain.gguf'}\n"
    assert "check: a reply learned by heart is drafted alike" in err
    work = folder / "plain.train"
    assert run(words(folder, "again.gguf", "--head", "dflash")) == 0
    assert run(words(folder, "again.gguf", "--head", "dflash")) == 2
    assert "--resume" in capsys.readouterr().err
    assert run(words(folder, "spark.gguf", "--head", "dspark", "--resume", str(work))) == 0
    out, err = capsys.readouterr()
    assert "start: the trunk of the plain DFlash draft" in err
    assert "confidence: calibration error" in err
    with GGUFFile.open(folder / "spark.gguf") as file:
        assert head_of(file) == "draft-dspark"
    _evaluate(folder, capsys)


def _evaluate(folder: Path, capsys: Capture) -> None:
    common = ["eval", "-m", str(folder / "target.gguf"), "-n", "8", "-c", "200"]
    common += ["--prompts", str(folder / "measure.jsonl")]
    for draft in ("plain", "spark"):
        common += ["-md", str(folder / f"{draft}.gguf")]
    assert run([*common, "--temps", "0,1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {one["name"] for one in found}
    assert {"none", "draft-dflash 3", "draft-dspark 3", "ngram-mod", "ngram-simple"} <= names
    assert any("untrained" in name for name in names)
    assert {one["temperature"] for one in found} == {0.0, 1.0}
    plain = next(one for one in found if one["name"] == "none")
    assert plain["acceptance_length"] == 1.0
    assert set(plain["by_category"]) == {"o", "t", "f"}
    assert run([*common, "--temps", "1"]) == 0
    out = capsys.readouterr().out
    assert "temperature 1" in out
    assert "untrained" in out


def test_other_sizes_do_not_continue_a_training(folder: Path, capsys: Capture) -> None:
    work = str(folder / "plain.train")
    code = run(words(folder, "x.gguf", "--head", "dflash", "--resume", work, "--block-size", "6"))
    assert code == 2
    assert "block_size = 4, asked for is 6" in capsys.readouterr().err


STAGES = [
    "specdec.train.lanes.Lanes.step",
    "specdec.train.dataset._Store.append",
    "specdec.train.run.require_alignment",
    "specdec.train.optimise.Trainer.step",
    "specdec.train.run.write_draft",
]
"""A call in each stage, in order."""


def test_an_interrupt_in_every_stage_can_be_continued(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.train.alignment.ENOUGH", 0.0)
    work = folder / "stopped.train"
    command = words(folder, "stopped.gguf", "--head", "dflash", "--tokens", "300")
    for stage in STAGES:
        with monkeypatch.context() as patch:
            patch.setattr(stage, interrupted(stage))
            again = ["--resume", str(work)] if work.exists() else []
            assert run([*command, *again]) == 130
        assert f"interrupted; continue with the same command and --resume {work}" in (
            capsys.readouterr().err
        )
    assert run([*command, "--resume", str(work)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder / 'stopped.gguf'}\n"
    assert "resumed: step" in err
    assert "\x1b" not in err
    assert not list(work.rglob("*.new"))


def interrupted(name: str) -> Callable[..., Any]:
    """The function ``name`` with a Ctrl-C when it is called."""
    called = pkgutil.resolve_name(name)

    def call(*args: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return called(*args, **more)

    return call


def test_other_flags_do_not_touch_what_a_folder_holds(folder: Path, capsys: Capture) -> None:
    work = folder / "plain.train"
    before = (work / "features" / "taps.bin").stat()
    more = ["--head", "dflash", "--resume", str(work)]
    assert run(words(folder, "x.gguf", *more, "--target-layers", "0,1")) == 2
    assert "target_layers = [2], asked for is [0, 1]" in capsys.readouterr().err
    assert run(words(folder, "x.gguf", *more, "--draft-vocab", "64")) == 2
    assert "--draft-vocab = 0, asked for is 64" in capsys.readouterr().err
    after = (work / "features" / "taps.bin").stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    other = tiny.write_target(folder / "other.gguf", seed=5)
    command = words(folder, "x.gguf", *more)
    command[command.index("-m") + 1] = str(other)
    assert run(command) == 2
    assert "holds the data of another target" in capsys.readouterr().err
    assert not (folder / "x.gguf").exists()


def test_outputs_that_cannot_be_written_are_found_first(folder: Path, capsys: Capture) -> None:
    target = folder / "target.gguf"
    before = target.read_bytes()
    assert run(words(folder, "target.gguf")) == 2
    assert "is the target itself" in capsys.readouterr().err
    assert target.read_bytes() == before
    (folder / "sub").mkdir()
    assert run(words(folder, "sub")) == 2
    assert "is a folder" in capsys.readouterr().err
    assert run(words(folder, "x.gguf", "--resume", str(folder / "sub"))) == 2
    assert "is not a folder of an earlier run" in capsys.readouterr().err
    assert run(words(folder, "x.gguf", "--exclude", str(folder / "none.txt"))) == 2
    assert "--exclude: cannot read" in capsys.readouterr().err
    assert not (folder / "x.train").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["train", "-o", "x.gguf"], "--model is required"),
        (["train", "-m", "t.gguf"], "--output is required"),
        (["train", "-m", "nowhere.gguf", "-o", "x.gguf"], "nowhere.gguf"),
        (["train", "-m", "t.gguf", "-o", "no/x.gguf"], "the folder of no/x.gguf does not exist"),
        (
            ["train", "-m", "t.gguf", "-o", "x.gguf", "--resume", "none"],
            "none is not a folder of an earlier run",
        ),
        (["train", "-m", "t.gguf", "-o", "x.gguf", "--minutes", "0"], "--minutes"),
        (["train", "-m", "t.gguf", "-o", "x.gguf", "--head", "eagle3"], "dflash"),
        (["eval", "-m", "t.gguf"], "--prompts is required"),
        (
            ["eval", "-m", "t.gguf", "--prompts", "none.jsonl", "-md", "d.gguf"],
            "d.gguf: no such file",
        ),
    ],
)
def test_mistakes_are_one_line(
    more: list[str],
    message: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(more) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())

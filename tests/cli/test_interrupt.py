"""Ctrl-C at every stage: exit code 130, what is known so far, files complete or absent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_commands

from specdec.engine import Engine
from specdec.models import load_target
from specdec_cli.interrupts import Interrupts
from specdec_cli.main import run
from specdec_cli.render import statistics_lines

ENDLESS = ["-n", "-1", "--ignore-eos", "-c", "100000"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_commands.write(tmp_path_factory.mktemp("interrupt"))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Flags for every file that a run writes."""
    return ["-o", str(tmp_path / "reply"), "--spec-trace", str(tmp_path / "trace")]


def test_during_a_reply(target: Path, files: list[str], tmp_path: Path) -> None:
    words = tiny_commands.generate(target, "-p", "x", *ENDLESS, *files, "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec_cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    trace = tmp_path / "trace"
    while not (trace.exists() and trace.stat().st_size > 2000):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(out)
    assert found["finish_reason"] == "interrupted"
    assert b"t/s" in err
    assert not (tmp_path / "reply").exists()
    lines = [json.loads(line) for line in trace.read_text("utf-8").splitlines()]
    assert [token for line in lines for token in line["emitted"]] == found["token_ids"]


@pytest.mark.parametrize("delay", [0.3, 0.6, 0.9])
def test_while_starting(target: Path, files: list[str], tmp_path: Path, delay: float) -> None:
    words = tiny_commands.generate(target, "-p", "x", *ENDLESS, *files)
    process = subprocess.Popen(
        [sys.executable, "-c", f"{_READY}; from specdec_cli.__main__ import main; main()", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert not (tmp_path / "reply").exists()


_READY = (
    "import os, signal; signal.signal(signal.SIGINT, lambda *_: os._exit(130)); "
    "print(end='.', flush=True)"
)


def test_on_the_way_out() -> None:
    """What is over keeps its exit code, however often Ctrl-C is typed while Python cleans up."""
    late = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)"
    for words, code in ((["--version"], 0), (["nothing"], 2)):
        script = f"{late}; from specdec_cli.__main__ import main; main()"
        found = subprocess.run([sys.executable, "-c", script, *words], capture_output=True)
        assert found.returncode == code
        assert b"Traceback" not in found.stderr


def test_while_the_model_is_loaded(
    target: Path, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def load(*args: object, **more: object) -> object:
        signal.raise_signal(signal.SIGINT)
        read.append("begun")
        return load_target(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("specdec.engine.load_target", load)
    assert run(tiny_commands.generate(target, "-p", "x", *ENDLESS, *files)) == 130
    assert read == ["begun"]
    assert list(tmp_path.iterdir()) == []


def test_while_the_prompt_is_read(
    target: Path,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encode = Engine.encode

    def interrupted(self: Engine, *args: object) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        return encode(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "encode", interrupted)
    assert run(tiny_commands.generate(target, "-p", "hello", *ENDLESS, *files)) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "t/s" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [["-md"], ["-md", "--spec-check"], []])
def test_while_the_statistics_are_shown(
    target: Path,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return statistics_lines(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("specdec_cli.render.statistics_lines", interrupted)
    draft = [more[0], str(target), *more[1:]] if more else []
    assert run(tiny_commands.generate(target, "-p", "x", "-n", "5", *draft)) == 130
    assert "t/s" in capsys.readouterr().err


def test_while_a_check_runs_its_second_half(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Engine.session

    def interrupted(self: Engine, *, speculate: bool = True) -> object:
        if not speculate:
            signal.raise_signal(signal.SIGINT)
        return session(self, speculate=speculate)

    monkeypatch.setattr(Engine, "session", interrupted)
    words = tiny_commands.generate(target, "-p", "x", "-n", "9", "-md", str(target))
    assert run([*words, "--spec-check"]) == 130
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "draft acceptance" in err
    assert "spec-check" not in err


def test_the_second_one_comes_at_once() -> None:
    interrupts = Interrupts()
    with interrupts.handled():
        with interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.deferred():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.check()

"""Compiling once, for many processes, and doing without."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specdec import native
from specdec.errors import UnsupportedError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.native import build, library

VECTORS = Path(__file__).parent.parent / "data" / "vectors"


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load_library.cache_clear()
    yield tmp_path / "specdec"  # type: ignore[misc]
    library.load_library.cache_clear()


def logits(kernels: str, name: str = "tgt_llama") -> torch.Tensor:
    with GGUFFile.open(VECTORS / f"{name}.gguf") as file:
        target = load_target(file, kernels=kernels)  # type: ignore[arg-type]
    with torch.inference_mode():
        return target(torch.tensor([1, 2, 3]), target.new_cache(8)).logits


def test_without_a_compiler_torch_runs(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits("auto"), logits("torch"))
    assert caplog.messages == [
        "native kernels: found no C++ compiler; install g++ or set CXX; running on torch"
    ]
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler"):
        logits("native")


def test_a_cache_that_cannot_be_written(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbuilt.write_text("a file where the folder should be")
    with pytest.raises(UnsupportedError, match="cannot write"):
        build.shared_library()


def test_a_compiler_that_fails(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = unbuilt.parent / "broken"
    script.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(UnsupportedError, match=r"broken failed: out of luck"):
        build.shared_library()
    assert list(unbuilt.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "no-such-compiler -O1", "CXX: there is no 'no-such-compiler'"),
        ("CXX", "'g++", "CXX: No closing quotation"),
        ("CXXFLAGS", "'-O1", "CXXFLAGS: No closing quotation"),
        ("CXX", "{folder}/no_program", "does not run: .*Exec format error"),
    ],
)
def test_settings_that_make_no_sense(
    unbuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    reason: str,
) -> None:
    program = unbuilt.parent / "no_program"
    program.write_text("neither a script nor anything else")
    program.chmod(0o755)
    monkeypatch.setenv(variable, value.format(folder=unbuilt.parent))
    with pytest.raises(UnsupportedError, match=f"native kernels: .*{reason}"):
        logits("native")
    with caplog.at_level(logging.INFO):
        assert torch.equal(logits("auto"), logits("torch"))
    assert caplog.messages[-1].endswith("running on torch")


def test_a_compiler_with_arguments(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CXX="ccache g++": all of it is run, and the kernels belong to it."""
    script = unbuilt.parent / "wrapper"
    script.write_text('#!/bin/sh\necho "$1" "$3" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} first")
    with pytest.raises(UnsupportedError, match=r"wrapper failed: first -std=c\+\+17"):
        build.shared_library()


SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit
sleep 300 &
echo $! >> "$CHILDREN"
wait
"""


@pytest.fixture
def slow(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes very long; the file gets the numbers of its children."""
    script, children = unbuilt.parent / "slow", unbuilt.parent / "children"
    script.write_text(SLOW_COMPILER)
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("CHILDREN", str(children))
    return children


def assert_none_is_left(children: Path) -> None:
    numbers = [int(line) for line in children.read_text().split()]
    assert numbers
    for _ in range(3000):  # killed processes may take a moment to end
        if not any(map(is_running, numbers)):
            return
        time.sleep(0.01)
    pytest.fail(f"still running: {numbers}")


def is_running(number: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except OSError:
        return False


def test_a_compiler_without_end(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TIMEOUT", 0.5)
    monkeypatch.setattr(build, "VARIANTS", ((),))
    with pytest.raises(UnsupportedError, match="slow failed: no end after"):
        build.shared_library()
    assert_none_is_left(slow)


@pytest.mark.parametrize("wait", ["contextlib.nullcontext()", "interrupts.deferred()"])
def test_a_build_that_is_broken_off(slow: Path, wait: str) -> None:
    command = (
        "import contextlib; from specdec_cli.interrupts import Interrupts\n"
        "from specdec.native.build import shared_library\n"
        "interrupts = Interrupts()\n"
        f"with interrupts.handled(), {wait}: shared_library()"
    )
    running = subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE, text=True)
    while not slow.exists() or not slow.read_text():
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_none_is_left(slow)


def test_two_processes_build_at_once(unbuilt: Path) -> None:
    """A fast stand-in for the compiler: what counts is that nobody sees half a file."""
    script = unbuilt.parent / "compiler"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\n'
        'echo started > "$last"\nsleep 0.3\necho done > "$last"\n'
    )
    script.chmod(0o755)
    command = "from specdec.native.build import shared_library; print(shared_library())"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", command],
            env={**os.environ, "CXX": str(script)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    paths = {process.communicate()[0].strip() for process in running}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "done\n"
    assert len(list(unbuilt.iterdir())) == 1


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("no library")
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        library.Library(str(path))


def test_layers_that_the_kernels_do_not_know(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "KNOWN_FIELDS", ())
    with caplog.at_level(logging.INFO):
        logits("auto", "tgt_qwen3moe")
    assert "has layers that they do not know; running on torch" in caplog.text
    with pytest.raises(UnsupportedError, match="qwen3moe has layers"):
        logits("native", "tgt_qwen3moe")


def test_other_devices_run_on_torch() -> None:
    with GGUFFile.open(VECTORS / "tgt_llama.gguf") as file:
        assert load_target(file, device="meta").is_row_invariant is False


def test_the_program_for_emulated_processors_is_up_to_date() -> None:
    """`make neon` needs more than a compiler; that its program fits the kernels shows without."""
    driver = Path(__file__).with_name("emulated.cpp")
    command = [build.find_compiler(), "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", driver]
    subprocess.run(command, check=True)

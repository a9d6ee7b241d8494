"""Compiling once, for many processes, and doing without."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    assert left_in(unbuilt) == []


def left_in(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != "build.lock"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        # No file can be written: neither the messages nor what they are about.
        ("ulimit -f 0; echo first >&2; exit 1", "first"),
        ("seq 100000; echo ld: No space left on device; exit 1", "ld: No space left on device"),
        ("exit 3", r"no message \(exit code 3\)"),
        ("kill -9 $$", r"no message \(exit code -9\)"),
    ],
)
def test_why_a_compiler_failed(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """Whatever it says and does, also where disks are full."""
    monkeypatch.setenv("CXX", str(program(unbuilt, script)))
    with pytest.raises(UnsupportedError, match=rf"failed: {reason}$"):
        build.shared_library()


def program(unbuilt: Path, script: str) -> Path:
    """A stand-in for a compiler."""
    path = unbuilt.parent / "compiler"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}\n')
    path.chmod(0o755)
    return path


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
    monkeypatch.delenv("CXXFLAGS", raising=False)
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
    running = start_interruptible(wait)
    while not slow.exists() or not slow.read_text():
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_none_is_left(slow)


def test_no_interrupt_is_lost() -> None:
    """Also one that comes as the last compiler ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), build._noted_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def start_interruptible(wait: str) -> subprocess.Popen[str]:
    """A process that builds as the command line does, which may put interrupts off."""
    command = (
        "import contextlib, logging; from specdec_cli.interrupts import Interrupts\n"
        "from specdec.native.build import shared_library\n"
        "logging.basicConfig(level='INFO')\n"
        "interrupts = Interrupts()\n"
        f"with interrupts.handled(), {wait}: shared_library()"
    )
    return subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.PIPE, text=True)


STAND_IN = """
for last; do :; done
echo started > "$last"
echo "$last" >> "$STARTS"
case "$last" in *.so) sleep 0.5; esac
echo done > "$last"
"""
"""Looks like a compiler whose linker takes a while; the file gets the names of all it makes."""


@pytest.fixture
def starts(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CXX", str(program(unbuilt, STAND_IN)))
    monkeypatch.setenv("STARTS", str(unbuilt.parent / "starts"))
    return unbuilt.parent / "starts"


def n_builds(starts: Path) -> int:
    return sum(name.endswith(".so") for name in starts.read_text().split())


def start_build() -> subprocess.Popen[str]:
    command = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from specdec.native.build import shared_library; print(shared_library())"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", command], text=True, **pipes)


def test_processes_that_start_at_once(unbuilt: Path, starts: Path) -> None:
    """One of them builds; nobody sees half a file."""
    said = [process.communicate() for process in [start_build() for _ in range(4)]]
    (path,) = {output.strip() for output, _ in said}
    assert Path(path).read_text() == "done\n"
    assert left_in(unbuilt) == [Path(path).name]
    assert n_builds(starts) == 1
    assert sum("building" in messages for _, messages in said) == 1
    assert all(messages.count("waiting for another") <= 1 for _, messages in said)


@pytest.mark.parametrize("wait", ["contextlib.nullcontext()", "interrupts.deferred()"])
def test_waiting_that_is_broken_off(unbuilt: Path, starts: Path, wait: str) -> None:
    with held_lock(unbuilt):
        running = start_interruptible(wait)
        assert running.stderr is not None
        assert "waiting for another process to build" in running.stderr.readline()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not starts.exists()


@contextlib.contextmanager
def held_lock(unbuilt: Path) -> Iterator[None]:
    unbuilt.mkdir()
    with (unbuilt / "build.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize("trouble", ["held too long", "no locks", "no module", "no file"])
def test_a_lock_that_cannot_be_taken(
    unbuilt: Path, starts: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Then a build goes on beside others, and leaves alone what may be theirs."""
    with held_lock(unbuilt) if trouble == "held too long" else contextlib.nullcontext():
        (unbuilt / "building-theirs").mkdir(parents=True)
        if trouble == "held too long":
            monkeypatch.setattr(build, "LOCK_TIMEOUT", 0.2)
        elif trouble == "no locks":
            monkeypatch.setattr(fcntl, "flock", no_locks)
        elif trouble == "no module":
            monkeypatch.setitem(sys.modules, "fcntl", None)
        else:
            (unbuilt / "build.lock").mkdir()
        assert build.shared_library().read_text() == "done\n"
    assert (unbuilt / "building-theirs").exists()


def test_what_a_killed_build_left(unbuilt: Path, starts: Path) -> None:
    program(unbuilt, "kill -9 $PPID")
    start_build().communicate()
    assert [name.partition("-")[0] for name in left_in(unbuilt)] == ["building"]
    program(unbuilt, STAND_IN)
    assert [build.shared_library().name] == left_in(unbuilt)


def test_sources_that_change_meanwhile(
    unbuilt: Path, starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the package is installed anew: the result is not what its name says."""
    sources = shutil.copytree(build.FOLDER, unbuilt.parent / "sources")
    monkeypatch.setattr(build, "FOLDER", sources)
    program(unbuilt, f"{STAND_IN}\necho // >> {sources / build.HEADERS[0]}")
    with pytest.raises(UnsupportedError, match="changed meanwhile"):
        build.shared_library()
    assert left_in(unbuilt) == []
    program(unbuilt, STAND_IN)
    assert build.shared_library().read_text() == "done\n"


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("no library")
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        library.Library(str(path))


@pytest.fixture(scope="session")
def compiled() -> bytes:
    """The kernels."""
    return build.shared_library().read_bytes()


def of_another_processor(kernels: bytes) -> bytes:
    """An ELF file says whose code it has in bytes 18 and 19."""
    return kernels[:18] + b"\xff\xff" + kernels[20:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kernels: b"",
        lambda kernels: b"no library",
        lambda kernels: bytes(len(kernels)),
        lambda kernels: kernels[:64],
        lambda kernels: kernels[: len(kernels) // 2],
        lambda kernels: kernels[:-1],
        of_another_processor,
    ],
)
def test_a_library_that_cannot_be_loaded_is_built_again(
    compiled: bytes,
    unbuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    whole = unbuilt.parent / "whole"
    whole.write_bytes(compiled)
    make = 'for last; do :; done; echo "$last" >> "$STARTS"; cp "$MADE" "$last"'
    monkeypatch.setenv("CXX", str(program(unbuilt, make)))
    monkeypatch.setenv("STARTS", str(unbuilt.parent / "starts"))
    monkeypatch.setenv("MADE", str(whole))
    path = build.shared_library()
    path.write_bytes(damage(compiled))
    with caplog.at_level(logging.INFO):
        library.load_library()
    assert re.search("cannot be loaded: .*; building it again", caplog.text)
    assert path.read_bytes() == compiled
    assert n_builds(unbuilt.parent / "starts") == 2


def test_libraries_that_can_never_be_loaded(unbuilt: Path, starts: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        library.load_library()
    assert n_builds(starts) == 2


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

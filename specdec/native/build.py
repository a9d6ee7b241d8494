"""Compiles the kernels for this machine, once, into the user's cache.

The file's name carries a hash of everything that went into it, and it is built under a temporary
name, so that any number of processes may start at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from specdec.errors import UnsupportedError

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(sorted(path.name for path in FOLDER.glob("*.cpp")))
HEADERS = tuple(sorted(path.name for path in FOLDER.glob("*.h")))
LEVEL = "-O3"
EXACT_FLAGS = ("-std=c++17", "-fno-fast-math", "-ffp-contract=off", "-fPIC", "-pthread")
VARIANTS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""Further flags, tried in this order: not every compiler has every one."""
TIMEOUT = 600.0
"""Seconds that a build may take; on a machine that other programs keep busy it takes long."""


def shared_library() -> Path:
    """The compiled kernels, built if they are not in the cache.

    Raises `UnsupportedError` without a compiler, or if it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    path = cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    log.info("building the native kernels with %s (once)", compiler)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            compile_kernels(compiler, built)
            built.replace(path)
    except OSError as error:
        raise UnsupportedError(
            f"native kernels: cannot write {path.parent}: {error.strerror or error}"
        ) from None
    return path


def find_compiler() -> str:
    """The C++ compiler: ``$CXX`` up to its first argument, else g++ or clang++.

    Raises `UnsupportedError` without one, also if ``$CXX`` names one that is not there.
    """
    chosen = _words_of("CXX")
    for name in chosen[:1] or ("g++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    if chosen:
        raise UnsupportedError(f"native kernels: CXX: there is no '{chosen[0]}'")
    raise UnsupportedError("native kernels: found no C++ compiler; install g++ or set CXX")


def cache_folder() -> Path:
    """Where programs of this user keep what they can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"


def compile_kernels(compiler: str, path: Path) -> None:
    """Compiles the kernels into ``path``, by the first of `VARIANTS` that the compiler takes.

    ``$CXXFLAGS`` may change the level of optimisation, but not what exact numbers need. Raises
    `UnsupportedError` with the compiler's first line.
    """
    message = ""
    for variant in VARIANTS:
        flags = [*_arguments(), LEVEL, *_words_of("CXXFLAGS"), *EXACT_FLAGS, *variant]
        found = _build(compiler, flags, path)
        if not found:
            return
        message = message or found
    raise UnsupportedError(f"native kernels: {compiler} failed: {message}")


def _build(compiler: str, flags: list[str], path: Path) -> str:
    """Compiles all files, as many at a time as there are processors; why not, or ""."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = {name: str(Path(folder) / f"{name}.o") for name in SOURCES}
        commands = [
            [compiler, *flags, "-c", str(FOLDER / name), "-o", made]
            for name, made in objects.items()
        ]
        link = [compiler, *flags, "-shared", *objects.values(), "-o", str(path)]
        try:
            with _noted_interrupts() as interrupts:
                return _run_all(commands, Path(folder), interrupts) or _run_all(
                    [link], Path(folder), interrupts
                )
        except OSError as error:
            raise _does_not_run(compiler, error) from None


def _run_all(commands: Iterable[list[str]], folder: Path, interrupts: Sequence[int]) -> str:
    """Runs compilers side by side; the first line of one that failed, or "".

    None of them outlives the call, whatever ends it: each has a group of its own to be killed.
    Ctrl-C ends it at once, also where interrupts are put off.
    """
    waiting = [(command, folder / f"{i}.log") for i, command in enumerate(commands)]
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    deadline = time.monotonic() + TIMEOUT
    try:
        while waiting or running:
            if interrupts:
                raise KeyboardInterrupt
            while waiting and len(running) < (os.cpu_count() or 1):
                command, report = waiting.pop(0)
                running.append((_start(command, report), report))
            for process, report in [item for item in running if item[0].poll() is not None]:
                running.remove((process, report))
                if process.returncode:
                    lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
                    return next(iter(lines), "no message")
            if time.monotonic() > deadline:
                return f"no end after {TIMEOUT:.0f} seconds"
            time.sleep(0.01)
    finally:
        for process, _ in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return ""


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """A list that gets an item for every Ctrl-C inside.

    Compilers do not see Ctrl-C, as they have sessions of their own.
    """
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if before in (signal.SIG_IGN, None) or not is_main:
        yield noted
        return
    signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _start(command: list[str], report: Path) -> subprocess.Popen[bytes]:
    """A compiler with its messages in ``report``, and without what was loaded into this program."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with report.open("wb") as messages:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=messages,
            env=environment,
            start_new_session=True,
        )


def _does_not_run(compiler: str, error: Exception) -> UnsupportedError:
    return UnsupportedError(f"native kernels: {compiler} does not run: {error}")


def _fingerprint(compiler: str) -> str:
    """A hash of the sources, the flags, the compiler and the processor's abilities."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((FOLDER / name).read_bytes())
    try:
        version = subprocess.run(
            [compiler, *_arguments(), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _does_not_run(compiler, error) from None
    flags = _arguments(), LEVEL, _words_of("CXXFLAGS"), EXACT_FLAGS, VARIANTS
    digest.update(repr((flags, compiler, version, processor())).encode())
    return digest.hexdigest()[:20]


def _arguments() -> list[str]:
    """What ``$CXX`` has behind the compiler, or the compiler itself behind a wrapper."""
    return _words_of("CXX")[1:]


def _words_of(variable: str) -> list[str]:
    """What the user has put into a variable of the environment, as a shell reads it."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise UnsupportedError(f"native kernels: {variable}: {error}") from None


def processor() -> str:
    """What this processor is and can do: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "model name")
    found = {line for line in lines if line.partition("\t")[0].rstrip() in names}
    return "\n".join(sorted(found)) or f"{platform.machine()} {platform.processor()}"

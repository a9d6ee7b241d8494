"""Compiles the kernels for this machine, once, into the user's cache.

The file's name carries a hash of everything that went into it. Any number of processes may start
at once: one of them builds, in a folder of its own, while the others wait.
"""

from __future__ import annotations

import contextlib
import errno
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
from specdec.folders import cache_folder

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
LOCK_TIMEOUT = TIMEOUT
"""Seconds that it waits for another one."""
UNFINISHED = "building-"
"""What the folder of a build begins with, in the cache."""


def shared_library(*, broken: int | None = None) -> Path:
    """The compiled kernels, built if they are not in the cache, or still the ``broken`` ones.

    These are known by when they were written (see `written_at`). Raises `UnsupportedError` without
    a compiler, or if it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    path = cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    try:
        if written_at(path) in (None, broken):
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as held:
                if _take_lock(path.parent / "build.lock", held):
                    for left in path.parent.glob(f"{UNFINISHED}*"):  # by a build that was killed
                        shutil.rmtree(left, ignore_errors=True)
                if written_at(path) in (None, broken):
                    _build_in_place(compiler, path)
    except OSError as error:
        raise UnsupportedError(
            f"native kernels: cannot write {path.parent}: {error.strerror or error}"
        ) from None
    return path


def written_at(path: Path) -> int | None:
    """When a file was written, in nanoseconds; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def _build_in_place(compiler: str, path: Path) -> None:
    """Builds beside ``path`` first: whoever looks there sees a whole file or none."""
    log.info("building the native kernels with %s (once)", compiler)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        built = Path(folder) / path.name
        compile_kernels(compiler, built)
        if _fingerprint(compiler) not in path.name:
            raise UnsupportedError("native kernels: their sources changed meanwhile; start again")
        built.replace(path)


def _take_lock(path: Path, held: contextlib.ExitStack) -> bool:
    """Waits for a lock that goes with ``held``; Ctrl-C ends this as it ends a build.

    False where there are no locks, or if one is held for too long: all that it saves is work.
    """
    deadline = None
    try:
        import fcntl  # not everywhere

        file = held.enter_context(path.open("ab"))
        with _noted_interrupts() as interrupts:
            while not interrupts:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                if deadline is None:
                    log.info("waiting for another process to build the native kernels")
                    deadline = time.monotonic() + LOCK_TIMEOUT
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.05)
            raise KeyboardInterrupt
    except (ImportError, OSError):
        return False


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


def compile_kernels(compiler: str, path: Path) -> None:
    """Compiles the kernels into ``path``, by the first of `VARIANTS` that the compiler takes.

    The objects stay beside it. ``$CXXFLAGS`` may change the level of optimisation, but not what
    exact numbers need. Raises `UnsupportedError` with the line in which the compiler says why.
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
    objects = {name: str(path.with_name(f"{name}.o")) for name in SOURCES}
    commands = [
        [compiler, *flags, "-c", str(FOLDER / name), "-o", made] for name, made in objects.items()
    ]
    link = [compiler, *flags, "-shared", *objects.values(), "-o", str(path)]
    try:
        with _noted_interrupts() as interrupts:
            return _run_all(commands, interrupts) or _run_all([link], interrupts)
    except OSError as error:
        raise _does_not_run(compiler, error) from None


def _run_all(commands: Iterable[list[str]], interrupts: Sequence[int]) -> str:
    """Runs compilers side by side; the line that says why one failed, or "".

    None of them outlives the call, whatever ends it: each has a group of its own to be killed.
    Ctrl-C ends it at once, also where interrupts are put off.
    """
    waiting = list(commands)
    running: list[_Compiler] = []
    deadline = time.monotonic() + TIMEOUT
    try:
        while waiting or running:
            if interrupts:
                raise KeyboardInterrupt
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(_Compiler(waiting.pop(0)))
            for compiler in [compiler for compiler in running if compiler.has_ended()]:
                if compiler.failure():
                    return compiler.failure()
                compiler.end()
                running.remove(compiler)
            if time.monotonic() > deadline:
                return f"no end after {TIMEOUT:.0f} seconds"
            time.sleep(0.01)
    finally:
        for compiler in running:
            compiler.end()
    return ""


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """A list that gets an item for every Ctrl-C inside; if any, the end is a `KeyboardInterrupt`.

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
    if noted:
        raise KeyboardInterrupt


class _Compiler:
    """One that runs, without what was loaded into this program.

    Its messages come through a pipe: they are there also when a disk is full.
    """

    def __init__(self, command: list[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment | {"LC_ALL": "C"},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._messages = b""

    def has_ended(self) -> bool:
        """To be asked again and again: a compiler waits while its pipe is full."""
        has_ended = self._process.poll() is not None
        self._messages += self._pipe.read() or b""
        return has_ended

    def failure(self) -> str:
        """Why it failed, or "": the line that tells of a full disk, or else the first."""
        if not self._process.returncode:
            return ""
        lines = self._messages.decode(errors="replace").splitlines()
        full = [line for line in lines if os.strerror(errno.ENOSPC) in line]
        return next(iter(full + lines), f"no message (exit code {self._process.returncode})")

    def end(self) -> None:
        """Kills it if it runs."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


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

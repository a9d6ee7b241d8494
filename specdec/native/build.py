"""Compiles the kernels for this machine, once, into the user's cache.

The file's name carries a hash of everything that went into it, and it is built under a temporary
name, so that any number of processes may start at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from specdec.errors import UnsupportedError

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = (
    *("activations.cpp", "matmul.cpp", "attention.cpp", "parallel.cpp", "functions.cpp"),
    *("attention_branch.cpp", "feed_forward.cpp", "experts.cpp", "delta_net.cpp"),
    *("logits.cpp", "layer.cpp"),
)
HEADERS = (
    *("vector.h", "numbers.h", "bytes.h", "formats.h", "activations.h", "matmul.h", "layer.h"),
    *("parallel.h", "branch.h", "attention.h", "attention_branch.h", "feed_forward.h"),
    *("experts.h", "delta_net.h", "logits.h"),
)
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-fast-math",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-pthread",
)
VARIANTS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ())
"""Further flags, tried in this order: not every compiler has every one."""
TIMEOUT = 300.0


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
    """The C++ compiler: ``$CXX``, else g++ or clang++. Raises `UnsupportedError` without one."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise UnsupportedError("native kernels: found no C++ compiler; install g++ or set CXX")


def cache_folder() -> Path:
    """Where programs of this user keep what they can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdec"


def compile_kernels(compiler: str, path: Path) -> None:
    """Compiles the kernels into ``path``, by the first of `VARIANTS` that the compiler takes.

    ``$CXXFLAGS`` come first, so that they cannot undo what exact numbers need.
    """
    sources = [str(FOLDER / name) for name in SOURCES]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    message = ""  # without what was loaded into this program, such as a sanitizer
    for variant in VARIANTS:
        command = [compiler, *_user_flags(), *COMMON_FLAGS, *variant, *sources, "-o", str(path)]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnsupportedError(f"native kernels: {compiler} does not run: {error}") from None
        if result.returncode == 0:
            return
        message = message or next(iter(result.stderr.splitlines()), "no message")
    raise UnsupportedError(f"native kernels: {compiler} failed: {message}")


def _fingerprint(compiler: str) -> str:
    """A hash of the sources, the flags, the compiler and the processor's abilities."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((FOLDER / name).read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT).stdout
    flags = _user_flags(), COMMON_FLAGS, VARIANTS
    digest.update(repr((flags, compiler, version, processor())).encode())
    return digest.hexdigest()[:20]


def _user_flags() -> list[str]:
    return shlex.split(os.environ.get("CXXFLAGS", ""))


def processor() -> str:
    """What this processor is and can do: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "model name")
    found = {line for line in lines if line.partition("\t")[0].rstrip() in names}
    return "\n".join(sorted(found)) or f"{platform.machine()} {platform.processor()}"

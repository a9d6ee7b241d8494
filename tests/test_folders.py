"""The cache folder, also of a user who has no home; files that are whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.errors import UnsupportedError
from specdec.folders import cache_folder, write_whole


def test_the_users_choice_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/specdec")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/specdec")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(UnsupportedError, match="set XDG_CACHE_HOME or HOME"):
        cache_folder()


def test_nothing_asks_for_a_home_before_it_is_needed() -> None:
    script = "import pathlib; del pathlib.Path.home; import specdec.engine, specdec_cli.main"
    variables = {name: value for name, value in os.environ.items() if name != "HOME"}
    subprocess.run([sys.executable, "-c", script], env=variables, check=True)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for data in ("naïve\n", b"\0\xff"):
        write_whole(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    os.umask(mask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "more")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"\0\xff"

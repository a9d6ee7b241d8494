"""The command as users meet it: what goes to stdout, what to stderr, and the exit code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.main import run

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
TARGET = str(VECTORS / "tgt_llama.gguf")
PLAIN = ["generate", "-m", TARGET, "--temp", "0", "-c", "256"]
SPECULATIVE = ["--spec-type", "ngram-simple", *"--spec-ngram-simple-size-n 1".split()]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LLAMA_ARG_"):
            monkeypatch.delenv(name)


def specdec(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "specdec_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload,no-any-return]


def test_stdout_carries_only_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAIN, "-p", "hello", "-n", "16"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "t/s" in err
    assert "t/s" not in out
    assert run([*PLAIN, "-p", "hello", "-n", "16", *SPECULATIVE]) == 0
    speculative, err = capsys.readouterr()
    assert speculative == out
    assert run([*PLAIN, "-p", "hello", "-n", "16", "--no-show-timings"]) == 0
    assert capsys.readouterr() == (out, "")


def test_statistics_of_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PLAIN, "-p", "a b c " * 20, "-n", "40", *SPECULATIVE, "-lv", "4"]
    assert run([*words, "--spec-ngram-simple-size-m", "4"]) == 0
    err = capsys.readouterr().err
    assert "draft acceptance = " in err
    assert "acceptance length = " in err
    assert "ngram-simple: " in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--help"], 0, ""),
        (["--version"], 0, ""),
        (["generat"], 2, "unknown command: generat (did you mean 'generate'?)"),
        (["generate", "-p", "x"], 2, "--model is required"),
        (["generate", "-m", "nowhere.gguf", "-p", "x"], 1, "nowhere.gguf"),
        (["generate", "-m", str(VECTORS), "-p", "x"], 1, "directory"),
        ([*PLAIN, "-f", "nowhere.txt"], 2, "--file: cannot read nowhere.txt"),
        ([*PLAIN, "-p", "x", "-f", "y"], 2, "exclude each other"),
        ([*PLAIN, "-p", "x", "--spec-type", "draft-simple"], 2, "requires a draft model"),
        ([*PLAIN, "-p", "x", "-md", "nowhere.gguf"], 1, "nowhere.gguf"),
        ([*PLAIN, "-p", "x", "--device", "cuda:99"], 2, "unknown device"),
        ([*PLAIN, "-p", "x", "-cnv"], 2, "has no chat template"),
        ([*PLAIN, "-p", "word " * 300], 1, "do not fit the context of 256"),
        ([*PLAIN, "-p", "x", "--logit-bias", "99999+1"], 2, "--logit-bias"),
        ([*PLAIN, "-p", "x", "-o", "/nowhere/at/all"], 2, "--output: cannot write"),
        (
            [*PLAIN, "-p", "x", "--spec-type", "ngram-cache", "-lcd", "/nowhere/at/all"],
            2,
            "--lookup-cache-dynamic: cannot write /nowhere/at/all",
        ),
    ],
)
def test_mistakes_end_in_one_line(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    if code:
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: ")


def test_a_broken_draft_is_never_a_plain_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "draft.gguf"
    broken.write_bytes(Path(TARGET).read_bytes()[:5000])
    assert run([*PLAIN, "-p", "x", "-md", str(broken)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert str(broken) in err


def test_a_perfect_draft(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAIN, "-p", "hello", "-n", "20"]) == 0
    plain = capsys.readouterr().out
    for extra in ([], ["--spec-draft-sampling", "probabilistic"], ["--spec-type", "draft-simple"]):
        assert run([*PLAIN, "-p", "hello", "-n", "20", "-md", TARGET, *extra]) == 0
        out, err = capsys.readouterr()
        assert out == plain
        assert "draft acceptance = 1.00000 (15 accepted / 15 generated)" in err


def test_prompts_from_a_file_and_a_pipe(tmp_path: Path) -> None:
    expected = specdec(*PLAIN, "-p", "hello", "-n", "8").stdout
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hello\n", encoding="utf-8")
    assert specdec(*PLAIN, "-f", str(prompt), "-n", "8").stdout == expected
    assert specdec(*PLAIN, "-n", "8", input="hello\n").stdout == expected
    assert specdec(*PLAIN, "-n", "8", "-p", "-", input="hello").stdout == expected


def test_empty_input_starts_from_bos() -> None:
    result = specdec(*PLAIN, "-n", "4", stdin=subprocess.DEVNULL)
    assert result.returncode == 0
    assert result.stdout


@pytest.mark.parametrize("n_predict", [0, 1, 2, 3])
def test_exact_lengths(n_predict: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*PLAIN, "-p", "hello", "-n", str(n_predict), "-md", TARGET]
    assert run([*words, "--spec-draft-n-max", "16"]) == 0
    out, err = capsys.readouterr()
    if n_predict == 0:
        assert out == ""
    else:
        assert f"({n_predict} tokens in" in err or n_predict == 1


def test_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "reply.txt"
    assert run([*PLAIN, "-p", "hello", "-n", "8", "-o", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == capsys.readouterr().out.removesuffix("\n")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "words",
    [
        [*PLAIN, "-p", "hello", "-n", "200"],
        ["inspect", TARGET, "--tensors"],
        ["generate", "--help"],
        ["tokenize", "-m", TARGET, "-p", "hello"],
    ],
)
def test_a_closed_pipe_ends_quietly(words: list[str]) -> None:
    command = f"{shlex.join([sys.executable, '-m', 'specdec_cli', *words])} | head -c 5"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=120
    )
    assert result.returncode == 0
    assert len(result.stdout) == 5
    assert b"Traceback" not in result.stderr
    assert b"BrokenPipe" not in result.stderr


@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [
        (">/dev/full", 1, "error: input or output: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&- >/dev/null", 0, ""),
    ],
)
def test_an_output_that_takes_nothing(shell: str, code: int, message: str) -> None:
    command = shlex.join([sys.executable, "-m", "specdec_cli", "tokenize", "-m", TARGET, "-p", "x"])
    result = subprocess.run(
        ["bash", "-c", f"{command} {shell}"], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, "", message)


def test_letters_that_the_encoding_lacks_are_replaced() -> None:
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = specdec(*PLAIN, "-p", "hello", "-n", "2", env=variables)  # two times half a letter
    assert (result.returncode, result.stdout) == (0, "??\n")
    assert "t/s" in result.stderr


def test_a_system_prompt_needs_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAIN, "-p", "hello", "-n", "1", "-sys", "be short"]) == 0
    assert "warning: --system-prompt is not used" in capsys.readouterr().err

"""`specdec tokenize`: the output of llama-tokenize, flag by flag."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tiny

from specdec_cli.main import run

TARGET = str(Path(__file__).parent.parent / "data" / "vectors" / "tgt_llama.gguf")
Capture = pytest.CaptureFixture[str]
BinaryCapture = pytest.CaptureFixture[bytes]


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    """A file without weights whose tokens are bytes: byte b has id 3 + b; it adds a BOS."""
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    tiny.add_vocabulary(writer)
    writer.kv_data[0]["tokenizer.ggml.add_bos_token"].value = True
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def test_a_line_for_each_token(vocabulary: str, capsys: Capture) -> None:
    assert run(["tokenize", "-m", vocabulary, "-p", "ab"]) == 0
    assert capsys.readouterr() == ("     1 -> '<s>'\n   100 -> 'a'\n   101 -> 'b'\n", "")


@pytest.mark.parametrize(
    ("words", "out"),
    [
        (["-p", "ab", "--ids"], "[1, 100, 101]\n"),
        (["-p", "ab", "--ids", "--no-bos"], "[100, 101]\n"),
        (["-p", "", "--ids", "--no-bos"], "[]\n"),
        (["-p", "ab", "--ids", "--show-count"], "[1, 100, 101]\nTotal number of tokens: 3\n"),
        (["-p", "<end>", "--ids"], "[1, 2]\n"),
        (["-p", "<end>", "--ids", "--no-parse-special"], "[1, 63, 104, 113, 103, 65]\n"),
        (["-p", r"\n", "--ids"], "[1, 13]\n"),
        (["-p", r"\n", "--ids", "--no-escape"], "[1, 95, 113]\n"),
        (["--decode", "100,101"], "ab\n"),
        (["--decode", "[1, 100]"], "<s>a\n"),
        (["--decode", ""], "\n"),
    ],
)
def test_flags(vocabulary: str, words: list[str], out: str, capsys: Capture) -> None:
    assert run(["tokenize", "-m", vocabulary, *words]) == 0
    assert capsys.readouterr() == (out, "")


def test_bytes_are_written_as_they_are(vocabulary: str, capsysbinary: BinaryCapture) -> None:
    assert run(["tokenize", "-m", vocabulary, "-p", "é", "--no-bos"]) == 0
    assert capsysbinary.readouterr().out == b"   198 -> '\xc3'\n   172 -> '\xa9'\n"
    assert run(["tokenize", "-m", vocabulary, "--decode", "198,172"]) == 0
    assert capsysbinary.readouterr().out == "é\n".encode()


def test_file_and_stdin_keep_their_newlines(
    vocabulary: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("a\n", encoding="utf-8")
    assert run(["tokenize", "-m", vocabulary, "-f", str(tmp_path / "text"), "--ids"]) == 0
    assert capsys.readouterr().out == "[1, 100, 13]\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    assert run(["tokenize", "-m", vocabulary, "--stdin", "--ids"]) == 0
    assert capsys.readouterr().out == "[1, 100, 13]\n"


def test_decode_is_the_inverse(capsys: Capture) -> None:
    text = "Hello world, 123!"
    assert run(["tokenize", "-m", TARGET, "-p", text, "--ids"]) == 0
    ids = capsys.readouterr().out
    assert run(["tokenize", "-m", TARGET, "--decode", ids]) == 0
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-p", "x"], 2, "--model is required"),
        (["-m", TARGET], 2, "needs one of --prompt, --file, --stdin, --decode; found none"),
        (["-m", TARGET, "-p", "x", "--decode", "1"], 2, "found --prompt and --decode"),
        (["-m", TARGET, "--decode", "1,x"], 2, "not a comma list of token ids"),
        (["-m", TARGET, "--decode", "384"], 2, "ids 0 to 383"),
        (["-m", TARGET, "--decode", "-1"], 2, "ids 0 to 383"),
        (["-m", TARGET, "-f", "no/such/file"], 2, "cannot read no/such/file"),
        (["-m", "no/such/model", "-p", "x"], 1, "no such file"),
    ],
)
def test_mistakes(words: list[str], code: int, message: str, capsys: Capture) -> None:
    assert run(["tokenize", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys, specdec_cli.main as m\n"
        f"assert m.run(['tokenize', '-m', {TARGET!r}, '-p', 'x']) == 0\n"
        "assert not {'torch', 'gguf', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

"""`specdec inspect`: what is shown on stdout, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_drafts

from specdec_cli.main import run

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
TARGET = str(VECTORS / "tgt_qwen3.gguf")
DRAFT = str(VECTORS / "dft_d2t.gguf")

Capture = pytest.CaptureFixture[str]


def lines_of(text: str) -> dict[str, str]:
    """Key -> value of the indented lines of one file."""
    pairs = (line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("  "))
    return {pair[0]: pair[-1].strip() for pair in pairs}


def test_a_draft(capsys: Capture) -> None:
    assert run(["inspect", DRAFT]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == DRAFT
    shown = lines_of(out)
    assert shown["kind"] == "draft (draft-dflash)"
    assert shown["head"] == "plain DFlash"
    assert shown["block size"] == "6 tokens"
    assert shown["tapped layers"] == "1, 3 (inputs of the target's)"
    assert shown["mask token"] == "5 '<file_sep>'"
    assert shown["vocabulary map"] == "d2t, 160 tokens"
    assert shown["embedding"] == "the target's"


def test_a_target(capsys: Capture) -> None:
    assert run(["inspect", TARGET]) == 0
    shown = lines_of(capsys.readouterr().out)
    assert shown["kind"] == "target (qwen3)"
    assert shown["layers"] == "4 of width 64, 4 heads of 32, 2 for keys and values, feed-forward 80"
    assert shown["tokenizer"].startswith("gpt2 (smollm), 384 tokens, BOS 1 ")
    assert shown["chat template"] == "no"
    assert "head" not in shown


@pytest.mark.parametrize("name", ["mtp_mimo2", "eagle3_d2t", "mtp_gemma4_assistant", "dspark_dsv4"])
def test_drafts_of_all_kinds_are_shown(name: str, capsys: Capture) -> None:
    assert run(["inspect", str(VECTORS / f"{name}.gguf")]) == 0
    assert "head" in lines_of(capsys.readouterr().out)


def test_tensors(capsys: Capture) -> None:
    assert run(["inspect", DRAFT, "--tensors"]) == 0
    assert "  d2t " in capsys.readouterr().out


def test_broken_files_do_not_hide_the_others(tmp_path: Path, capsys: Capture) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(3))
    assert run(["inspect", str(broken), DRAFT, str(tmp_path / "none.gguf")]) == 1
    out, err = capsys.readouterr()
    assert lines_of(out)["head"] == "plain DFlash"
    errors = err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith(f"error: {broken}: ")
    assert errors[1].startswith(f"error: {tmp_path / 'none.gguf'}: no such file")


def test_json(tmp_path: Path, capsys: Capture) -> None:
    missing = str(tmp_path / "none.gguf")
    assert run(["inspect", DRAFT, missing, "--json", "--tensors"]) == 1
    result = json.loads(capsys.readouterr().out)
    good, bad = result["files"]
    assert good["draft"]["target_layers"] == [1, 3]
    assert good["draft"]["n_draft_vocab"] == 160
    assert any(tensor["name"] == "d2t" for tensor in good["tensors"])
    assert bad["path"] == missing
    assert "no such file" in bad["error"]


@pytest.mark.parametrize("words", [["-m", TARGET, DRAFT], ["-m", TARGET, "-md", DRAFT]])
def test_a_pair_that_fits(words: list[str], capsys: Capture) -> None:
    assert run(["inspect", *words]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("tgt_qwen3.gguf + dft_d2t.gguf: fits, runs as draft-dflash\n")
    assert err == ""


def test_a_pair_that_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    target = tiny.write_target(tmp_path / "t.gguf")
    draft = tiny_drafts.write_dflash(tmp_path / "d.gguf", n_embd=64)
    words = ["inspect", "-m", str(target), str(draft)]
    assert run(words) == 1
    out = capsys.readouterr().out
    assert "t.gguf + d.gguf: does not fit\n" in out
    assert "hidden width 64" in out
    assert "the target's 32" in out
    assert run([*words, "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert (verdict["fits"], verdict["fault"]) == (False, "mismatch")


def test_the_verdict_is_what_generate_says(tmp_path: Path, capsys: Capture) -> None:
    target = tiny.write_target(tmp_path / "t.gguf")
    draft = tiny_drafts.write_dflash(tmp_path / "d.gguf", target_layers=(0, 9))
    pair = ["-m", str(target), "-md", str(draft)]
    assert run(["generate", *pair, "-p", "x", "-n", "1"]) == 1
    message = capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")
    assert run(["inspect", *pair]) == 1
    assert f"  {message}\n" in capsys.readouterr().out


def test_without_a_file(capsys: Capture) -> None:
    assert run(["inspect"]) == 2
    assert "inspect needs a file" in capsys.readouterr().err


def test_an_unknown_flag(capsys: Capture) -> None:
    assert run(["inspect", DRAFT, "--tensor"]) == 2
    assert "did you mean '--tensors'?" in capsys.readouterr().err


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys, specdec_cli.main as m\n"
        f"m.run(['inspect', '-m', {TARGET!r}, {DRAFT!r}])\n"
        "assert not {'torch', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)

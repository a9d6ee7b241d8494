"""What scripts read: `--json`, `--spec-trace`, `--spec-check`, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_commands

from specdec.drafters.base import Draft
from specdec.tokenizer import Tokenizer
from specdec.verify import Verifier
from specdec_cli.main import run

Capture = pytest.CaptureFixture[str]
NGRAM = [*"--spec-type ngram-simple --spec-ngram-simple-size-n 1".split()]
TIMINGS = {
    *("prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
    *("draft_ms", "target_ms", "verify_ms", "observe_ms"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_commands.write(tmp_path_factory.mktemp("json"))


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is always wrong."""
    return tiny.write_target(tmp_path_factory.mktemp("json") / "liar.gguf", negated=True)


def test_one_object_and_nothing_else(target: Path, capsys: Capture) -> None:
    words = tiny_commands.generate(target, "-p", "abcabc", "-n", "24", "-md", str(target))
    assert run(words) == 0
    text = capsys.readouterr().out
    assert run([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["text"] == text.removesuffix("\n")
    assert len(found["token_ids"]) == 24
    assert found["finish_reason"] == "length"
    assert set(found["timings"]) == TIMINGS
    assert found["timings"]["prompt_n"] == 5
    assert found["timings"]["predicted_n"] == 24
    spec = found["speculation"]
    assert spec["rounds"] * spec["acceptance_length"] == pytest.approx(24)
    assert spec["acceptance_rate"] == spec["accepted"] / spec["drafted"] == 1.0
    assert spec["per_position"] == [1.0] * 3
    assert set(spec["drafters"]) == {"draft-simple"}
    assert "t/s" in err


def test_json_without_speculation(target: Path, capsys: Capture) -> None:
    assert run(tiny_commands.generate(target, "-p", "x", "-n", "0", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["token_ids"]) == ("", [])
    assert found["speculation"]["drafters"] == {}


def test_an_error_leaves_stdout_empty(target: Path, capsys: Capture) -> None:
    assert run(tiny_commands.generate(target, "-p", "x" * 500, "--json")) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")


def test_a_line_for_each_round(target: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    words = tiny_commands.generate(target, "-p", "hello", "-n", "20", "--json", "-md", str(target))
    assert run([*words, "--spec-trace", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [token for line in lines for token in line["emitted"]] == found["token_ids"]
    assert len(lines) == found["speculation"]["rounds"]
    position = 5
    for line in lines:
        assert line["position"] == position
        position += len(line["emitted"])
        assert line["emitted"][: line["accepted"]] == line["drafted"][: line["accepted"]]
        assert line["drafter"] == ("draft-simple" if line["drafted"] else None)
        assert set(line["ms"]) == {"draft", "target", "verify"}
    assert lines[0]["draft_end"] == "n_max"
    assert sum(line["accepted"] for line in lines) == found["speculation"]["accepted"]


def test_no_rounds_no_trace(target: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "trace.jsonl"
    assert run(tiny_commands.generate(target, "-p", "x" * 500, "--spec-trace", str(path))) == 1
    assert not path.exists()
    assert run(tiny_commands.generate(target, "-p", "x", "--spec-trace", str(tmp_path))) == 2
    assert "--spec-trace: cannot write" in capsys.readouterr().err


def test_a_check_that_finds_nothing(target: Path, liar: Path, capsys: Capture) -> None:
    for extra in (NGRAM, ["-md", str(target)], ["-md", str(liar)]):
        words = tiny_commands.generate(target, "-p", "ababab", "-n", "16", "--spec-check", *extra)
        assert run(words) == 0
        out, err = capsys.readouterr()
        assert out
        assert "spec-check: equal, 16 tokens" in err
    seeded = ["--temp", "1", "--seed", "3", "-md", str(target)]
    assert run(tiny_commands.generate(target, "-p", "a", "-n", "16", "--spec-check", *seeded)) == 0
    assert "spec-check: equal" in capsys.readouterr().err
    assert (
        run(
            tiny_commands.generate(
                target, "-p", "a", "-n", "9", "--spec-check", "--temp", "1", *NGRAM
            )
        )
        == 0
    )


def accept_everything(self: Verifier, draft: Draft, logits: Any, _: object) -> list[int]:
    """A verifier that believes the draft."""
    return [*draft.tokens, int(logits[len(draft.tokens)].argmax())]


def test_a_check_that_finds_a_difference(
    target: Path, liar: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "verify", accept_everything)
    words = tiny_commands.generate(
        target, "-p", "ababab", "-n", "16", "--spec-check", "-md", str(liar)
    )
    assert run(words) == 1
    err = capsys.readouterr().err
    assert "spec-check: DIFFERENT at token 0: " in err
    assert "logit gap " in err
    assert run([*words, "--json", "--no-show-timings"]) == 1
    found = json.loads(capsys.readouterr().out)["check"]
    assert found["equal"] is False
    assert found["index"] == 0
    assert found["gap"] > 0
    assert found["plain"] == found["best"][0] != found["speculative"]


def test_sampled_drafts_are_not_compared(target: Path, capsys: Capture) -> None:
    words = tiny_commands.generate(target, "-p", "a", "-n", "8", "-md", str(target), "--spec-check")
    sampled = ["--temp", "1", "--spec-draft-sampling", "probabilistic"]
    assert run([*words, *sampled]) == 0
    assert "spec-check: not compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([], "--spec-check: there is no drafter"),
        ([*NGRAM, "--spec-synth-len", "2"], "--spec-check: synthetic acceptance"),
    ],
)
def test_checks_that_make_no_sense(
    target: Path, extra: list[str], message: str, capsys: Capture
) -> None:
    assert run(tiny_commands.generate(target, "-p", "a", "--spec-check", *extra)) == 2
    assert message in capsys.readouterr().err


def test_output_is_checked_before_the_model_is_loaded(
    target: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name in (tmp_path, tmp_path / "no" / "such"):
        assert run(tiny_commands.generate(target, "-p", "a", "-n", "2", "-o", str(name))) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "--output: cannot write" in err


def test_the_prompt_is_shown_where_it_was_asked_for(target: Path, capsys: Capture) -> None:
    words = tiny_commands.generate(target, "-p", "hey", "-n", "3", "--no-show-timings")
    assert run(words) == 0
    plain = capsys.readouterr()
    assert run([*words, "--verbose-prompt"]) == 0
    shown = capsys.readouterr()
    assert shown.out == plain.out
    assert shown.err == (
        "number of tokens in prompt = 3\n   107 -> 'h'\n   104 -> 'e'\n   124 -> 'y'\n"
    )
    assert run([*words, "--display-prompt"]) == 0
    assert capsys.readouterr().out == "hey" + plain.out


def test_the_log_as_the_user_wants_it(target: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "log.jsonl"
    words = tiny_commands.generate(
        target, "-p", "x", "-n", "2", "-ctk", "q8_0", "--kernels", "torch", "--no-show-timings"
    )
    assert run([*words, "--log-jsonl", "--log-file", str(path)]) == 0
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "warning"
    assert "--cache-type-k" in line["message"]
    assert "time" in json.loads(path.read_text("utf-8"))
    assert run([*words, "--no-log-prefix", "--log-colors", "on"]) == 0
    assert capsys.readouterr().err.startswith("\033[35m--cache-type-k")
    assert run([*words, "--log-disable"]) == 0
    assert capsys.readouterr().err == ""
    assert run([*words, "--log-file", str(path), "--spec-check"]) == 2
    assert "there is no drafter" in path.read_text("utf-8")


def test_statistics_follow_the_verbosity(target: Path, capsys: Capture) -> None:
    words = tiny_commands.generate(target, "-p", "x", "-n", "9", "-md", str(target))
    shown = {}
    for level in "01234":
        assert run([*words, "-lv", level]) == 0
        shown[level] = capsys.readouterr().err
    assert shown["0"] == ""
    assert shown["1"].count("\n") == 1
    assert "draft acceptance" in shown["3"]
    assert "time = load" not in shown["3"]
    assert "time = load" in shown["4"]
    assert run([*words, "-lv", "4", "--no-perf"]) == 0
    assert "time = load" not in capsys.readouterr().err


def test_ignore_eos_without_an_eos(
    target: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "eos_id", None)
    assert run(tiny_commands.generate(target, "-p", "x", "-n", "2", "--ignore-eos")) == 0
    assert "--ignore-eos: the vocabulary has no EOS token; ignored" in capsys.readouterr().err

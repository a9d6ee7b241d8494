"""Every row of llama.cpp's flag table (tests/data/flags.json): names, variable, value, reaction.

A row of the file has the names, those that switch off, the variable, and a class: `core` works,
`accept` is at least checked and reported, `removed` is an error. `no_op` and `error` say how an
`accept` row reacts.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import BY_NAME, FLAGS, given

from specdec.errors import UsageError
from specdec.options import Options
from specdec_cli.flags_page import page
from specdec_cli.main import run

ROOT = Path(__file__).parent.parent.parent
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/flags.json").read_text("utf-8"))
IDS = [row["names"][0] for row in ROWS]
VALUED = [row for row in ROWS if "switch" not in row and BY_NAME[row["names"][0]].takes_value]

GOOD = {
    "--spec-type": "ngram-mod",
    "--spec-draft-sampling": "probabilistic",
    "--spec-synth-len": "2.5",
    "--spec-synth-rates": "0.5,0.25",
    "--samplers": "top_k;temperature",
    "--logit-bias": "5-1.5",
    "--override-kv": "general.name=str:x,llama.block_count=int:2",
    "--rope-scaling": "yarn",
    "--dry-base": "1.25",
    "--dry-allowed-length": "3",
    "--chat-template-kwargs": '{"a":1}',
    "--reasoning-effort": "low",
    "--reasoning-format": "none",
    "--json-schema": "{}",
    "--numa": "isolate",
    "--split-mode": "row",
    "--load-mode": "mmap",
    "--control-vector-layer-range": "1 2",
}
"""Values of rows that do not take a 1; others are chosen by what the name ends with."""
ENDINGS = {
    ("-cpu-range", "-cpu-range-batch", "cpu-range", "cpu-range-batch"): "0-3",
    ("-override-tensor", "--override-tensor"): "blk=CPU,output=CPU",
    ("type-k", "type-v"): "bf16",
    ("color", "log-colors", "reasoning", "lazy-mode", "fit"): "on",
}
FREE_TEXT = {
    *("--spec-draft-hf", "--spec-draft-device", "--dry-sequence-breaker", "--hf-repo"),
    *("--hf-file", "--hf-token", "--model-url", "--device", "--prompt", "--system-prompt"),
    *("--chat-template", "--reasoning-budget-message", "--reverse-prompt", "--log-prompts-dir"),
    *("--grammar", "--samplers", "--sampler-seq"),
}
"""Rows with which nothing is wrong until a model is there; unknown samplers are only dropped."""


def good_value(name: str, tmp_path: Path) -> str:
    """A value that the row takes."""
    if name in GOOD:
        return GOOD[name]
    for endings, value in ENDINGS.items():
        if name.endswith(endings):
            return value
    if name.endswith("-file"):
        path = tmp_path / "value.json"
        path.write_text("{}\n", encoding="utf-8")
        return str(path)
    return {float: "0.75", int: "2"}.get(BY_NAME[name].type, "1")


def words_of(row: dict[str, Any], name: str, tmp_path: Path) -> list[str]:
    """A command line with the row under one of its names."""
    if not BY_NAME[name].takes_value:
        return [name]
    return [name, *good_value(row["names"][0], tmp_path).split(" ")]


def test_every_row_exists() -> None:
    for row in ROWS:
        flag = BY_NAME[row["names"][0]]
        assert set(row["names"]) <= set(flag.names), row
        assert set(row.get("off", ())) <= set(flag.off), row
        assert row.get("env") == flag.env, row
        assert flag.takes_value != row.get("switch", False) or flag.kind == "action", row


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_name_works_as_its_class_says(
    row: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (*row["names"], *row.get("off", ())):
        words = words_of(row, name, tmp_path)
        caplog.clear()
        if row["class"] == "removed" or row.get("error"):
            with pytest.raises(UsageError, match=rf'argument "{name}": .*(removed|not supported)'):
                given(words)
            continue
        found = given(words).options()
        flag = BY_NAME[name]
        if row.get("no_op"):
            assert [record.levelno for record in caplog.records] == [logging.WARNING]
            assert f"{name} has no effect: " in caplog.text
        elif flag.kind == "set" and flag.takes_value:
            assert found != Options(), name


@pytest.mark.parametrize("row", VALUED, ids=[row["names"][0] for row in VALUED])
def test_a_bad_value_names_the_flag(row: dict[str, Any]) -> None:
    if row["names"][0] in FREE_TEXT or row.get("error"):
        return
    for name in row["names"]:
        for bad in ("", "?!", "1x"):
            if BY_NAME[name].type is Path and bad:
                continue
            with pytest.raises(UsageError) as caught:
                given([name, bad]).options()
            message = str(caught.value)
            assert name in message or row["names"][0] in message
            assert "\n" not in message


@pytest.mark.parametrize("row", [row for row in ROWS if "env" in row])
def test_every_variable_works(row: dict[str, Any], tmp_path: Path) -> None:
    flag = BY_NAME[row["names"][0]]
    value = good_value(flag.name, tmp_path) if flag.takes_value else "on"
    environ = {row["env"]: value}
    if row["class"] == "removed" or row.get("error"):
        with pytest.raises(UsageError, match=f'environment variable "{row["env"]}": '):
            given([], environ)
        return
    from_variable = given([], environ).options()
    assert from_variable == given(words_of(row, flag.name, tmp_path)).options()
    if not flag.takes_value:
        off = given([flag.off[0]] if flag.off else []).options()
        assert given([], {row["env"]: "disabled"}).options() == off
        with pytest.raises(UsageError, match=row["env"]):
            given([], {row["env"]: "maybe"})
    if flag.off:
        negative = row["env"].replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
        assert given([], {negative: "", row["env"]: "on"}).options() == off


def test_a_reported_row_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    given("--numa isolate --numa isolate")
    assert caplog.text.count("--numa has no effect") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ctx-size x", "error: error while handling argument \"--ctx-size\": 'x' is not a whole"),
        ("-ngl x", 'error: --gpu-layers must be a whole number, auto or all, got "x"'),
        ("--prio 7", 'error: error while handling argument "--prio": invalid value: 7'),
        ("-C xyz", "invalid cpumask"),
        ("-Cr 1", "invalid range"),
        ("-fa maybe", "error: unknown value for --flash-attn: 'maybe'"),
        ("--draft 5", "the argument has been removed. use --spec-draft-n-max or"),
        ("--lora a.gguf", 'argument "--lora": not supported: adapters'),
        ("--control-vector-layer-range 1 2", "not supported: control vectors"),
        ("--control-vector-layer-range 1", "expected value for argument"),
        ("--mmap", "invalid argument: --mmap; use --load-mode"),
        ("--port 80", "invalid argument: --port; only llama-server has it"),
        ("-i", "invalid argument: -i; only llama-completion has it"),
        ("--spec-draft-conf-min 1", "use --spec-draft-p-min"),
        ("--offline=1", "--offline takes no value"),
    ],
)
def test_usage_errors_are_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message.replace('"x"', "'x'") in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_warnings_of_values(caplog: pytest.LogCaptureFixture) -> None:
    given(["--chat-template-kwargs", '{"enable_thinking": true, "preserve_reasoning": 1}'])
    assert "enable_thinking is deprecated; use --reasoning on" in caplog.text
    assert "preserve_reasoning is deprecated; use --reasoning-preserve" in caplog.text
    caplog.clear()
    assert given("--samplers top_k;nonsense").options().sampling.samplers == ("top_k",)
    assert "nonsense" in caplog.text
    caplog.clear()
    given("-dt 0.1")
    assert "DEPRECATED: -dt is deprecated and no longer necessary" in caplog.text


def test_silent_rows_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    given("--no-mmproj --no-mmproj-offload")
    assert caplog.text == ""


@pytest.mark.parametrize("prefix", [["generate"], []])
def test_flags_that_print_and_exit(
    prefix: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.resources.cached_models", lambda: [("a/b/c.gguf", 2_000_000)])
    assert run([*prefix, "--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec ")
    assert run([*prefix, "--list-devices"]) == 0
    assert "  cpu: " in capsys.readouterr().out
    assert run([*prefix, "-cl"]) == 0
    assert capsys.readouterr().out == "number of models in cache: 1\n  a/b/c.gguf  2.0 MB\n"


def test_bash_completion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["--completion-bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    asked = "COMP_WORDS=(specdec generate --spec-ty); COMP_CWORD=2; _specdec; echo ${COMPREPLY[@]}"
    with os.popen(f"bash -c 'source {script}; {asked}'") as answer:
        assert answer.read().strip() == "--spec-type"


def test_the_page_of_flags_is_fresh() -> None:
    written = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == page(), "run `make docs`"


def test_every_flag_is_on_the_page() -> None:
    text = page()
    for flag in FLAGS:
        for name in (*flag.names, *flag.off):
            assert f"`{name}`" in text

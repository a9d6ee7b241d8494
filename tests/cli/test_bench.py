"""`specdec bench`: table, JSON, plot, the winning command line."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import tiny

from specdec.bench import Configuration, Result
from specdec_cli.bench import PANELS, winning_command
from specdec_cli.given import Given
from specdec_cli.main import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write_target(tmp_path_factory.mktemp("bench") / "t.gguf"))


@pytest.fixture
def words(target: str) -> list[str]:
    """A perfect draft at two lengths, on one short prompt."""
    sizes = "-c 200 --temp 0 -n 8 --repetitions 1 -p hello --spec-draft-n-max 1,3"
    return ["bench", "-m", target, "-md", target, *sizes.split()]


def test_a_table(words: list[str], capsys: Capture) -> None:
    types = ["--spec-type", "draft-simple", "--spec-type", "ngram-simple,draft-simple"]
    assert run([*words, *types]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert "1 prompts x 1 runs, up to 8 tokens" in lines[0]
    assert "bootstrap over prompts" in lines[0]
    rows = [line.split() for line in lines if line.startswith("  ") and line.strip()]
    assert [row[0] for row in rows[1:]] == [
        "none",
        *["draft-simple"] * 2,
        *["ngram-simple,draft-simple"] * 2,
    ]
    assert [row[1] for row in rows[2:]] == ["1", "3", "1", "3"]
    assert [row[2] for row in rows[2:]] == ["2.00", "4.00", "2.00", "4.00"]
    assert "draft-simple n-max 3: accepted per position 1.00, 1.00, 1.00" in lines
    assert lines[-1].startswith("fastest: specdec generate --model ")


def test_json_and_plot(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    for name in ("plot.png", "plot.svg"):
        plot = tmp_path / name
        assert run([*words, "--json", "--plot", str(plot)]) == 0
        result = json.loads(capsys.readouterr().out)
        assert [one["configuration"]["n_max"] for one in result["results"]] == [None, 1, 3]
        assert result["results"][2]["per_position"] == [1.0, 1.0, 1.0]
        assert result["best"]["command"].startswith("specdec generate ")
        assert plot.stat().st_size > 5000


def test_the_winning_command_is_one_that_runs(words: list[str], capsys: Capture) -> None:
    assert run([*words, "--json"]) == 0
    command = json.loads(capsys.readouterr().out)["best"]["command"]
    given = shlex.split(command)
    assert given[:2] == ["specdec", "generate"]
    assert run([*given[1:], "-p", "hello", "-n", "2"]) == 0


def test_the_words_of_the_winning_command() -> None:
    given = Given(
        {},
        {
            "model.path": Path("my model.gguf"),
            "sampling.samplers": ("top_k", "temperature"),
            "sampling.logit_bias": ((5, 1.5), (6, -2.0)),
            "sampling.ignore_eos": True,
            "generate.conversation": False,
            "generate.prompt": "x",
            "bench.n_max": (1, 2),
        },
    )
    configuration = Configuration(("draft-simple",), Path("d.gguf"), 2)
    best = Result(configuration, 1, None, 0, (), 0, 0, 0, 0, 1, 2, None)
    assert winning_command(given, best) == (
        "specdec generate --model 'my model.gguf' --samplers 'top_k;temperature' "
        "--logit-bias 5+1.5 --logit-bias 6-2 --ignore-eos -no-cnv -md d.gguf "
        "--spec-type draft-simple --spec-draft-n-max 2"
    )


def test_a_hint_at_low_acceptance(
    target: str, words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    liar = tiny.write_target(tmp_path / "liar.gguf", negated=True)
    words = [str(liar) if word == target and i == 4 else word for i, word in enumerate(words)]
    assert run([*words, "-n", "40"]) == 0
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: ")]
    assert len(hints) == 1
    assert "target mismatch" in hints[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--plot", "x.jpg"], "must end in .png or .svg"),
        (["--prompts", "no/such/file"], "cannot read no/such/file"),
        (["--spec-draft-n-max", "0"], "auto or lengths of at least 1"),
        (["--spec-draft-n-max", "1,x"], "not a comma list of whole numbers"),
        (["--spec-type", "draft-magic"], "unknown speculative type: draft-magic"),
    ],
)
def test_mistakes(target: str, more: list[str], message: str, capsys: Capture) -> None:
    assert run(["bench", "-m", target, "-md", target, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_nothing_to_compare(target: str, capsys: Capture) -> None:
    assert run(["bench", "-m", target]) == 2
    assert "give --spec-type or -md" in capsys.readouterr().err
    assert run(["bench", "--spec-type", "ngram-mod"]) == 2
    assert "--model is required" in capsys.readouterr().err


def test_a_plot_without_matplotlib(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run([*words, "--plot", "x.png"]) == 2
    assert "pip install 'specdec[plot]'" in capsys.readouterr().err


def test_no_name_is_used_twice() -> None:
    flags = [flag for panel in PANELS for flag in panel.flags]
    names = [name for flag in flags for name in (*flag.names, *flag.off)]
    assert len(names) == len(set(names))

"""From words and variables to options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from command_line import FLAGS, given, options

from specdec.errors import UsageError
from specdec.options import RANDOM_SEED, Options, leaves
from specdec_cli.main import COMMANDS

LIBRARY_ONLY: set[str] = set()
"""Leaves of `Options` without a flag."""


def test_every_option_has_a_flag() -> None:
    every = [flag for command in COMMANDS.values() for flag in command.flags]
    bound = {flag.path for flag in every} | {path for flag in every for path in flag.values}
    assert set(leaves()) - bound == LIBRARY_ONLY


def test_no_name_is_used_twice() -> None:
    names = [name for flag in FLAGS for name in (*flag.names, *flag.off)]
    assert len(names) == len(set(names))
    assert len({flag.parameter for flag in FLAGS}) == len(FLAGS)


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert options("") == Options()


@pytest.mark.parametrize(
    "alias", ["-md", "--model-draft", "--spec-draft-model", "--spec_draft_model"]
)
def test_aliases(alias: str) -> None:
    assert options([alias, "d.gguf"]).spec.draft.path == Path("d.gguf")


def test_a_value_may_begin_with_a_dash() -> None:
    found = options("-n -1 --seed -1 --top-n-sigma -2.5")
    assert found.generate.n_predict == -1
    assert found.sampling.seed == RANDOM_SEED
    assert found.sampling.top_n_sigma == -2.5


def test_equals_sign_is_understood_behind_long_names_only() -> None:
    assert options("--top-k=7").sampling.top_k == 7
    with pytest.raises(UsageError, match="-n=5"):
        options("-n=5")


@pytest.mark.parametrize("word", ["-mdx", "-n5", "--nonsense", "-zz"])
def test_unknown_words_are_named(word: str) -> None:
    with pytest.raises(UsageError, match=f"invalid argument: {word}"):
        options([word, "1"])


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(UsageError, match=r"did you mean '--top-k'\?"):
        options("--topk 3")


def test_positional_words_are_refused() -> None:
    with pytest.raises(UsageError, match="no positional arguments"):
        options("model.gguf")


def test_missing_value() -> None:
    with pytest.raises(UsageError, match='argument "-n": expected value for argument'):
        options("-n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 12abc", "'12abc' is not a whole number"),
        ("--temp warm", "'warm' is not a number"),
        ("--spec-type a,,b", "unknown speculative type: a"),
        ("--spec-type ngram-mod,", "unknown speculative type: "),
        ("--spec-draft-sampling both", "must be one of: greedy, probabilistic"),
        ("--logit-bias x", "invalid input format"),
        ("--cache-type-k f64", "Unsupported cache type: f64"),
        ("--repeat-last-n -1", "invalid repeat-last-n = -1"),
        ("--repeat-penalty 0", "must be finite and greater than 0"),
        ("--spec-ngram-mod-n-match 0", "ngram size N must be between 1 and 1024 inclusive"),
        ("--spec-ngram-mod-n-max 2000", "ngram n-max must be between 0 and 1024 inclusive"),
        ("--spec-ngram-map-k4v-min-hits 0", "ngram min hits must be at least 1"),
        ("--spec-type draft-dflash,draft-dspark", "cannot be combined"),
        ("-n -3", "--predict must be -2 or more"),
        ("--spec-synth-len -1", "must be at least 1"),
        ("--chat-template-kwargs []", "not a JSON object"),
        ("--draft 5", "has been removed. use --spec-draft-n-max or --spec-ngram-mod-n-max"),
        ("--spec-ngram-size-n 5", "use the respective --spec-ngram-[*]-size-n"),
        ("--override-kv nonsense", "is not KEY=TYPE:VALUE"),
        ("--spec-synth-rates 0.5,x", "not a comma list of numbers"),
    ],
)
def test_bad_values(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(words)


def test_spec_types_add_up_and_none_switches_nothing_off() -> None:
    found = options("--spec-type ngram-mod --spec-type ngram-simple,none", {})
    assert found.spec.types == ("ngram-mod", "none")
    assert found.spec.enabled == ("ngram-mod",)
    with_variable = options("--spec-type ngram-mod", {"LLAMA_ARG_SPEC_TYPE": "ngram-cache"})
    assert with_variable.spec.enabled == ("ngram-cache", "ngram-mod")
    assert options("").spec.types is None
    assert options("--spec-type none").spec.types == ("none",)


def test_spec_default_is_a_preset_that_later_options_override() -> None:
    preset = options("--spec-default").spec
    assert preset.enabled == ("ngram-mod",)
    assert dataclasses.astuple(preset.ngram_mod) == (24, 48, 64)
    assert options("--spec-default --spec-ngram-mod-n-max 9").spec.ngram_mod.n_max == 9
    assert options("--spec-ngram-mod-n-max 9 --spec-default").spec.ngram_mod.n_max == 64


def test_the_last_of_two_names_for_one_thing_wins() -> None:
    assert options("--rope-scale 4 --rope-freq-scale 0.5").model.rope.freq_scale == 0.5
    assert options("--rope-freq-scale 0.5 --rope-scale 4").model.rope.freq_scale == 0.25
    assert options("--samplers top_k --sampler-seq pt").sampling.samplers == (
        "top_p",
        "temperature",
    )


def test_precedence() -> None:
    environ = {"LLAMA_ARG_TOP_K": "5", "LLAMA_ARG_TOP_P": "0.5"}
    both = given("--top-k 6", environ)
    recommended = {"sampling.top_k": 1, "sampling.top_p": 0.1, "sampling.min_p": 0.2}
    found = both.options(recommended).sampling
    assert (found.top_k, found.top_p, found.min_p, found.temp) == (6, 0.5, 0.2, 0.8)


def test_variables_for_switches() -> None:
    assert options("", {"LLAMA_ARG_OFFLINE": "on"}).model.offline
    assert not options("", {"LLAMA_ARG_OFFLINE": "disabled"}).model.offline
    assert not options("", {"LLAMA_ARG_SHOW_TIMINGS": "0"}).output.show_timings
    no_form = {"LLAMA_ARG_NO_SHOW_TIMINGS": "", "LLAMA_ARG_SHOW_TIMINGS": "1"}
    assert not options("", no_form).output.show_timings


@pytest.mark.parametrize("text", ["", "x", "1.5"])
def test_a_bad_variable_is_named(text: str) -> None:
    message = 'error while handling environment variable "LLAMA_ARG_TOP_K"'
    with pytest.raises(UsageError, match=message):
        options("", {"LLAMA_ARG_TOP_K": text})


def test_removed_variables_are_errors() -> None:
    with pytest.raises(UsageError, match=r"LLAMA_ARG_DRAFT_MAX.*has been removed"):
        options("", {"LLAMA_ARG_DRAFT_MAX": "3"})


def test_an_overwritten_variable_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    options("--top-k 6", {"LLAMA_ARG_TOP_K": "5"})
    assert "LLAMA_ARG_TOP_K environment variable is set, but will be overwritten" in caplog.text


def test_dry_breakers_replace_the_defaults() -> None:
    words = ["--dry-sequence-breaker", "a", "--dry-sequence-breaker", "b"]
    assert options(words).sampling.dry_sequence_breakers == ("a", "b")
    assert options(["--dry-sequence-breaker", "none"]).sampling.dry_sequence_breakers == ()


def test_repeated_names_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert options("--top-k 1 --top-k 2").sampling.top_k == 2
    assert "'--top-k' specified multiple times" in caplog.text

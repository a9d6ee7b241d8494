"""Spellings of sampler names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from specdec.options import DEFAULT_SAMPLERS
from specdec.sampler_names import SAMPLER_NAMES, parse_sampler_seq, parse_samplers


def test_the_default_in_both_forms() -> None:
    text = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
    assert parse_samplers(text) == DEFAULT_SAMPLERS
    assert parse_sampler_seq("edskypmxt") == DEFAULT_SAMPLERS
    assert set(parse_sampler_seq("edskypmxtia")) == set(SAMPLER_NAMES)


def test_spellings() -> None:
    text = "Top-K; topp ;MIN_P;nucleus;temp;typ;typical_p;;adaptive-p;top-n-sigma"
    assert parse_samplers(text) == (
        "top_k",
        "top_p",
        "min_p",
        "top_p",
        "temperature",
        "typ_p",
        "typ_p",
        "adaptive_p",
        "top_n_sigma",
    )
    assert parse_samplers("") == ()


def test_unknown_names_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_samplers("top_k;top_q") == ("top_k",)
    assert "unknown sampler name: top_q (did you mean 'top_p'?)" in caplog.text
    assert parse_sampler_seq("kz") == ("top_k",)
    assert "unknown sampler letter: z" in caplog.text


def test_names_need_no_torch() -> None:
    code = "import sys, specdec.sampler_names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

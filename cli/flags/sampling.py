"""Rows for the sampler chain (flag notes, section 5)."""

from __future__ import annotations

import re

from specdec.sampler_names import parse_sampler_seq, parse_samplers
from specdec_cli.flags import Flag, Panel


def parse_logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    """`ID+BIAS` or `ID-BIAS`."""
    match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf)(?:e[+-]?\d+)?)", text)
    if match is None:
        raise ValueError("invalid input format, expected ID+BIAS or ID-BIAS")
    return ((int(match[1]), float(match[2])),)


def parse_seed(text: str) -> int:
    """An unsigned number, or -1 for a random seed."""
    if not text.removeprefix("-").isdecimal():
        raise ValueError(f"'{text}' is not a whole number")
    return int(text)


def _float(field: str, *names: str, text: str, env: str | None = None) -> Flag:
    return Flag(f"sampling.{field}", names, text, f"LLAMA_ARG_{env}" if env else None)


SAMPLING = Panel(
    "Sampling",
    (
        Flag(
            "sampling.samplers",
            ("--samplers",),
            "Filters in their order, joined by ';'.",
            parse=parse_samplers,
            metavar="NAMES",
        ),
        Flag(
            "sampling.samplers",
            ("--sampler-seq", "--sampling-seq"),
            "The same by letter.",
            parse=parse_sampler_seq,
            metavar="LETTERS",
        ),
        Flag("sampling.seed", ("--seed", "-s"), "Seed; -1 = random.", parse=parse_seed),
        Flag("sampling.ignore_eos", ("--ignore-eos",), "Ban every end-of-generation token."),
        _float(
            "temp",
            "--temp",
            "--temperature",
            text="Temperature; 0 = best token.",
            env="TEMPERATURE",
        ),
        _float("top_k", "--top-k", text="Keep the k best; 0 = off.", env="TOP_K"),
        _float("top_p", "--top-p", text="Nucleus; 1 = off.", env="TOP_P"),
        _float("min_p", "--min-p", text="Relative probability floor; 0 = off.", env="MIN_P"),
        _float(
            "top_n_sigma",
            "--top-n-sigma",
            "--top-nsigma",
            text="Keep logits within n standard deviations of the best; 0 or less = off.",
        ),
        _float("typ_p", "--typical-p", "--typical", text="Locally typical sampling; 1 = off."),
        _float("xtc_probability", "--xtc-probability", text="Chance to drop top choices; 0 = off."),
        _float("xtc_threshold", "--xtc-threshold", text="What a top choice is; above 0.5 = off."),
        _float("repeat_last_n", "--repeat-last-n", text="Window of the penalties; 0 = off."),
        _float(
            "repeat_penalty",
            "--repeat-penalty",
            text="Repetition penalty; 1 = off.",
            env="REPEAT_PENALTY",
        ),
        _float(
            "presence_penalty",
            "--presence-penalty",
            text="Subtraction for seen tokens; 0 = off.",
            env="PRESENCE_PENALTY",
        ),
        _float(
            "frequency_penalty",
            "--frequency-penalty",
            text="Subtraction per occurrence; 0 = off.",
            env="FREQUENCY_PENALTY",
        ),
        _float("dry_multiplier", "--dry-multiplier", text="DRY strength; 0 = off."),
        _float("dry_base", "--dry-base", text="DRY growth per repeated token."),
        _float("dry_allowed_length", "--dry-allowed-length", text="DRY: free repeats."),
        _float("dry_penalty_last_n", "--dry-penalty-last-n", text="DRY window; 0 = off."),
        Flag(
            "sampling.dry_sequence_breakers",
            ("--dry-sequence-breaker",),
            "DRY: what ends the look-back; the first use clears the defaults, none = no breakers.",
            parse=lambda text: () if text == "none" else (text,),
            appends=True,
        ),
        _float("adaptive_target", "--adaptive-target", text="Adaptive-p: aim; negative = off."),
        _float("adaptive_decay", "--adaptive-decay", text="Adaptive-p: memory."),
        _float("dynatemp_range", "--dynatemp-range", text="Entropy-driven temperature; 0 = off."),
        _float("dynatemp_exponent", "--dynatemp-exp", text="Its exponent."),
        _float("mirostat", "--mirostat", text="0, 1 or 2; replaces the filters."),
        _float("mirostat_eta", "--mirostat-lr", text="Mirostat: learning rate."),
        _float("mirostat_tau", "--mirostat-ent", text="Mirostat: target surprise."),
        Flag(
            "sampling.logit_bias",
            ("--logit-bias", "-l"),
            "ID+BIAS or ID-BIAS: added to a token's logit.",
            parse=parse_logit_bias,
            appends=True,
            metavar="ID+BIAS",
        ),
    ),
)

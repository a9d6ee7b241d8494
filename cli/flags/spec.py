"""Rows for speculative decoding (flag notes, sections 3 and 4)."""

from __future__ import annotations

from specdec.errors import unknown_name
from specdec.options import SPEC_TYPES
from specdec_cli.flags import Flag, Panel, parse_float
from specdec_cli.flags.values import draft_length


def parse_types(text: str) -> tuple[str, ...]:
    """A comma list of spec types, not trimmed; `none` anywhere reduces it to `none`."""
    names = tuple(text.split(","))
    for name in names:
        if name not in SPEC_TYPES:
            raise ValueError(unknown_name("speculative type", name, SPEC_TYPES))
    return ("none",) if "none" in names else names


def parse_rates(text: str) -> tuple[float, ...]:
    """A comma list of numbers."""
    try:
        return tuple(parse_float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"'{text}' is not a comma list of numbers") from None


def parse_synth_len(text: str) -> float:
    """A number of at least 1."""
    value = parse_float(text)
    if not value >= 1:
        raise ValueError(f"must be at least 1, got {text}")
    return value


DRAFT = Panel(
    "Speculative decoding: draft model",
    (
        Flag(
            "spec.types",
            ("--spec-type",),
            "Drafters, a comma list: " + ", ".join(SPEC_TYPES) + ". Occurrences add up.",
            "LLAMA_ARG_SPEC_TYPE",
            parse=parse_types,
            appends=True,
            metavar="TYPES",
        ),
        Flag(
            "spec.draft.path",
            ("--spec-draft-model", "-md", "--model-draft"),
            "The draft's GGUF file.",
            "LLAMA_ARG_SPEC_DRAFT_MODEL",
        ),
        Flag(
            "spec.draft.hf_repo",
            ("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft"),
            "Draft from the Hugging Face hub, user/repo[:quant].",
            "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        ),
        Flag(
            "spec.draft.n_max",
            ("--spec-draft-n-max",),
            "Longest draft, in tokens; auto = whatever is fastest, from measured costs.",
            "LLAMA_ARG_SPEC_DRAFT_N_MAX",
            parse=draft_length,
            metavar="N|auto",
        ),
        Flag(
            "spec.draft.n_min",
            ("--spec-draft-n-min",),
            "Drafts shorter than this are dropped.",
            "LLAMA_ARG_SPEC_DRAFT_N_MIN",
        ),
        Flag(
            "spec.draft.p_min",
            ("--spec-draft-p-min", "--draft-p-min"),
            "A draft ends before the first token with a lower confidence.",
            "LLAMA_ARG_SPEC_DRAFT_P_MIN",
        ),
        Flag(
            "spec.draft.sampling",
            ("--spec-draft-sampling",),
            "probabilistic: sample drafts, verify by rejection sampling.",
            "LLAMA_ARG_SPEC_DRAFT_SAMPLING",
        ),
        Flag(
            "spec.draft.device",
            ("--spec-draft-device", "-devd", "--device-draft"),
            "Device of the draft model.",
        ),
        Flag(
            "spec.draft.n_gpu_layers",
            ("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"),
            "0 = draft on the CPU, anything else = whole draft on the accelerator.",
            "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        ),
        Flag(
            "spec.draft.cache_type_k",
            ("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft"),
            "Key cache of the draft: f32, f16 or bf16 (quantised types become f16).",
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        ),
        Flag(
            "spec.draft.cache_type_v",
            ("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft"),
            "Value cache of the draft.",
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        ),
        Flag(
            "spec.synth_len",
            ("--spec-synth-len",),
            "Benchmark: accept at random so that a round emits this many tokens on average.",
            "LLAMA_ARG_SPEC_SYNTH_LEN",
            parse=parse_synth_len,
            metavar="N",
        ),
        Flag(
            "spec.synth_rates",
            ("--spec-synth-rates",),
            "Benchmark: acceptance probability of each draft position.",
            "LLAMA_ARG_SPEC_SYNTH_RATES",
            parse=parse_rates,
            metavar="P0,P1,...",
        ),
        Flag(
            "",
            ("--spec-default",),
            "Adds ngram-mod with n-match 24, n-min 48, n-max 64.",
            kind="preset",
            values={
                "spec.types": ("ngram-mod",),
                "spec.ngram_mod.n_match": 24,
                "spec.ngram_mod.n_min": 48,
                "spec.ngram_mod.n_max": 64,
            },
        ),
    ),
)

NGRAM = Panel(
    "Speculative decoding: n-grams",
    (
        *(
            Flag(f"spec.{field}.size_{letter}", (f"--spec-{kind}-size-{letter}",), text)
            for kind, field in (
                ("ngram-simple", "ngram_simple"),
                ("ngram-map-k", "ngram_map_k"),
                ("ngram-map-k4v", "ngram_map_k4v"),
            )
            for letter, text in (
                ("n", f"{kind}: length of the pattern."),
                ("m", f"{kind}: longest draft."),
            )
        ),
        Flag(
            "spec.ngram_map_k4v.min_hits",
            ("--spec-ngram-map-k4v-min-hits",),
            "ngram-map-k4v: look-ups of a key before it drafts.",
        ),
        Flag(
            "spec.ngram_mod.n_match",
            ("--spec-ngram-mod-n-match",),
            "ngram-mod: length of the hashed context.",
        ),
        Flag(
            "spec.ngram_mod.n_min",
            ("--spec-ngram-mod-n-min",),
            "ngram-mod: a chain that breaks off earlier gives no draft.",
        ),
        Flag(
            "spec.ngram_mod.n_max",
            ("--spec-ngram-mod-n-max",),
            "ngram-mod: longest chain.",
        ),
        Flag(
            "spec.ngram_cache.static_path",
            ("--lookup-cache-static", "-lcs"),
            "ngram-cache: read-only statistics of a corpus.",
        ),
        Flag(
            "spec.ngram_cache.dynamic_path",
            ("--lookup-cache-dynamic", "-lcd"),
            "ngram-cache: statistics of earlier runs, read and written back.",
        ),
    ),
)

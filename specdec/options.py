"""Every choice a user can make, as frozen dataclasses: defaults and checks live here and only here.

`Options` is a tree. A leaf is addressed by its dotted path (``"spec.draft.n_max"``); the command
line, environment variables, model files and server requests all reach it through `Options.merge`.
Names are llama.cpp's. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from specdec.errors import UsageError, unknown_name

SPEC_TYPES = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "draft-dspark",
    "draft-dflash2",
    "draft-lilicorr",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
"""The spec types in the order llama.cpp lists them."""

DFLASH_TYPES = ("draft-dflash", "draft-dspark", "draft-dflash2", "draft-lilicorr")
"""Spec types whose draft is a member of the DFlash family; at most one of them may be on."""

RANDOM_SEED = 2**32 - 1
"""The seed that means "draw one"; llama.cpp stores -1 this way."""

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""The filters of the sampler chain in their default order."""

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Cache types that llama.cpp knows; the first three are real here."""

_Node = typing.TypeVar("_Node")
RopeScaling = Literal["none", "linear", "yarn"]
Kernels = Literal["auto", "native", "torch"]
DraftSampling = Literal["greedy", "probabilistic"]
ReasoningEffort = Literal["default", "minimal", "low", "medium", "high", "xhigh", "max"]
Switch = Literal["on", "off", "auto"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _check_range(flag: str, value: int, low: int, high: int, name: str) -> None:
    _require(
        low <= value <= high,
        f"{flag}: {name} must be between {low} and {high} inclusive, got {value}",
    )


def _check_finite(flag: str, value: float) -> None:
    _require(math.isfinite(value), f"{flag} must be finite, got {value}")


def _check_layers(flag: str, value: str) -> None:
    _require(
        value in ("auto", "all") or re.fullmatch(r"-?\d+", value) is not None,
        f"{flag} must be a whole number, auto or all, got '{value}'",
    )


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """Overrides of the rotary embedding; None keeps what the model file says."""

    scaling: RopeScaling | None = None
    """How positions are scaled."""
    freq_base: float | None = None
    """Base of the frequencies."""
    freq_scale: float | None = None
    """Factor on the frequencies, 1 / context expansion."""
    yarn_orig_ctx: int = 0
    """YaRN: context length of training; 0 = from the model."""
    yarn_ext_factor: float = -1.0
    """YaRN: mix of extrapolation; negative = from the model."""
    yarn_attn_factor: float = -1.0
    """YaRN: magnitude; negative = from the model."""
    yarn_beta_slow: float = -1.0
    """YaRN: high correction dimension; negative = from the model."""
    yarn_beta_fast: float = -1.0
    """YaRN: low correction dimension; negative = from the model."""

    def __post_init__(self) -> None:
        if self.freq_scale is not None:
            _require(
                math.isfinite(self.freq_scale) and self.freq_scale > 0,
                f"--rope-freq-scale must be finite and greater than 0, got {self.freq_scale}",
            )
        if self.freq_base is not None:
            _require(
                math.isfinite(self.freq_base) and self.freq_base > 0,
                f"--rope-freq-base must be finite and greater than 0, got {self.freq_base}",
            )


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which target is loaded and how."""

    path: Path | None = None
    """The target's GGUF file."""
    hf_repo: str | None = None
    """The target on the Hugging Face hub, `user/repo[:quant]`."""
    hf_file: str | None = None
    """The exact file in that repository."""
    hf_token: str | None = None
    """Token for the hub."""
    url: str | None = None
    """Address to download the target from."""
    offline: bool = False
    """Use downloaded files only."""
    n_ctx: int = 0
    """Context length in tokens; 0 = the model's own."""
    n_batch: int = 2048
    """Prompt tokens per step."""
    n_ubatch: int = 512
    """Prompt tokens per forward pass."""
    cache_type_k: str | None = None
    """Type of the key cache; None = the type of the computation."""
    cache_type_v: str | None = None
    """Type of the value cache; None = the type of the computation."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:N`, `mps` or `none`; None = the best one there is."""
    n_gpu_layers: str = "auto"
    """Layers on the accelerator: 0 = the CPU, anything else = the whole model."""
    main_gpu: int = 0
    """Index of the CUDA device that is taken when none is named."""
    n_threads: int = -1
    """Compute threads; 0 or less = all physical cores."""
    kernels: Kernels = "auto"
    """`native`: packed weights on the CPU; `torch`: float32 weights; `auto`: native if it can."""
    override_kv: tuple[str, ...] = ()
    """Metadata overrides, `KEY=TYPE:VALUE`."""
    check_tensors: bool = False
    """Look for invalid values while loading."""
    warmup: bool = True
    """One empty run before the first prompt."""
    rope: RopeOptions = field(default_factory=RopeOptions)

    def __post_init__(self) -> None:
        _require(self.n_ctx >= 0, f"--ctx-size must be 0 or more, got {self.n_ctx}")
        _require(self.main_gpu >= 0, f"--main-gpu must be 0 or more, got {self.main_gpu}")
        _check_layers("--gpu-layers", self.n_gpu_layers)
        _require(self.n_batch >= 1, f"--batch-size must be at least 1, got {self.n_batch}")
        _require(self.n_ubatch >= 1, f"--ubatch-size must be at least 1, got {self.n_ubatch}")
        for flag, name in (
            ("--cache-type-k", self.cache_type_k),
            ("--cache-type-v", self.cache_type_v),
        ):
            _require(name is None or name in CACHE_TYPES, f"{flag}: Unsupported cache type: {name}")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampler chain (reference: llama.cpp's `common/sampling.cpp`)."""

    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    """Which filters run, in which order."""
    seed: int = RANDOM_SEED
    """Seed of all random streams; -1 = random."""
    ignore_eos: bool = False
    """Ban every end-of-generation token."""
    temp: float = 0.8
    """Temperature; 0 = always the best token."""
    top_k: int = 40
    """Keep the k best tokens; 0 or less = off."""
    top_p: float = 0.95
    """Keep the smallest set with this probability; 1 = off."""
    min_p: float = 0.05
    """Keep tokens with this share of the best one's probability; 0 = off."""
    top_n_sigma: float = -1.0
    """Keep logits within n standard deviations of the best; 0 or less = off."""
    typ_p: float = 1.0
    """Locally typical sampling; 1 = off."""
    xtc_probability: float = 0.0
    """Chance to drop the top choices; 0 = off."""
    xtc_threshold: float = 0.1
    """Probability that makes a token a top choice; above 0.5 = off."""
    repeat_last_n: int = 64
    """Window of the penalties in tokens; 0 = off."""
    repeat_penalty: float = 1.0
    """Divides (or multiplies) the logit of seen tokens; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of seen tokens."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence of a seen token."""
    dry_multiplier: float = 0.0
    """Strength of the DRY repetition penalty; 0 = off."""
    dry_base: float = 1.75
    """DRY: growth per repeated token."""
    dry_allowed_length: int = 2
    """DRY: repeats up to this length are free."""
    dry_penalty_last_n: int = 64
    """DRY: window in tokens; 0 = off."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """DRY: strings that end the look-back."""
    adaptive_target: float = -1.0
    """Adaptive-p: probability to aim at; negative = off."""
    adaptive_decay: float = 0.9
    """Adaptive-p: memory of the running mean."""
    dynatemp_range: float = 0.0
    """Half width of the entropy-driven temperature; 0 = off."""
    dynatemp_exponent: float = 1.0
    """Exponent of the entropy-driven temperature."""
    mirostat: int = 0
    """1 or 2 replaces the filters by temperature and Mirostat."""
    mirostat_eta: float = 0.1
    """Mirostat: learning rate."""
    mirostat_tau: float = 5.0
    """Mirostat: target surprise in bits."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Additions to single tokens' logits, (token id, bias)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "temp", max(self.temp, 0.0))
        if self.dry_base < 1:  # as in llama.cpp, without a word
            object.__setattr__(self, "dry_base", 1.75)
        if self.seed == -1:
            object.__setattr__(self, "seed", RANDOM_SEED)
        _require(
            0 <= self.seed <= RANDOM_SEED, f"--seed must be -1 or in 0..2^32-1, got {self.seed}"
        )
        _require(not math.isnan(self.temp), "--temp must be a number")
        _require(
            self.repeat_last_n >= 0,
            f"--repeat-last-n: invalid repeat-last-n = {self.repeat_last_n}",
        )
        _require(
            self.dry_penalty_last_n >= 0,
            f"--dry-penalty-last-n: invalid dry-penalty-last-n = {self.dry_penalty_last_n}",
        )
        _require(
            math.isfinite(self.repeat_penalty) and self.repeat_penalty > 0,
            "--repeat-penalty must be finite and greater than 0",
        )
        _check_finite("--presence-penalty", self.presence_penalty)
        _check_finite("--frequency-penalty", self.frequency_penalty)
        _require(self.mirostat in (0, 1, 2), f"--mirostat must be 0, 1 or 2, got {self.mirostat}")
        _require(
            0.0 <= self.adaptive_decay <= 0.99,
            f"--adaptive-decay must be between 0.0 and 0.99, got {self.adaptive_decay}",
        )
        _require(
            self.adaptive_target <= 1.0,
            f"--adaptive-target must be at most 1, got {self.adaptive_target}",
        )

    @property
    def stateful(self) -> bool:
        """Whether a sampler updates itself from the token it drew (Mirostat, adaptive-p)."""
        return self.temp > 0 and (
            self.mirostat != 0 or ("adaptive_p" in self.samplers and self.adaptive_target >= 0)
        )


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The draft model and the limits of all `draft-*` types."""

    path: Path | None = None
    """The draft's GGUF file."""
    hf_repo: str | None = None
    """The draft on the Hugging Face hub, `user/repo[:quant]`."""
    n_max: int = 3
    """Longest draft in tokens."""
    n_min: int = 0
    """Shorter drafts are dropped."""
    p_min: float = 0.0
    """A draft ends before the first token with a lower confidence."""
    sampling: DraftSampling = "greedy"
    """`probabilistic`: sample drafts and verify them by rejection sampling."""
    device: str | None = None
    """Device of the draft; None = the target's."""
    n_gpu_layers: str = "auto"
    """Draft layers on the accelerator: 0 = the CPU, anything else = the whole draft."""
    cache_type_k: str | None = None
    """Type of the draft's key cache; None = the type of the computation."""
    cache_type_v: str | None = None
    """Type of the draft's value cache; None = the type of the computation."""

    def __post_init__(self) -> None:
        _require(self.n_max >= 0, f"--spec-draft-n-max must be 0 or more, got {self.n_max}")
        _check_layers("--spec-draft-ngl", self.n_gpu_layers)
        _require(not math.isnan(self.p_min), "--spec-draft-p-min must be a number")
        _require(
            self.sampling in ("greedy", "probabilistic"),
            "--spec-draft-sampling: invalid value, must be one of: greedy, probabilistic",
        )
        for flag, name in (
            ("--spec-draft-type-k", self.cache_type_k),
            ("--spec-draft-type-v", self.cache_type_v),
        ):
            _require(name is None or name in CACHE_TYPES, f"{flag}: Unsupported cache type: {name}")


def _check_ngram(flag: str, size_n: int, size_m: int, min_hits: int) -> None:
    _check_range(f"{flag}-size-n", size_n, 1, 1024, "ngram size N")
    _check_range(f"{flag}-size-m", size_m, 1, 1024, "ngram size M")
    _require(min_hits >= 1, f"{flag}-min-hits: ngram min hits must be at least 1, got {min_hits}")


@dataclass(frozen=True, slots=True)
class NgramSimpleOptions:
    """`ngram-simple`: copy what followed the last occurrence of the newest n tokens."""

    size_n: int = 12
    """Length of the pattern looked for."""
    size_m: int = 48
    """Longest draft."""

    def __post_init__(self) -> None:
        _check_ngram("--spec-ngram-simple", self.size_n, self.size_m, 1)


@dataclass(frozen=True, slots=True)
class NgramMapKOptions:
    """`ngram-map-k`: as ngram-simple, with an index and a memory of accepted lengths."""

    size_n: int = 12
    """Key length."""
    size_m: int = 48
    """Longest draft."""

    def __post_init__(self) -> None:
        _check_ngram("--spec-ngram-map-k", self.size_n, self.size_m, 1)


@dataclass(frozen=True, slots=True)
class NgramMapK4VOptions:
    """`ngram-map-k4v`: up to four values a key, drafts only a clear majority."""

    size_n: int = 12
    """Key length."""
    size_m: int = 48
    """Value length and longest draft."""
    min_hits: int = 1
    """Look-ups of a key before it drafts."""

    def __post_init__(self) -> None:
        _check_ngram("--spec-ngram-map-k4v", self.size_n, self.size_m, self.min_hits)


@dataclass(frozen=True, slots=True)
class NgramModOptions:
    """`ngram-mod`: one hash table from n tokens to the next one, shared by all requests."""

    n_match: int = 24
    """Length of the hashed context."""
    n_min: int = 48
    """A chain that breaks off earlier gives no draft."""
    n_max: int = 64
    """Longest chain."""

    def __post_init__(self) -> None:
        _check_range("--spec-ngram-mod-n-match", self.n_match, 1, 1024, "ngram size N")
        _check_range("--spec-ngram-mod-n-min", self.n_min, 0, 1024, "ngram n-min")
        _check_range("--spec-ngram-mod-n-max", self.n_max, 0, 1024, "ngram n-max")


@dataclass(frozen=True, slots=True)
class NgramCacheOptions:
    """`ngram-cache`: three tables of counted continuations."""

    static_path: Path | None = None
    """Read-only statistics of a corpus."""
    dynamic_path: Path | None = None
    """Statistics of earlier runs; read at the start, written back at the end."""


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Speculative decoding: which drafters, with which limits."""

    types: tuple[str, ...] | None = None
    """Spec types as given; None = not given, so a draft file decides."""
    draft: DraftOptions = field(default_factory=DraftOptions)
    ngram_simple: NgramSimpleOptions = field(default_factory=NgramSimpleOptions)
    ngram_map_k: NgramMapKOptions = field(default_factory=NgramMapKOptions)
    ngram_map_k4v: NgramMapK4VOptions = field(default_factory=NgramMapK4VOptions)
    ngram_mod: NgramModOptions = field(default_factory=NgramModOptions)
    ngram_cache: NgramCacheOptions = field(default_factory=NgramCacheOptions)
    synth_len: float | None = None
    """Benchmark: mean number of tokens a round emits, at random."""
    synth_rates: tuple[float, ...] | None = None
    """Benchmark: acceptance probability of each draft position."""

    def __post_init__(self) -> None:
        for name in self.types or ():
            _require(
                name in SPEC_TYPES,
                f"--spec-type: {unknown_name('speculative type', name, SPEC_TYPES)}",
            )
        family = set(self.enabled) & set(DFLASH_TYPES)
        _require(
            len(family) < 2,
            "--spec-type: draft-dflash, draft-dflash2, draft-dspark and draft-lilicorr "
            "cannot be combined",
        )
        _require(
            self.synth_len is None or self.synth_rates is None,
            "--spec-synth-len, --spec-synth-rates: "
            "synthetic acceptance length and rates are mutually exclusive",
        )

    @property
    def enabled(self) -> tuple[str, ...]:
        """The spec types that are on, each once; `none` switches nothing off (flag notes, 2.1)."""
        return tuple(dict.fromkeys(name for name in self.types or () if name != "none"))


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How messages become a prompt."""

    system_prompt: str = ""
    """System turn."""
    template: str | None = None
    """Jinja source or a built-in name; None = the model's own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the template."""
    reasoning: Switch = "auto"
    """Ask the template to think or not."""
    reasoning_effort: ReasoningEffort = "default"
    """How much; handed to the template."""
    jinja: bool = True
    """Run Jinja templates; off = the built-in ones only."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request: its text, and when it ends."""

    prompt: str | None = None
    """The prompt; `-` = standard input."""
    prompt_file: Path | None = None
    """A text file with the prompt; one trailing newline is dropped."""
    binary_file: Path | None = None
    """A file whose bytes are the prompt, unchanged."""
    conversation: bool | None = None
    """Wrap the prompt by the chat template; None = if the model has one."""
    single_turn: bool = False
    """End after one reply."""
    multiline: bool = False
    """Typed messages end with a backslash instead of at the end of a line."""
    n_predict: int = -1
    """Tokens to generate; -1 = until the end, -2 = until the context is full."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    special: bool = False
    """Print special tokens."""
    escape: bool = True
    """Read backslash escapes in the prompt, stop strings and DRY breakers."""

    def __post_init__(self) -> None:
        _require(self.n_predict >= -2, f"--predict must be -2 or more, got {self.n_predict}")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the command shows, and where."""

    json: bool = False
    """Print one JSON object instead of the text."""
    display_prompt: bool = False
    """Print the prompt before the reply."""
    verbose_prompt: bool = False
    """Show the prompt's tokens on stderr."""
    show_timings: bool = True
    """Print speed and speculation statistics on stderr."""
    perf: bool = True
    """With trace verbosity, print where the time of a reply went."""
    file: Path | None = None
    """Write the reply to this file as well."""
    spec_trace: Path | None = None
    """Write one JSON line a round to this file."""
    spec_check: bool = False
    """Run the request without speculation too and compare."""
    color: Switch = "auto"
    """Colours on stderr and in the reply."""
    simple_io: bool = False
    """Plain lines: no line editing, progress or colours."""
    verbosity: int = 3
    """0 output only, 1 errors, 2 warnings, 3 info, 4 trace, 5 debug."""
    log_file: Path | None = None
    """Write messages to this file as well."""
    log_jsonl: bool = False
    """Messages as one JSON object a line."""
    log_colors: Switch = "auto"
    """Colours in messages; auto = on a terminal."""
    log_prefix: bool = True
    """Put the level before warnings and errors."""
    log_timestamps: bool | None = None
    """Put the time before messages; None = in the log file only."""


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """`specdec inspect`: which files, how much of them."""

    files: tuple[Path, ...] = ()
    """GGUF files to describe."""
    tensors: bool = False
    """List every tensor."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """`specdec tokenize`: what is read and what is printed. The text is in `GenerateOptions`."""

    stdin: bool = False
    """The text comes from standard input."""
    ids: bool = False
    """Print ids alone."""
    no_bos: bool = False
    """Never add the BOS token."""
    no_parse_special: bool = False
    """Control tokens in the text are text."""
    show_count: bool = False
    """Print the number of tokens."""
    decode: tuple[int, ...] | None = None
    """Token ids to turn into text instead."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """`specdec bench`: what is compared, on what, and what is shown."""

    types: tuple[tuple[str, ...], ...] = ()
    """Combinations of spec types; () = each draft by its own type."""
    drafts: tuple[Path, ...] = ()
    """Draft files; each is run by the types that it is made for."""
    n_max: tuple[int, ...] = (3,)
    """Draft lengths of the `draft-*` types."""
    prompts: Path | None = None
    """A file of prompts; None = a few built-in ones."""
    n_predict: int = 64
    """Tokens to generate for each prompt."""
    n_repetitions: int = 3
    """Runs of each prompt."""
    json: bool = False
    """Print JSON."""
    plot: Path | None = None
    """Draw the results into this file, .png or .svg."""

    def __post_init__(self) -> None:
        _require(
            bool(self.n_max) and min(self.n_max) >= 1,
            f"--spec-draft-n-max: expected lengths of at least 1, got {list(self.n_max)}",
        )
        _require(self.n_predict >= 1, f"--predict must be at least 1, got {self.n_predict}")
        _require(
            self.n_repetitions >= 1, f"--repetitions must be at least 1, got {self.n_repetitions}"
        )
        _require(
            self.plot is None or self.plot.suffix in (".png", ".svg"),
            f"--plot: {self.plot} must end in .png or .svg",
        )


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a run depends on."""

    model: ModelOptions = field(default_factory=ModelOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    spec: SpecOptions = field(default_factory=SpecOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    generate: GenerateOptions = field(default_factory=GenerateOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    inspect: InspectOptions = field(default_factory=InspectOptions)
    tokenize: TokenizeOptions = field(default_factory=TokenizeOptions)
    bench: BenchOptions = field(default_factory=BenchOptions)

    def merge(self, *layers: Mapping[str, Any]) -> Self:
        """A copy with the leaves of ``layers`` (dotted path -> value) set; later layers win.

        Raises `UsageError` from the checks of the changed dataclasses.
        """
        values: dict[str, Any] = {}
        for layer in layers:
            values.update(layer)
        return _replace(self, values)


def _replace(node: _Node, values: Mapping[str, Any]) -> _Node:
    """``node`` with dotted leaves replaced; each dataclass is rebuilt, hence checked, once."""
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    for head, inner in nested.items():
        changes[head] = _replace(getattr(node, head), inner)
    return dataclasses.replace(node, **changes) if changes else node  # type: ignore[type-var]


@functools.cache
def leaves() -> Mapping[str, tuple[Any, Any]]:
    """Dotted path -> (annotated type, default) of every leaf of `Options`."""
    found: dict[str, tuple[Any, Any]] = {}

    def walk(node: Any, prefix: str) -> None:
        hints = typing.get_type_hints(type(node))
        for item in dataclasses.fields(node):
            value = getattr(node, item.name)
            if dataclasses.is_dataclass(value):
                walk(value, f"{prefix}{item.name}.")
            else:
                found[f"{prefix}{item.name}"] = (hints[item.name], value)

    walk(Options(), "")
    return found

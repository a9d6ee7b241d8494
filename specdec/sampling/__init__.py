"""From logits to tokens: the samplers by name, and the chain built from the user's options.

This package knows logits and tokens, not models. It is the home of all draws from the target's
distribution; verification by rejection works on `SamplerChain.distribution`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from specdec.errors import UsageError, unknown_name
from specdec.options import SamplingOptions
from specdec.sampler_names import SAMPLER_NAMES
from specdec.sampling import filters, head
from specdec.sampling.adaptive import Adaptive, AdaptiveP, Mirostat1, Mirostat2
from specdec.sampling.candidates import Candidates
from specdec.sampling.chain import (
    STREAMS,
    Filter,
    SamplerChain,
    SamplerState,
    stream_seed,
)
from specdec.sampling.head import HeadSampler
from specdec.sampling.infill import infill
from specdec.sampling.penalties import Breakers, dry, find_breakers, penalties

__all__ = [
    "SAMPLERS",
    "STREAMS",
    "Candidates",
    "Sampler",
    "SamplerChain",
    "SamplerSetup",
    "build_chain",
    "stream_seed",
]


@dataclass(frozen=True, slots=True)
class SamplerSetup:
    """What a sampler is built from: the user's options and the facts about the vocabulary."""

    options: SamplingOptions
    end_tokens: frozenset[int]
    breakers: Breakers
    token_bytes: Callable[[int], bytes]


class Sampler(NamedTuple):
    """A row of `SAMPLERS`: whether the options switch it on, and what it does."""

    is_on: Callable[[SamplingOptions], bool]
    apply: Callable[[Candidates, SamplerSetup, SamplerState], Candidates]
    keeps_best: bool = False
    """Whether the best token before is always the best one behind."""
    on_head: Callable[[SamplingOptions, Sequence[float]], Sequence[float]] | None = None
    """The same on the best logits alone, if it does not ask which tokens they are."""


def _window(state: SamplerState, length: int) -> list[int]:
    return state.text[-length:] if length > 0 else []


def _penalties(candidates: Candidates, setup: SamplerSetup, state: SamplerState) -> Candidates:
    options = setup.options
    return penalties(
        candidates,
        _window(state, options.repeat_last_n),
        repeat=options.repeat_penalty,
        frequency=options.frequency_penalty,
        presence=options.presence_penalty,
    )


def _penalties_are_on(options: SamplingOptions) -> bool:
    neutral = options.repeat_penalty == 1 and options.frequency_penalty == 0
    return options.repeat_last_n > 0 and not (neutral and options.presence_penalty == 0)


def _dry(candidates: Candidates, setup: SamplerSetup, state: SamplerState) -> Candidates:
    options = setup.options
    return dry(
        candidates,
        _window(state, options.dry_penalty_last_n),
        setup.breakers,
        multiplier=options.dry_multiplier,
        base=options.dry_base,
        allowed_length=options.dry_allowed_length,
    )


def _dry_is_on(options: SamplingOptions) -> bool:
    return options.dry_multiplier != 0 and options.dry_base >= 1 and options.dry_penalty_last_n > 0


def _temperature(candidates: Candidates, setup: SamplerSetup, _: SamplerState) -> Candidates:
    options = setup.options
    if options.dynatemp_range <= 0:
        return filters.temperature(candidates, options.temp)
    return filters.dynamic_temperature(
        candidates, options.temp, options.dynatemp_range, options.dynatemp_exponent
    )


SAMPLERS: dict[str, Sampler] = {
    "penalties": Sampler(_penalties_are_on, _penalties),
    "dry": Sampler(_dry_is_on, _dry),
    "top_n_sigma": Sampler(
        lambda o: o.top_n_sigma > 0,
        lambda c, s, _: filters.top_n_sigma(c, s.options.top_n_sigma),
        keeps_best=True,
    ),
    "top_k": Sampler(
        lambda o: o.top_k > 0,
        lambda c, s, _: filters.top_k(c, s.options.top_k),
        keeps_best=True,
    ),
    "typ_p": Sampler(
        lambda o: o.typ_p < 1,
        lambda c, s, _: filters.typical(c, s.options.typ_p),
    ),
    "top_p": Sampler(
        lambda o: o.top_p < 1,
        lambda c, s, _: filters.top_p(c, s.options.top_p),
        keeps_best=True,
        on_head=lambda o, logits: head.top_p(logits, o.top_p),
    ),
    "min_p": Sampler(
        lambda o: o.min_p > 0,
        lambda c, s, _: filters.min_p(c, s.options.min_p),
        keeps_best=True,
        on_head=lambda o, logits: head.min_p(logits, o.min_p),
    ),
    "xtc": Sampler(
        lambda o: o.xtc_probability > 0 and o.xtc_threshold <= 0.5,
        lambda c, s, state: filters.xtc(
            c, s.options.xtc_probability, s.options.xtc_threshold, state.xtc
        ),
    ),
    "temperature": Sampler(
        lambda o: o.temp != 1 or o.dynatemp_range > 0,
        _temperature,
        keeps_best=True,
        on_head=lambda o, logits: head.temperature(logits, o.temp),
    ),
    "infill": Sampler(
        lambda _: True,
        lambda c, s, _: infill(c, s.end_tokens, s.token_bytes),
    ),
}
"""The filters by the names of `SamplingOptions.samplers`.

The remaining name, `adaptive_p`, is no filter: wherever it stands, it replaces the last draw.
"""


def build_chain(
    options: SamplingOptions,
    *,
    n_vocab: int,
    end_tokens: frozenset[int],
    suppressed: Sequence[int] = (),
    encode: Callable[[str], Sequence[int]] | None = None,
    token_bytes: Callable[[int], bytes] | None = None,
) -> SamplerChain:
    """The chain the options describe, ready for `SamplerChain.begin`.

    ``suppressed`` are the model's own banned tokens. ``encode`` (no special tokens added) and
    ``token_bytes`` (the bytes one token stands for) are needed for DRY's sequence breakers and
    for infill. Raises `UsageError` for an unknown sampler and for a bias that cannot be applied.
    """
    for name in options.samplers:
        if name not in SAMPLER_NAMES:
            raise UsageError(f"--samplers: {unknown_name('sampler', name, SAMPLER_NAMES)}")
    if options.mirostat:  # replaces the filters by temperature and Mirostat
        options = replace(options, samplers=("temperature",), dynatemp_range=0.0)
    active = [
        name for name in options.samplers if name in SAMPLERS and SAMPLERS[name].is_on(options)
    ]
    setup = _setup(options, active, n_vocab, end_tokens, encode, token_bytes)
    bias = _bias(options, n_vocab, end_tokens, suppressed)
    adaptive = _adaptive(options, n_vocab)
    always_best = "temperature" in active and options.temp <= 0 and options.dynatemp_range <= 0
    return SamplerChain(
        [_bind(SAMPLERS[name], setup) for name in active],
        seed=options.seed,
        bias=bias,
        adaptive=adaptive,
        greedy=always_best and not bias and all(SAMPLERS[name].keeps_best for name in active),
        head=None if adaptive else _head(options, active, bias),
    )


def _head(
    options: SamplingOptions, active: Sequence[str], bias: Mapping[int, float]
) -> HeadSampler | None:
    """The active samplers as one of the best logits alone, if that is enough for them."""
    if active[:1] != ["top_k"] or any(value > -math.inf for value in bias.values()):
        return None
    if "temperature" in active and options.dynatemp_range > 0:
        return None
    found = [SAMPLERS[name].on_head for name in active[1:]]
    known = [partial(apply, options) for apply in found if apply is not None]
    if len(known) < len(found):
        return None
    return HeadSampler(options.top_k, known, frozenset(bias))


def _bind(sampler: Sampler, setup: SamplerSetup) -> Filter:
    return lambda candidates, state: sampler.apply(candidates, setup, state)


def _setup(
    options: SamplingOptions,
    active: Sequence[str],
    n_vocab: int,
    end_tokens: frozenset[int],
    encode: Callable[[str], Sequence[int]] | None,
    token_bytes: Callable[[int], bytes] | None,
) -> SamplerSetup:
    breakers: Breakers = {}
    needs_text = "infill" in active or ("dry" in active and options.dry_sequence_breakers)
    if needs_text and (encode is None or token_bytes is None):
        raise ValueError("DRY's sequence breakers and infill need encode and token_bytes")
    if "dry" in active and encode is not None and token_bytes is not None:
        breakers = find_breakers(
            options.dry_sequence_breakers, n_vocab=n_vocab, encode=encode, token_bytes=token_bytes
        )
    return SamplerSetup(options, end_tokens, breakers, token_bytes or (lambda _: b""))


def _bias(
    options: SamplingOptions, n_vocab: int, end_tokens: frozenset[int], suppressed: Sequence[int]
) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in options.logit_bias:
        if not 0 <= token < n_vocab:
            raise UsageError(
                f"--logit-bias: token {token} is not in the vocabulary of {n_vocab} tokens; "
                f"use an id from 0 to {n_vocab - 1}"
            )
        if math.isnan(value) or value == math.inf:
            raise UsageError(f"--logit-bias: the bias of token {token} must be finite or -inf")
        bias[token] = bias.get(token, 0.0) + value
    banned = [*suppressed, *(end_tokens if options.ignore_eos else ())]
    return bias | {token: -math.inf for token in banned if 0 <= token < n_vocab}


def _adaptive(options: SamplingOptions, n_vocab: int) -> Adaptive | None:
    if not options.stateful:
        return None
    if options.mirostat == 1:
        return Mirostat1(options.mirostat_tau, options.mirostat_eta, n_vocab)
    if options.mirostat == 2:
        return Mirostat2(options.mirostat_tau, options.mirostat_eta)
    return AdaptiveP(options.adaptive_target, options.adaptive_decay)

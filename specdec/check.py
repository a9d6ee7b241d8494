"""Whether speculation changes a request: the same request with and without it, token by token."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.chat import Message
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.generate import Round, prefill
from specdec.options import RANDOM_SEED
from specdec.session import Chunk, Completion, Session, template_variables


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two replies differ."""

    index: int
    """Place in the reply, from 0."""
    speculative: int | None
    """The token with speculation; None: that reply had ended."""
    plain: int | None
    """The token without."""
    best: tuple[int, int]
    """The target's two best tokens there."""
    gap: float
    """By how much the best one's logit is larger."""


@dataclass(frozen=True, slots=True)
class Check:
    """Both replies to one request."""

    speculative: Completion
    plain: Completion | None
    """None: drafts were sampled, so equal ids are not promised and nothing was compared."""
    difference: Difference | None = None

    @property
    def equal(self) -> bool | None:
        """Whether the ids are the same; None if they were not compared."""
        return None if self.plain is None else self.difference is None

    def as_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = self.difference
        values: dict[str, Any] = {"equal": self.equal}
        if found is not None:
            values |= {name: getattr(found, name) for name in Difference.__slots__}
        return values


def check_request(
    session: Session,
    prompt: str | Sequence[Message],
    *,
    on_chunk: Callable[[Chunk], None] = lambda _: None,
    on_round: Callable[[Round], None] = lambda _: None,
    on_plain_round: Callable[[Round], None] = lambda _: None,
    progress: Callable[[int, int], None] | None = None,
    **overrides: Any,
) -> Check:
    """Runs a request with speculation in ``session`` and without in another, on the same seed.

    The callbacks follow the speculative run, ``on_plain_round`` the other one; ``overrides`` as
    for `Session.stream`. Raises `UsageError` when no drafter is on or acceptance is synthetic.
    """
    engine = session.engine
    spec = engine.options.spec
    if not engine.drafter.drafters:
        raise UsageError("--spec-check: there is no drafter; give --spec-type or a draft with -md")
    if spec.synth_len is not None or spec.synth_rates is not None:
        raise UsageError("--spec-check: synthetic acceptance does not keep the text")
    if engine.options.sampling.seed == RANDOM_SEED:
        overrides.setdefault("sampling__seed", secrets.randbelow(RANDOM_SEED))
    sampled = False

    def watch(done: Round) -> None:
        nonlocal sampled
        sampled = sampled or done.draft.q is not None
        on_round(done)

    for chunk in session.stream(prompt, progress=progress, on_round=watch, **overrides):
        on_chunk(chunk)
    if sampled and not engine.options.sampling.stateful:
        return Check(session.last, None)
    plain = engine.session(speculate=False).generate(prompt, on_round=on_plain_round, **overrides)
    return Check(session.last, plain, _difference(engine, prompt, session.last, plain))


def _difference(
    engine: Engine, prompt: str | Sequence[Message], speculative: Completion, plain: Completion
) -> Difference | None:
    left, right = speculative.token_ids, plain.token_ids
    if left == right:
        return None
    same = [a == b for a, b in zip(left, right, strict=False)]
    index = same.index(False) if False in same else len(same)
    text = [*engine.encode(prompt, template_variables(engine.options)), *right[:index]]
    best, gap = _two_best(engine, text)
    return Difference(
        index,
        left[index] if index < len(left) else None,
        right[index] if index < len(right) else None,
        best,
        gap,
    )


@torch.inference_mode()
def _two_best(engine: Engine, text: Sequence[int]) -> tuple[tuple[int, int], float]:
    """The target's two best tokens after ``text``, and the gap between their logits."""
    cache = engine.new_cache()
    nobody = engine.session(speculate=False).drafter
    prefill(engine.target, cache, nobody, text[:-1], engine.options.model.n_ubatch)
    last = torch.tensor(text[-1:], device=engine.target.device)
    values, ids = engine.target(last, cache).logits[0].topk(2)
    return (int(ids[0]), int(ids[1])), float(values[0] - values[1])

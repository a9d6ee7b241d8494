"""Why acceptance is low, in one line: the causes that are known to matter, most certain first.

The rates of the draft's positions say whether anything is wrong at all and where; facts about the
run say which cause fits. Only drafters with a model of their own are judged: an n-gram drafter that
finds nothing to copy is not at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.stats import Statistics

MIN_DRAFTS = 16
"""Fewer drafts are no evidence."""
LOW = 0.12
"""A first position that is accepted less often is low: small drafts reach 0.2, large ones 0.9."""
NONE = 0.05
"""Below this draft and target agree by chance only."""
COLLAPSE = 0.15
"""Chance of a later position, given the one before it, that makes it not worth drafting."""
EXACT_TYPES = (None, "f32")
"""Draft cache types that lose nothing."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts about a run that are known to move acceptance."""

    has_template: bool = False
    """Whether there is a chat template."""
    used_template: bool = False
    """Whether the prompt went through it."""
    can_think: bool = False
    """Whether the template lets the model think, and nobody switched it off."""
    n_text: int = 0
    """Tokens of prompt and reply, as far as evaluated."""
    n_trained: int | None = None
    """Longest text the draft was trained for."""
    cache_types: tuple[str | None, ...] = ()
    """Types of the draft's key and value cache, as given."""
    chose_lengths: bool = False
    """Whether drafts were as long as was worth their time: late positions are rare then."""


def likely_cause(per_position: Sequence[float], n_drafts: int, facts: Circumstances) -> str | None:
    """One line that names the likeliest cause of low acceptance; None if it is not low.

    ``per_position``: share of drafts in which position i was accepted.
    """
    if n_drafts < MIN_DRAFTS:
        return None
    first = per_position[0] if per_position else 0.0
    if first >= LOW:
        return None if facts.chose_lengths else _late_collapse(per_position)
    seen = f"only {first:.0%} of the first drafted tokens are accepted"
    if facts.has_template and not facts.used_template:
        return f"{seen}: the prompt went without the model's chat template; leave out -no-cnv"
    if facts.n_trained is not None and facts.n_text > facts.n_trained:
        return (
            f"{seen}: the text has {facts.n_text} tokens, the draft was trained for a window of "
            f"{facts.n_trained}"
        )
    lossy = [name for name in facts.cache_types if name not in EXACT_TYPES]
    if lossy:
        return (
            f"{seen}: the draft's cache is {'/'.join(map(str, lossy))}; try "
            "--spec-draft-type-k f32 --spec-draft-type-v f32"
        )
    if facts.can_think:
        return (
            f"{seen}: the model thinks before it answers, which drafts are seldom trained on; try "
            "--reasoning off"
        )
    if first < NONE:
        return (
            f"{seen}: target mismatch, the draft seems to be made for other weights than this "
            "target's; use a draft made for this very model"
        )
    return (
        f"{seen}: the draft may be made for another version of this target or for other texts; "
        "compare with another draft"
    )


def _late_collapse(per_position: Sequence[float]) -> str | None:
    """Says so when the last positions are hardly ever reached."""
    for position in range(1, len(per_position)):
        if per_position[position] < COLLAPSE * per_position[position - 1]:
            return (
                f"drafts are longer than they are good for: position {position + 1} is accepted "
                f"in {per_position[position]:.0%} of the drafts, the first in "
                f"{per_position[0]:.0%}; try --spec-draft-n-max {position}"
            )
    return None


def explain(engine: Engine, statistics: Statistics, *, used_template: bool) -> str | None:
    """`likely_cause` for a finished reply, or for the sum of several; None if nothing is low.

    A run whose drafters made no draft says so: it was a plain run. Not so if it was chosen to be.
    """
    drafter = engine.drafter
    is_silent = statistics.rounds and not statistics.drafted and not statistics.chose_lengths
    if drafter.drafters and is_silent:
        why = " (the draft length is 0)" if drafter.n_max == 0 else ""
        return f"{drafter.name}: no drafts were made{why}"
    for name, one in statistics.drafters.items():
        if not name.startswith("draft-"):
            continue
        facts = _circumstances(engine, statistics, used_template)
        cause = likely_cause(one.per_position, one.drafts, facts)
        if cause is not None:
            return f"{name}: {cause}"
    return None


def _circumstances(engine: Engine, statistics: Statistics, used_template: bool) -> Circumstances:
    options, template = engine.options, engine.chat_template
    draft = options.spec.draft
    thinks = template is not None and "enable_thinking" in template.source
    return Circumstances(
        has_template=template is not None,
        used_template=used_template,
        can_think=thinks and used_template and options.chat.reasoning != "off",
        n_text=statistics.n_prompt + statistics.emitted,
        n_trained=_trained_length(engine),
        cache_types=(draft.cache_type_k, draft.cache_type_v),
        chose_lengths=statistics.chose_lengths,
    )


def _trained_length(engine: Engine) -> int | None:
    """The context or window that the draft file says it was trained with."""
    from specdec.describe import describe
    from specdec.gguf_file import GGUFFile

    path = engine.options.spec.draft.path
    if path is None:
        return None
    with GGUFFile.open(path) as file:
        facts = describe(file)
    return facts.sliding_window or facts.n_ctx_train

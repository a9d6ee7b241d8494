"""Which drafters a run uses: what the user asked for, what the draft file is, whether they fit.

Everything here reads metadata and tensor names only, so that a wrong pair is refused before any
weights are read. Reference: llama.cpp's `common/speculative.cpp` and `common/arg.cpp`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec.drafters import DRAFTERS
from specdec.drafters.compatibility import check_vocabulary
from specdec.drafters.dflash import head_of
from specdec.drafters.dflash.validate import check_draft
from specdec.drafters.eagle3_validate import check_eagle3
from specdec.drafters.mtp.validate import check_mtp
from specdec.errors import UsageError
from specdec.gguf_file import GGUFFile
from specdec.memory import trim_memory
from specdec.models import check_architecture
from specdec.options import (
    AUTO,
    AUTO_LONGEST,
    DFLASH_TYPES,
    SPEC_TYPES,
    Activations,
    DraftOptions,
    Kernels,
    RopeOptions,
    SpecOptions,
)

if TYPE_CHECKING:
    import torch

    from specdec.drafters.base import Drafter, FirstOf
    from specdec.models.base import Target

log = logging.getLogger(__name__)

ASSISTANTS = ("gemma4-assistant",)
"""Architectures of multi-token-prediction models without keys and values of their own."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may be built from."""

    spec: SpecOptions
    target: Target
    target_file: GGUFFile
    draft_file: GGUFFile | None
    n_ctx: int
    cache_types: tuple[torch.dtype, torch.dtype]
    """Of the target's keys and values."""
    dtype_k: torch.dtype
    dtype_v: torch.dtype
    device: torch.device
    rope: RopeOptions = field(default_factory=RopeOptions)
    """The user's overrides for the target, which its MTP layers share."""
    kernels: Kernels = "auto"
    activations: Activations = "int8"

    def draft_options(self, longest: int | None = None) -> DraftOptions:
        """The options for a draft model that can draft ``longest`` tokens, or any number."""
        options = self.spec.draft
        if options.n_max != AUTO:
            return options
        n_max = AUTO_LONGEST if longest is None else min(AUTO_LONGEST, longest)
        return replace(options, n_max=n_max)


def draft_type(file: GGUFFile) -> str:
    """The spec type that runs a draft file, from its architecture, tensor names and keys."""
    if file.architecture == "dflash":
        return head_of(file)
    if file.architecture == "eagle3":
        return "draft-eagle3"
    return "draft-mtp" if has_mtp_layers(file) else "draft-simple"


def has_mtp_layers(file: GGUFFile) -> bool:
    """Whether the last block is a multi-token-prediction layer."""
    if file.architecture in ASSISTANTS:
        return True
    n_layer = file.get_int(file.key("block_count"), default=0)
    return f"blk.{n_layer - 1}.nextn.eh_proj.weight" in file.tensors


def choose_types(
    spec: SpecOptions, target_file: GGUFFile, draft_file: GGUFFile | None
) -> tuple[str, ...]:
    """The spec types to run, in priority order.

    Without `--spec-type` the draft file decides. Raises `UsageError` for a type that does not fit
    the draft, a draft that no type uses, or a type that needs a draft and has none;
    `MismatchError` for a draft made for another target.
    """
    types = spec.enabled
    if spec.types is None and draft_file is not None:
        types = (_detect(draft_file),)
    _check_draft_is_used(spec, types, draft_file)
    lookup = spec.ngram_cache
    if (lookup.static_path or lookup.dynamic_path) and "ngram-cache" not in types:
        log.warning(
            "--lookup-cache-static, --lookup-cache-dynamic: only ngram-cache reads them; add it to "
            "--spec-type"
        )
    for name in types:
        if name.startswith("draft-"):
            _check_draft(name, target_file, draft_file, spec)
    return tuple(name for name in DRAFTERS if name in types)


def build_drafters(types: tuple[str, ...], context: DraftContext) -> FirstOf:
    """The chosen drafters as one."""
    from specdec.drafters.base import FirstOf

    drafters = [DRAFTERS.load(name)(context) for name in types]
    if drafters:
        trim_memory()
    if context.spec.draft.n_max == AUTO:
        drafters = [_with_auto_length(drafter, context) for drafter in drafters]
    return FirstOf(drafters)


def _with_auto_length(drafter: Drafter, context: DraftContext) -> Drafter:
    """The drafter of a draft model with lengths that are worth their time; others as they are."""
    from specdec.drafters.auto_length import AutoLength
    from specdec.drafters.costs import LiveCosts, costs_path, load_or_measure
    from specdec.drafters.experience import Experience

    if not drafter.name.startswith("draft-"):
        return drafter
    target, cache_types = context.target, context.cache_types
    own = (context.dtype_k, context.dtype_v)
    settings = (context.kernels, context.activations, *own, *cache_types)
    path = costs_path(target, drafter, (context.target_file, context.draft_file), settings)
    costs = load_or_measure(path, target, drafter, context.n_ctx, cache_types)
    learned = path.with_name(path.name.replace("costs", "learned"))
    return AutoLength(drafter, Experience(LiveCosts(costs), drafter.n_max, learned))


def _detect(file: GGUFFile) -> str:
    found = draft_type(file)
    # Upstream answers the family's common name and lets the loader pick the head.
    name = "draft-dflash" if found in DFLASH_TYPES else found
    log.info("auto-detected speculative type '%s' from the draft model metadata", name)
    return name


def _check_draft_is_used(
    spec: SpecOptions, types: tuple[str, ...], draft_file: GGUFFile | None
) -> None:
    if draft_file is None or any(name.startswith("draft-") for name in types):
        return
    if spec.types and not types:
        log.warning("--spec-type none: the draft model %s is not used", draft_file.path)
        return
    raise UsageError(
        f"--spec-draft-model: {draft_file.path} is not used by --spec-type {','.join(types)}; "
        f"add {draft_type(draft_file)} or leave the draft out"
    )


def _check_draft(
    name: str, target_file: GGUFFile, draft_file: GGUFFile | None, spec: SpecOptions
) -> None:
    """Raises unless ``draft_file`` is what the spec type ``name`` runs."""
    assert name in SPEC_TYPES
    if draft_file is None:
        if name == "draft-mtp" and has_mtp_layers(target_file):
            check_mtp(target_file, None)
            return
        lacks = ", as the target has no MTP layers" if name == "draft-mtp" else ""
        raise UsageError(f"--spec-type: {name} requires a draft model{lacks}; give one with -md")
    found = draft_type(draft_file)
    if name in DFLASH_TYPES and found not in DFLASH_TYPES:
        raise UsageError(
            f"--spec-type {name} requires a DFlash draft model; {draft_file.path} is a "
            f"{draft_file.architecture} model: use {found}"
        )
    if name != found and not (name == "draft-dflash" and found in DFLASH_TYPES):
        # As in llama.cpp a run has one draft context: on the draft file if there is one.
        own = name == "draft-mtp" and has_mtp_layers(target_file)
        hint = "; the target's own MTP layers draft only without -md" if own else ""
        raise UsageError(
            f"--spec-type {name} does not match the draft model: use {found} for "
            f"{draft_file.path}{hint}"
        )
    if name == "draft-simple":
        check_architecture(draft_file)
        check_vocabulary(target_file, draft_file)
    if name == "draft-eagle3":
        check_eagle3(target_file, draft_file)
    if name == "draft-mtp":
        check_mtp(target_file, draft_file)
    if name in DFLASH_TYPES:
        check_draft(target_file, draft_file, spec.draft)

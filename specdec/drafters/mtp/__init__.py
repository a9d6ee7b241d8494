"""draft-mtp: multi-token-prediction layers, which come with the target or in a file of their own.

A head reads pairs (token at P, the target's final hidden state at P - 1) and predicts the token at
P + 1. Three variants: one head that is applied again and again, several heads in a chain, and the
Gemma 4 assistant, which reads the target's keys and values. References: DeepSeek-V3 (arXiv
2412.19437, section 2.2), llama.cpp's `common/speculative.cpp`. Imports no torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.drafters.mtp.drafter import MTPDrafter
    from specdec.drafters.selection import DraftContext


def build(context: DraftContext) -> MTPDrafter:
    """The drafter for the MTP layers in the draft file of ``context``, or in its target file."""
    from specdec.drafters.mtp.assistant import load_assistant
    from specdec.drafters.mtp.drafter import MTPDrafter
    from specdec.drafters.mtp.heads import load_heads
    from specdec.drafters.mtp.model import MTPModel
    from specdec.drafters.mtp.validate import ASSISTANT_TARGETS

    draft, target = context.draft_file, context.target
    load: Callable[..., MTPModel]
    if draft is not None and draft.architecture in ASSISTANT_TARGETS:
        load = load_assistant
    else:
        load = functools.partial(load_heads, is_separate=draft is not None)
    model = load(
        draft or context.target_file,
        target,
        context.rope,
        context.device,
        kernels=context.kernels,
        activations=context.activations,
    )
    return MTPDrafter(
        model,
        context.draft_options(model.n_max),
        context.n_ctx,
        dtype_k=context.dtype_k,
        dtype_v=context.dtype_v,
    )

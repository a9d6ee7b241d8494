"""A toy language and students that learn it.

Every token has one successor, and the states of the target say nothing. A draft that learns the
language drafts whole blocks from any token.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from specdec.drafters.dflash.model import load
from specdec.gguf_file import GGUFFile
from specdec.models.base import Target
from specdec.train.blocks import Student
from specdec.train.dataset import Conversation
from specdec.train.draft_file import write_fresh_draft
from specdec.train.shape import default_shape

WORDS = torch.arange(40, 52)
SUCCESSOR = torch.roll(WORDS, -5)
"""40 is followed by 45, 45 by 50, ... through all words."""


def say(target: Target, first: int, length: int) -> Conversation:
    """A text of the toy language, all of it supervised but the first two tokens."""
    tokens = [int(WORDS[first])]
    for _ in range(length - 1):
        tokens.append(int(SUCCESSOR[tokens[-1] - WORDS[0]]))
    text = torch.tensor(tokens)
    following = SUCCESSOR[text - WORDS[0]]
    # A last state that is a row of the output matrix makes its token by far the likeliest.
    final = target.output.weight[following].detach()
    final = final / final.norm(dim=-1, keepdim=True) * 30
    generator = torch.Generator().manual_seed(first)
    return Conversation(
        tokens=text,
        supervised=torch.arange(length) >= 2,
        taps=torch.randn(length, 2, target.config.n_embd, generator=generator),
        final=final,
        log_z=target.softcap(target.lm_head(final)).logsumexp(-1),
    )


def student_of(
    tmp_path: Path, file: GGUFFile, target: Target, head: str, n_rows: int = 32
) -> Student:
    """A fresh draft with blocks of four for ``target``, which knows tokens 30 ... or all (0)."""
    d2t = tuple(range(30, 30 + n_rows))
    shape = default_shape(file, head, mask_token=0, block_size=4, n_layer=2, d2t=d2t)
    shape = dataclasses.replace(
        shape, target_layers=(0, 2), n_candidates=min(shape.n_candidates, 4)
    )
    path = tmp_path / "draft.gguf"
    write_fresh_draft(path, file, shape, seed=1)
    return Student(load(GGUFFile.open(path), target, trainable=True), target)


def read(target: Target, n_tokens: int, n_prompt: int = 3) -> Conversation:
    """A greedy text of the target itself with its own states, taps 0 and 2."""
    text = [60, 70, 80][:n_prompt]
    with torch.inference_mode():
        cache = target.new_cache(n_tokens)
        logits = target.forward(torch.tensor(text), cache, logit_rows=1).logits
        while len(text) < n_tokens:
            text.append(int(logits[-1].argmax()))
            logits = target.forward(torch.tensor(text[-1:]), cache, logit_rows=1).logits
        tokens = torch.tensor(text)
        out = target.forward(tokens, target.new_cache(n_tokens), taps=(0, 2, -1), logit_rows=None)
    assert out.hidden is not None
    return Conversation(
        tokens=tokens,
        supervised=torch.arange(n_tokens) >= n_prompt,
        taps=out.hidden[:, :2].clone(),
        final=out.hidden[:, 2].clone(),
        log_z=out.logits.logsumexp(-1),
    )

"""The MTP driver on tiny files: rollback, limits, and which files fit each other."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_drafts
import tiny_mtp
import torch
from fakes import ForcedVerifier
from torch import Tensor

from specdec.drafters.mtp.drafter import MTPDrafter
from specdec.drafters.selection import DraftContext, build_drafters, choose_types, draft_type
from specdec.errors import MismatchError, ModelFileError, UnsupportedError, UsageError
from specdec.generate import Limits, decode
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import DraftOptions, SamplingOptions, SpecOptions

N_CTX = 128
PROMPT = [*range(70, 82)]
MTP = SpecOptions(types=("draft-mtp",))
ARCHITECTURES = ("hy_v3", "mimo2", "qwen35", "gemma4")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def open_target(architecture: str) -> GGUFFile:
    path = Path(_folder().name) / f"{architecture}.gguf"
    n_heads = 3 if architecture == "mimo2" else 1
    return GGUFFile.open(tiny_mtp.write_mtp(path, architecture, n_heads=n_heads))


@functools.cache
def open_assistant() -> GGUFFile:
    return GGUFFile.open(tiny_mtp.write_assistant(Path(_folder().name) / "assistant.gguf"))


@functools.cache
def target_of(architecture: str) -> Target:
    return load_target(open_target(architecture))


def new_drafter(
    architecture: str, options: DraftOptions, sampling: SamplingOptions | None = None
) -> MTPDrafter:
    spec = SpecOptions(types=("draft-mtp",), draft=options)
    target_file = open_target(architecture)
    draft_file = open_assistant() if architecture == "gemma4" else None
    context = DraftContext(
        spec=spec,
        target=target_of(architecture),
        target_file=target_file,
        draft_file=draft_file,
        n_ctx=N_CTX,
        cache_types=(torch.float32, torch.float32),
        dtype_k=torch.float32,
        dtype_v=torch.float32,
        device=torch.device("cpu"),
    )
    drafter = build_drafters(choose_types(spec, target_file, draft_file), context).drafters[0]
    assert isinstance(drafter, MTPDrafter)
    drafter.begin(sampling or SamplingOptions(temp=0))
    return drafter


def show(architecture: str, drafter: MTPDrafter, text: list[int]) -> None:
    target = target_of(architecture)
    tokens = torch.tensor(text)
    output = target(tokens, target.new_cache(N_CTX), taps=drafter.taps, logit_rows=0)
    drafter.observe(tokens, output.hidden)


def step_logits(drafter: MTPDrafter, last_token: int) -> Tensor:
    """The logits of the steps of the next draft, [K, V]."""
    found, step = [], drafter.model.step

    def spy(*arguments: object) -> tuple[Tensor, Tensor]:
        logits, hidden = step(*arguments)  # type: ignore[arg-type]
        found.append(logits)
        return logits, hidden

    drafter.model.step = spy  # type: ignore[method-assign]
    drafter.draft(last_token, 8)
    drafter.model.step = step  # type: ignore[method-assign]
    return torch.stack(found)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_after_any_rounds_are_those_of_a_fresh_drafter(architecture: str) -> None:
    drafter = new_drafter(architecture, DraftOptions(n_max=3))
    fresh = new_drafter(architecture, DraftOptions(n_max=3))
    target = target_of(architecture)
    for accepted in itertools.product((0, 1, 3), (0, 2, 3)):
        for one in (drafter, fresh):
            one.begin(SamplingOptions(temp=0))
        verifier, cache = ForcedVerifier(accepted), target.new_cache(N_CTX)
        rounds = decode(target, cache, drafter, verifier, PROMPT, Limits(N_CTX, n_batch=5))
        text = PROMPT + [token for _ in accepted for token in next(rounds).tokens]
        show(architecture, fresh, text[:-1])
        torch.testing.assert_close(
            step_logits(drafter, text[-1]), step_logits(fresh, text[-1]), atol=2e-5, rtol=0
        )


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_draft_before_any_token_reads_zeros(architecture: str) -> None:
    drafter = new_drafter(architecture, DraftOptions(n_max=2))
    assert len(drafter.draft(70, 8).tokens) == 2
    show(architecture, drafter, [70])
    assert len(drafter.draft(71, 8).tokens) == 2


def test_chained_heads_limit_the_draft(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    drafter = new_drafter("mimo2", DraftOptions(n_max=5, n_min=4))
    assert (drafter.n_max, drafter.options.n_min) == (3, 3)
    assert "(n_max=5, n_min=4) exceeds the number of MTP heads 3" in caplog.text
    caplog.clear()
    assert new_drafter("hy_v3", DraftOptions(n_max=20)).n_max == 20
    assert new_drafter("mimo2", DraftOptions(n_max=3)).n_max == 3
    assert not caplog.text


@torch.inference_mode()
def test_p_min_and_n_min() -> None:
    free = new_drafter("hy_v3", DraftOptions(n_max=8))
    show("hy_v3", free, PROMPT)
    lengths, wanted = set(), free.draft(120, 8).tokens
    for p_min in (0.0, 0.3, 0.42, 0.6, 1.0):
        drafter = new_drafter("hy_v3", DraftOptions(n_max=8, p_min=p_min))
        show("hy_v3", drafter, PROMPT)
        draft = drafter.draft(120, 8)
        assert draft.tokens == wanted[: len(draft.tokens)]
        assert draft.end == ("n_max" if len(draft.tokens) == 8 else "p_min")
        lengths.add(len(draft.tokens))
        strict = new_drafter("hy_v3", DraftOptions(n_max=8, p_min=p_min, n_min=8))
        show("hy_v3", strict, PROMPT)
        assert len(strict.draft(120, 8).tokens) in (0, 8)
        assert len(strict.draft(120, 3).tokens) <= 3
    assert lengths == {0, 1, 2, 5, 8}
    assert len(free.draft(120, 3).tokens) == 3


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampled_drafts_carry_the_distribution_they_were_drawn_from(architecture: str) -> None:
    options = DraftOptions(n_max=3, n_min=3, p_min=0.3, sampling="probabilistic")
    drafter = new_drafter(architecture, options, SamplingOptions(temp=1.0, seed=3))
    show(architecture, drafter, PROMPT)
    drafts = [drafter.draft(token, 8) for token in range(90, 130)]
    assert len({len(draft.tokens) for draft in drafts}) > 1
    for draft in drafts:
        if not draft.tokens:
            continue
        assert draft.q is not None
        assert draft.q.probs.sum(-1).allclose(torch.ones(len(draft.tokens)))
        for token, ids in zip(draft.tokens, draft.q.ids, strict=True):
            assert token in ids.tolist()


def test_mtp_files_are_recognised() -> None:
    assert draft_type(open_target("hy_v3")) == "draft-mtp"
    assert draft_type(open_assistant()) == "draft-mtp"
    assert choose_types(SpecOptions(), open_target("gemma4"), open_assistant()) == ("draft-mtp",)
    assert choose_types(MTP, open_target("mimo2"), None) == ("draft-mtp",)
    assert choose_types(SpecOptions(), open_target("mimo2"), None) == ()


def test_a_target_without_mtp_layers_needs_a_draft() -> None:
    with pytest.raises(
        UsageError, match="draft-mtp requires a draft model, as the target has no MTP layers"
    ):
        choose_types(MTP, open_target("gemma4"), None)


@pytest.mark.parametrize(
    ("architecture", "changes", "error", "message"),
    [
        ("hy_v3", {"metadata": {"embedding_length": 48}}, MismatchError, "hidden width 48"),
        (
            "hy_v3",
            {"n_heads": 2, "metadata": {"nextn_predict_layers": 1}},
            MismatchError,
            "3 layers",
        ),
        ("mimo2", {}, MismatchError, "MTP layers for mimo2, but the target is a hy_v3 model"),
        ("qwen35", {"n_heads": 2}, UnsupportedError, "only supports a single MTP block, found 2"),
        ("hy_v3", {"metadata": {"nextn_predict_layers": None}}, ModelFileError, "is 0, expected"),
        (
            "hy_v3",
            {"n_heads": 2, "tensors": {"blk.2.nextn.eh_proj.weight": None}},
            ModelFileError,
            "MTP block missing nextn.eh_proj",
        ),
        (
            "hy_v3",
            {"tensors": {"token_embd.weight": np.zeros((300, 32), np.float32)}},
            MismatchError,
            "300 tokens, the target has 259",
        ),
    ],
)
def test_drafts_that_do_not_fit(
    tmp_path: Path, architecture: str, changes: dict, error: type, message: str
) -> None:
    path = tiny_mtp.write_mtp(tmp_path / "draft.gguf", architecture, **changes)
    with GGUFFile.open(path) as draft, pytest.raises(error, match=message):
        choose_types(MTP, open_target("hy_v3"), draft)


def test_an_architecture_whose_layers_cannot_be_run(tmp_path: Path) -> None:
    path = tiny.write_target(tmp_path / "draft.gguf")
    with GGUFFile.open(path) as file, pytest.raises(UsageError, match="use draft-simple"):
        choose_types(MTP, open_target("hy_v3"), file)


@pytest.mark.parametrize("other", ["draft-dflash", "draft-eagle3", "draft-simple"])
def test_layers_of_the_target_beside_a_draft_file(tmp_path: Path, other: str) -> None:
    """A run has one draft: llama.cpp makes its draft context on the file that `-md` gives."""
    path = tmp_path / "draft.gguf"
    if other == "draft-dflash":
        tiny_drafts.write_dflash(path, target_layers=(0, 1))
    elif other == "draft-eagle3":
        tiny_drafts.write_eagle3(path, target_layers=(0, 1, 2))
    else:
        tiny.write_target(path)
    text = (
        f"--spec-type draft-mtp does not match the draft model: use {other} for {path}; the "
        "target's own MTP layers draft only without -md"
    )
    target = open_target("hy_v3")
    with GGUFFile.open(path) as draft:
        for types in (("draft-mtp", other), (other, "draft-mtp"), ("draft-mtp",)):
            with pytest.raises(UsageError, match=re.escape(text)):
                choose_types(SpecOptions(types=types), target, draft)
        assert choose_types(SpecOptions(types=(other,)), target, draft) == (other,)
    with GGUFFile.open(path) as draft, pytest.raises(UsageError) as caught:
        choose_types(MTP, open_target("gemma4"), draft)
    assert "MTP layers" not in str(caught.value)


def test_an_assistant_of_another_width(tmp_path: Path) -> None:
    path = tiny_mtp.write_assistant(tmp_path / "draft.gguf", width_out=48)
    with GGUFFile.open(path) as draft, pytest.raises(MismatchError, match="embedding_length_out"):
        choose_types(MTP, open_target("gemma4"), draft)
    with pytest.raises(MismatchError, match="MTP layers for gemma4"):
        choose_types(MTP, open_target("hy_v3"), open_assistant())


@torch.inference_mode()
def test_own_ends_and_norms_are_used(tmp_path: Path) -> None:
    """Tensors that a head may bring change its logits; without them it shares the target's."""
    random = np.random.default_rng(5)
    own = {
        "blk.2.nextn.embed_tokens.weight": random.standard_normal((259, 32)).astype(np.float32),
        "blk.2.nextn.shared_head_head.weight": random.standard_normal((259, 32)).astype(np.float32),
        "blk.2.nextn.shared_head_norm.weight": None,
        "blk.2.layer_output_norm.weight": np.full(32, 2.0, np.float32),
    }
    logits = []
    for names in ((), *([name] for name in own)):
        path = tmp_path / f"{len(logits)}.gguf"
        tiny_mtp.write_mtp(path, "mimo2", tensors={name: own[name] for name in names})
        with GGUFFile.open(path) as file:
            target = load_target(file)
            context = DraftContext(
                spec=MTP,
                target=target,
                target_file=file,
                draft_file=None,
                n_ctx=N_CTX,
                cache_types=(torch.float32, torch.float32),
                dtype_k=torch.float32,
                dtype_v=torch.float32,
                device=torch.device("cpu"),
            )
            drafter = build_drafters(("draft-mtp",), context).drafters[0]
            assert isinstance(drafter, MTPDrafter)
        tokens = torch.tensor(PROMPT)
        output = target(tokens, target.new_cache(N_CTX), taps=drafter.taps)
        drafter.observe(tokens, output.hidden)
        logits.append(step_logits(drafter, 90)[0])
    for changed in logits[1:4]:
        assert not torch.allclose(changed, logits[0], atol=1e-2)
    torch.testing.assert_close(logits[4], logits[0])  # `shared_head_norm` comes first

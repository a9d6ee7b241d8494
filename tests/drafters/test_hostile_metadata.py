"""Draft files whose metadata lies: they work or are refused in one clear line, nothing else."""

from __future__ import annotations

import functools
import math
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drafters.dflash.trace import TARGETS, names, path_of, target_of
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafters.selection import DraftContext, build_drafters, choose_types
from specdec.errors import ModelFileError, SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.options import DraftOptions, SamplingOptions, SpecOptions

CPU = torch.device("cpu")
DRAFTS = (
    *("dft_opts", "dft2", "dft2_softcap", "dspark_accepted", "dspark_dsv4", "lilicorr_conv"),
    *("eagle3_opts", "eagle3_yarn"),
)
"""One for each head and each backbone."""
MEMORY = 2 << 30
"""Bytes that a tiny draft is far from."""
SCALARS = (0, 1, -1, 3, 1000, 2**31, 2**32, 2**63 - 1, math.nan, math.inf, -0.5, 1e30, "x", True)
Value = Any


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    """No gradients, and an error for whoever asks for gigabytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    with torch.inference_mode():
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@functools.cache
def target_file(name: str) -> GGUFFile:
    return GGUFFile.open(path_of(TARGETS.get(name, "tgt_qwen3") + ".gguf"))


@functools.cache
def metadata_of(name: str) -> dict[str, Value]:
    """What the file says, and None for what other drafts of its kind say."""
    kind = "eagle3" if name.startswith("eagle3") else "d"
    known: dict[str, Value] = {}
    for other in names(kind):
        with GGUFFile.open(path_of(other + ".gguf")) as file:
            known |= dict.fromkeys(file.metadata)
    with GGUFFile.open(path_of(name + ".gguf")) as file:
        return known | dict(file.metadata)


def lies_about(value: Value) -> st.SearchStrategy[Value]:
    """Values that a file may have in place of one; None for a key that is left out."""
    lies = [None, *SCALARS, np.zeros(0, np.int32), np.array([1, 2, 3]), np.array([0.5]), ["a"]]
    if isinstance(value, np.ndarray) and len(value) and value.dtype != bool:
        lies += [value[:-1], np.concatenate((value, value))]
        for bad in (-1, 0, 2**31 - 1, 2**62):
            changed = value.astype(np.int64 if value.dtype.kind in "iu" else np.float64)
            changed[-1] = bad
            lies.append(changed)
    if isinstance(value, list):
        lies += [value[:-1], [*value, "z"], []]
    return st.sampled_from(lies)


def draft_with(name: str, changes: dict[str, Value]) -> GGUFFile:
    file = GGUFFile.open(path_of(name + ".gguf"), changes)
    for key in [key for key, value in changes.items() if value is None]:
        del file.metadata._keys[key]
    return file


def run(name: str, changes: dict[str, Value]) -> None:
    """Loads a draft as a command does, and drafts once."""
    target, draft = target_of(name), draft_with(name, changes)
    spec = SpecOptions(draft=DraftOptions(n_max=3))
    types = choose_types(spec, target_file(name), draft)
    context = DraftContext(
        spec=spec,
        target=target,
        target_file=target_file(name),
        draft_file=draft,
        n_ctx=64,
        cache_types=(torch.float32, torch.float32),
        dtype_k=torch.float32,
        dtype_v=torch.float32,
        device=CPU,
    )
    drafter = build_drafters(types, context)
    drafter.begin(SamplingOptions(temp=0))
    tokens = torch.arange(5, 11)
    taps = torch.ones(len(tokens), len(drafter.taps), target.config.n_embd)
    drafter.observe(tokens, taps)
    drafter.draft(7, 3)


@pytest.mark.parametrize("name", DRAFTS)
@given(data=st.data())
@settings(max_examples=100)
def test_any_value_works_or_is_refused(name: str, data: st.DataObject) -> None:
    known = metadata_of(name)
    keys = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=2, unique=True))
    changes = {key: data.draw(lies_about(known[key]), key) for key in keys}
    try:
        run(name, changes)
    except SpecdecError as error:
        message = str(error)
        assert name in message or any(key.rpartition(".")[2] in message for key in keys)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("dft_opts", "feed_forward_length", -1, "is -1, expected 1 to"),
        ("dft_opts", "feed_forward_length", 0, "is 0, expected 1 to"),
        ("dft_opts", "feed_forward_length", 2**63 - 1, "is 9223372036854775807, expected"),
        ("dft_sharedkv", "attention.head_count", 2**63 - 1, "is 9223372036854775807, expected"),
        ("dft2", "conv_kernel_size", 2**63 - 1, "is 9223372036854775807, expected"),
        ("dspark_dsv4", "hyper_connection.sinkhorn_iterations", 2**31, "expected at most 1000"),
        ("dspark_dsv4", "expert_feed_forward_length", 2**63 - 1, "expected 1 to"),
        ("dspark_dsv4", "attention.q_lora_rank", 2**63 - 1, "expected at most 1048576"),
        ("dspark_dsv4", "rope.freq_base", 0, "expected above 0"),
        ("eagle3_yarn", "rope.freq_base", 1, "angles that are no numbers: base 1,"),
        ("eagle3_yarn", "rope.freq_base", math.nan, "found the float nan, expected a number"),
        ("eagle3_yarn", "rope.scaling.factor", -1, "angles that are no numbers: .* scale -1,"),
        ("eagle3_yarn", "rope.scaling.yarn_beta_fast", 0, "no numbers: .* beta_fast 0,"),
        ("dft_opts", "attention.layer_norm_rms_epsilon", math.inf, "the float inf, expected"),
    ],
)
def test_what_is_wrong_is_said(name: str, key: str, value: Value, message: str) -> None:
    kind = "eagle3" if name.startswith("eagle3") else "dflash"
    with pytest.raises(ModelFileError, match=f"{name}.gguf: .*{message}"):
        run(name, {f"{kind}.{key}": value})

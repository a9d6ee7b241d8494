"""Many texts side by side: each as if it were alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch

from specdec.engine import Engine
from specdec.errors import UnsupportedError, UsageError
from specdec.gguf_file import GGUFFile
from specdec.models import load_target
from specdec.models.base import Target
from specdec.options import Options
from specdec.train.lanes import GROUP, End, Lanes, Request, Text

VECTORS = Path(__file__).parent.parent / "data" / "vectors"
DENSE = ["tgt_llama", "tgt_qwen2", "tgt_qwen3_yarn", "tgt_qwen3moe", "tgt_gemma3", "mtp_mimo2"]
NO_END: frozenset[int] = frozenset()


def load(path: Path) -> Target:
    with GGUFFile.open(path) as file:
        return load_target(file, kernels="torch")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tiny.write_target(tmp_path_factory.mktemp("lanes") / "target.gguf"))


@torch.inference_mode()
def plain(target: Target, prompt: Sequence[int], n: int) -> list[int]:
    """Greedy text, token by token, in the target's own cache."""
    cache, tokens, text = target.new_cache(512), list(prompt), list[int]()
    for _ in range(n):
        logits = target.forward(torch.tensor(tokens), cache, logit_rows=1).logits
        tokens = [int(logits[0].argmax())]
        text += tokens
    return text


def drain(lanes: Lanes, requests: Sequence[Request]) -> list[Text]:
    """All texts, by tag; lanes are refilled as they get free."""
    waiting, done = list(requests), list[Text]()
    while waiting or lanes.texts:
        while waiting and lanes.n_free:
            lanes.add(waiting.pop(0))
        done += lanes.step()
    return sorted(done, key=lambda text: text.request.tag)


def prompts(n: int, n_vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, n_vocab) for _ in range(rng.randint(1, 40))] for _ in range(n)]


@pytest.mark.parametrize("name", DENSE)
def test_greedy_text_is_that_of_plain_decoding(name: str) -> None:
    target = load(VECTORS / f"{name}.gguf")
    asked = prompts(5, target.config.n_vocab)
    lanes = Lanes(target, 3, 96)
    texts = drain(lanes, [Request(p, 24, NO_END, tag=i) for i, p in enumerate(asked)])
    lanes = Lanes(target, 2, 96, prefix=asked[0][:-1])
    (text,) = drain(lanes, [Request(asked[0], 24, NO_END, tag=0)])
    assert text.tokens == texts[0].tokens
    assert [text.tokens for text in texts] == [plain(target, p, 24) for p in asked]


def test_refilled_lanes_and_groups_keep_texts_apart(target: Target) -> None:
    rng = random.Random(1)
    asked = prompts(60, 259, seed=2)
    limits = [rng.randint(1, 30) for _ in asked]
    requests = [
        Request(p, limit, NO_END, tag=i)
        for i, (p, limit) in enumerate(zip(asked, limits, strict=True))
    ]
    texts = drain(Lanes(target, 2 * GROUP + 3, 80), requests)
    expected = [plain(target, p, limit) for p, limit in zip(asked, limits, strict=True)]
    assert [text.tokens for text in texts] == expected
    assert {text.end for text in texts} == {End.LENGTH}


def test_a_common_prefix_is_read_once(target: Target) -> None:
    prefix = [40, 41, 42, 43, 44]
    asked = [prefix + p for p in prompts(5, 259)] + [prefix, prefix[:3], [7, 8]]
    lanes = Lanes(target, 3, 96, prefix=prefix)
    texts = drain(lanes, [Request(p, 12, NO_END, tag=i) for i, p in enumerate(asked)])
    assert [text.tokens for text in texts] == [plain(target, p, 12) for p in asked]


def test_sampled_text_depends_on_the_request_alone(target: Target) -> None:
    asked = prompts(12, 259)
    requests = [Request(p, 20, NO_END, 1.0, 0.9, seed=i, tag=i) for i, p in enumerate(asked)]
    many = drain(Lanes(target, 12, 80), requests)
    few = drain(Lanes(target, 2, 80), requests[::-1])
    assert [text.tokens for text in many] == [text.tokens for text in few]
    other = drain(Lanes(target, 1, 80), [Request(asked[0], 20, NO_END, 1.0, 0.9, seed=99, tag=0)])
    assert other[0].tokens != many[0].tokens


def test_samples_follow_the_nucleus(target: Target) -> None:
    prompt, temperature, top_p = [5, 6, 7], 0.8, 0.7
    with torch.inference_mode():
        logits = target.forward(torch.tensor(prompt), target.new_cache(8), logit_rows=1).logits[0]
    p, order = (logits / temperature).softmax(-1).sort(descending=True)
    kept = p.cumsum(0) - p < top_p
    expected = dict(zip(order[kept].tolist(), (p[kept] / p[kept].sum()).tolist(), strict=True))
    n = 3000
    requests = [Request(prompt, 1, NO_END, temperature, top_p, seed=i, tag=i) for i in range(n)]
    counts = Counter(text.tokens[0] for text in drain(Lanes(target, 500, 8), requests))
    assert set(counts) <= set(expected)
    gap = sum(abs(counts[token] / n - share) for token, share in expected.items()) / 2
    assert gap < 0.05


def test_texts_end_at_end_tokens_and_where_the_caller_says(target: Target) -> None:
    text = plain(target, [9, 8, 7], 12)
    end, place = text[5], text.index(text[5])
    requests = [
        Request([9, 8, 7], 12, frozenset({end}), tag=0),
        Request([9, 8, 7], 12, NO_END, stop=lambda tokens: len(tokens) == 4, tag=1),
        Request([9, 8, 7], 12, NO_END, tag=2),
    ]
    ended, stopped, whole = drain(Lanes(target, 3, 32), requests)
    assert (ended.tokens, ended.end) == (text[: place + 1], End.END_TOKEN)
    assert (stopped.tokens, stopped.end) == (text[:4], End.STOPPED)
    assert (whole.tokens, whole.end) == (text, End.LENGTH)


def test_half_precision_runs_on_a_copy(target: Target) -> None:
    requests = [Request(p, 8, NO_END, tag=i) for i, p in enumerate(prompts(3, 259))]
    texts = drain(Lanes(target, 3, 64, dtype=torch.bfloat16), requests)
    assert all(len(text.tokens) == 8 for text in texts)
    assert target.output_norm.weight.dtype is torch.float32


def test_requests_that_do_not_fit_are_refused(target: Target) -> None:
    lanes = Lanes(target, 1, 16)
    with pytest.raises(UsageError, match="do not fit"):
        lanes.add(Request([1] * 10, 7, NO_END))
    with pytest.raises(UsageError, match="do not fit"):
        lanes.add(Request([], 7, NO_END))
    lanes.add(Request([1] * 9, 7, NO_END))
    with pytest.raises(UsageError, match="lanes are taken"):
        lanes.add(Request([1], 1, NO_END))


def test_targets_that_cannot_run_in_lanes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="recurrent"):
        Lanes(load(VECTORS / "mtp_qwen35.gguf"), 1, 16)
    path = tiny.write_target(tmp_path / "target.gguf")
    engine = Engine.load(Options().merge({"model.path": path}))
    if engine.target.is_row_invariant:
        with pytest.raises(UsageError, match="--kernels torch"):
            Lanes(engine.target, 1, 16)

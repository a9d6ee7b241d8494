"""`make exactness`: with any drafter, the tokens are those of decoding without one.

Every prompt is answered without drafts, then with every drafter, by native kernels: greedily, and
with a temperature and a seed, verified by matching. All answers of a drafter are requests to one
session, which keeps what prompts have in common. A reply that differs in a token or in how it ends
makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import string
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import requantised
from random_drafts import write_missing, write_mtp_target

from specdec.bench import DEFAULT_PROMPTS, load_prompts
from specdec.chat import Message
from specdec.drafters.selection import draft_type
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.gguf_file import GGUFFile
from specdec.options import AUTO, Options
from specdec.session import Completion, Session

MODES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"sampling__temp": 0.0},
    "seeded": {"sampling__temp": 0.8},
}
"""How tokens are chosen; the seed is the number of the prompt."""
NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
SHORT_KEYS = {
    "spec.ngram_simple.size_n": 3,
    "spec.ngram_simple.size_m": 8,
    "spec.ngram_map_k.size_n": 3,
    "spec.ngram_map_k.size_m": 8,
    "spec.ngram_map_k4v.size_n": 3,
    "spec.ngram_map_k4v.size_m": 8,
    "spec.ngram_mod.n_match": 3,
    "spec.ngram_mod.n_min": 2,
    "spec.ngram_mod.n_max": 16,
}
"""Replies are short, so keys are, too: drafts are to be made and refused."""
LONGEST = 7
SMALLER = "Q4_0"
"""Format of the target that drafts for itself, besides its own."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode: a name and the speculation it is."""

    name: str
    layer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply beside that of plain decoding."""

    is_equal: bool
    emitted: int
    passes: int

    @property
    def cell(self) -> str:
        """Tokens per pass, or that they are other tokens."""
        return f"{self.emitted / max(1, self.passes):.2f}" if self.is_equal else "DIFFER"


Replies = dict[str, list[Reply]]
"""Mode -> one for each prompt."""


def main() -> int:
    """Prints a line for each way, then the tables; 1 if any reply differed."""
    options = _arguments()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    prompts = _prompts(options.prompts)
    print(f"{options.model.name}, {len(prompts)} prompts, up to {options.n_predict} tokens each")
    print(f"\n{'':>2} {'replies that are equal':<38}" + "".join(f"{mode:>18}" for mode in MODES))
    found: dict[str, Replies] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, ways in _work(options.model, options.drafts, Path(folder)):
            plain = _load(model, options.threads)
            expected = _answers(plain, prompts, options.n_predict)
            for way in ways:
                engine = plain.with_spec(plain.options.merge(way.layer).spec)
                found[way.name] = compare(expected, _answers(engine, prompts, options.n_predict))
                print(f"{_letter(len(found) - 1):>2} {way.name:<38}" + _sums(found[way.name]))
    for mode in MODES:
        _print_table(mode, prompts, [replies[mode] for replies in found.values()])
    different = sum(not one.is_equal for way in found.values() for m in MODES for one in way[m])
    total = sum(len(way[mode]) for way in found.values() for mode in MODES)
    print(f"\n{total - different} of {total} replies are equal")
    return 1 if different else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafts", type=Path, nargs="*")
    parser.add_argument(
        "--prompts", type=Path, help="a file, .jsonl or a prompt a line, or a folder of them"
    )
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def _prompts(path: Path | None) -> list[str]:
    """All prompts at ``path``; those of `specdec bench` without one."""
    if path is None:
        return list(DEFAULT_PROMPTS)
    if not path.is_dir():
        return load_prompts(path)
    files = sorted(file for kind in ("*.jsonl", "*.txt") for file in path.glob(kind))
    return [prompt for file in files for prompt in load_prompts(file)]


def _load(model: Path, n_threads: int) -> Engine:
    """The target on native kernels; drafts that these do not know may run on torch."""
    layer = {"model.path": model, "model.n_threads": n_threads, "model.kernels": "native"}
    engine = Engine.load(Options().merge(layer))
    engine.options = engine.options.merge({"model.kernels": "auto"})
    return engine


def _work(model: Path, drafts: Sequence[Path], folder: Path) -> Iterator[tuple[Path, list[Way]]]:
    """Each target with all ways to draft for it; random drafts go to ``folder``."""
    by_type = {}
    for path in drafts:
        with GGUFFile.open(path) as file:
            by_type[draft_type(file)] = path
    with GGUFFile.open(model) as target:
        missing = write_missing(folder, target, list(drafts))
        mtp = folder / "mtp-target.gguf"
        write_mtp_target(mtp, target)
    yield (
        model,
        [*_without_heads(model, folder), *_with_heads(by_type | {p.stem: p for p in missing})],
    )
    yield mtp, [_way(["draft-mtp"], n_max=3), _way(["ngram-mod", "draft-mtp"], n_max=3)]


def _without_heads(model: Path, folder: Path) -> Iterator[Way]:
    for name in NGRAM_TYPES:
        yield _way([name])
    yield _way(list(NGRAM_TYPES))
    for draft, note in ((model, "itself"), (requantised(model, SMALLER, folder), SMALLER)):
        yield _way(["draft-simple"], draft, LONGEST, note)
    yield _way(["ngram-cache", "draft-simple"], model, AUTO, "itself")


def _with_heads(by_type: Mapping[str, Path]) -> Iterator[Way]:
    for name, path in by_type.items():
        for n_max in (LONGEST, AUTO):
            yield _way([name], path, n_max)
        yield _way(["ngram-mod", name], path, LONGEST)


def _way(
    types: list[str], draft: Path | None = None, n_max: int | None = None, note: str = ""
) -> Way:
    layer: dict[str, Any] = SHORT_KEYS | {"spec.types": tuple(types), "spec.draft.path": draft}
    if n_max is not None:
        layer["spec.draft.n_max"] = n_max
    name = "all n-gram types" if types == list(NGRAM_TYPES) else ",".join(types)
    length = {None: "", AUTO: "auto"}.get(n_max, str(n_max))
    return Way(" ".join(word for word in (name, note, length) if word), layer)


def _answers(engine: Engine, prompts: Sequence[str], n_predict: int) -> dict[str, list[Completion]]:
    """The replies to all prompts in each mode, one session after all."""
    session = engine.session()
    return {
        mode: [
            _answer(session, prompt, sampling__seed=i, generate__n_predict=n_predict, **choice)
            for i, prompt in enumerate(prompts)
        ]
        for mode, choice in MODES.items()
    }


def _answer(session: Session, prompt: str, **choice: Any) -> Completion:
    has_template = session.engine.chat_template is not None
    turn = [Message(role="user", content=prompt)] if has_template else prompt
    return session.generate(turn, **choice)


def compare(
    expected: Mapping[str, Sequence[Completion]], found: Mapping[str, Sequence[Completion]]
) -> Replies:
    """Each found reply beside the expected one to the same prompt."""
    return {
        mode: [
            Reply(
                is_equal=(one.token_ids, one.finish) == (plain.token_ids, plain.finish),
                emitted=one.statistics.emitted,
                passes=one.statistics.rounds,
            )
            for plain, one in zip(expected[mode], found[mode], strict=True)
        ]
        for mode in MODES
    }


def _sums(replies: Replies) -> str:
    """For each mode how many replies are equal, and tokens per pass over all of them."""
    words = ""
    for mode in MODES:
        equal = sum(reply.is_equal for reply in replies[mode])
        emitted = sum(reply.emitted for reply in replies[mode])
        passes = sum(reply.passes for reply in replies[mode])
        words += f"{equal:>7}/{len(replies[mode])}{emitted / max(1, passes):>8.2f}"
    return words


def _print_table(mode: str, prompts: Sequence[str], columns: Sequence[Sequence[Reply]]) -> None:
    """Prompts by ways, by their letters."""
    print(f"\n{mode + ', tokens per pass':<28}", end="")
    print("".join(f"{_letter(i):>7}" for i in range(len(columns))))
    for i, prompt in enumerate(prompts):
        start = " ".join(prompt.split())[:26]
        print(f"{start:<28}" + "".join(f"{column[i].cell:>7}" for column in columns))


def _letter(index: int) -> str:
    letters = string.ascii_uppercase
    return letters[index] if index < 26 else "A" + letters[index - 26]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecdecError as error:
        sys.exit(f"exactness: {error}")

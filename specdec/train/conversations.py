"""Conversations in the target's own words: what a draft learns from.

Prompts (`prompts.py`) are answered by the target, half of the time greedily, and written down as
the token ids that the run time would see, with the ranges that the target wrote. The file grows
line by line and is continued where it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from specdec.chat import Message
from specdec.engine import Engine
from specdec.errors import SpecdecError, UnsupportedError, UsageError
from specdec.folders import write_whole
from specdec.models.base import Target
from specdec.train.folder import TARGET
from specdec.train.lanes import End, Lanes, Request, Text
from specdec.train.packed import check_target
from specdec.train.precision import fastest_dtype
from specdec.train.prompts import (
    Openings,
    PromptFilter,
    PromptSource,
    Start,
    encode_chat,
    is_finished,
    user_turn,
)

log = logging.getLogger(__name__)

FILE = "conversations.jsonl"
LONGEST_PERIOD = 32
REPEATS = 3
MIN_REPEATED = 16
"""Repeated tokens that make a loop at least: shorter ones are tables and lists."""
MAX_LOOPS = 0.1
"""Share of conversations that may end in a loop."""
SECOND_TURNS = 0.15
MIN_KEPT = 16
"""Tokens of an answer that is broken off which are worth keeping."""
MIN_CONTEXT = 32
"""Tokens that a target must have room for beside its chat template."""
MAX_EMPTY = 1000
"""Answers in a row of which nothing is left that show that none will come."""
USUAL_TEMPLATE = 128
"""Tokens of a chat template that do not lengthen the lanes."""
LANE_BYTES = 2**31
"""What the caches of all lanes may take."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What to generate; the budgets count what the folder holds already."""

    prompts: tuple[str, ...] = ()
    """The user's own, answered first: greedily and sampled."""
    excluded: tuple[str, ...] = ()
    """Prompts to measure with; near copies are not trained on."""
    unwanted: frozenset[int] = frozenset()
    """Tokens that must not occur, such as the draft's mask: answers with one are dropped."""
    minutes: float | None = None
    n_tokens: int | None = None
    """Supervised tokens."""
    n_lanes: int = 96
    n_ctx: int = 768
    prompt_limit: int = 96
    text_limit: int = 160
    """Tokens of a prompt that contains a text."""
    answer_limit: int = 256
    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0


@dataclass(slots=True)
class Record:
    """One conversation, one line of the file."""

    serial: int
    prompt: str
    source: str
    kind: str
    greedy: bool
    loop: bool
    seconds: float
    """Time spent on the whole file when it was written."""
    tokens: list[int]
    supervised: list[list[int]]
    """[start, end) of what the target wrote, end tokens included."""

    @property
    def n_supervised(self) -> int:
        """How many tokens the target wrote."""
        return sum(end - start for start, end in self.supervised)


@dataclass(frozen=True, slots=True)
class DataProgress:
    """How far the generation is."""

    n_conversations: int
    n_tokens: int
    """Supervised tokens, those of earlier runs included."""
    seconds: float
    """Spent on the file, earlier runs included."""
    tokens_per_second: float
    """Supervised tokens, over this run."""
    fraction: float
    """Of the budget, 0 to 1."""


def generate_data(
    engine: Engine,
    folder: Path,
    options: DataOptions,
    *,
    progress: Callable[[DataProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DataProgress:
    """Adds conversations to ``folder``/conversations.jsonl until a budget is used up.

    ``progress`` is told about once a second, ``should_stop`` asked at every step. What is written
    stays, whatever ends the call. Raises `UsageError` without a budget or for a folder of another
    target, `UnsupportedError` for a target that cannot run in lanes.
    """
    if options.minutes is None and options.n_tokens is None:
        raise UsageError("training data: give --minutes or --tokens")
    check_target(engine.target)
    check_folder(engine.target, folder)
    options = _fitted(options, engine)
    with RecordFile(folder / FILE) as file:
        writer = _Writer(engine, options, file)
        try:
            writer.run(progress, should_stop)
        except SpecdecError:
            raise  # nothing can be written any more
        except BaseException:
            writer.break_off()
            raise
        writer.break_off()
        return writer.progress()


def _fitted(options: DataOptions, engine: Engine) -> DataOptions:
    """The options with lengths that fit the target's context beside its chat template.

    Raises `UnsupportedError` for a context in which there is no room for any text.
    """
    n_template = len(encode_chat(engine, [_user("a")]))
    wanted = options.n_ctx + max(0, n_template - USUAL_TEMPLATE)
    n_ctx = min(wanted, engine.target.config.n_ctx_train or wanted)
    left = n_ctx - n_template
    if left < MIN_CONTEXT:
        raise UnsupportedError(
            f"training: the chat template takes {n_template} of {n_ctx} tokens; at least "
            f"{MIN_CONTEXT} must be left for texts"
        )
    return replace(
        options,
        n_ctx=n_ctx,
        prompt_limit=min(options.prompt_limit, left // 3),
        text_limit=min(options.text_limit, left // 3),
        answer_limit=min(options.answer_limit, left // 2),
    )


def check_folder(target: Target, folder: Path) -> None:
    """Makes ``folder`` one of this target; raises `UsageError` if it is another's."""
    path, mine = folder / TARGET, {"fingerprint": fingerprint(target)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_whole(path, json.dumps(mine))
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecdecError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise SpecdecError(
            f"{path}: is damaged; remove it if the folder is this target's"
        ) from None
    if found != mine:
        raise UsageError(f"{folder}: holds the data of another target; give another folder")


def fingerprint(target: Target) -> str:
    """Tells targets apart by their sizes and some of their weights."""
    digest = hashlib.sha256(repr(target.config).encode())
    rows = target.embed(torch.arange(0, target.config.n_vocab, 997, device=target.device))
    parts = [rows, target.output_norm.weight]
    parts += [layer.attn_norm.weight for layer in target.layers]
    for part in parts:
        digest.update(part.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


# The file


class RecordFile:
    """`conversations.jsonl`, read and then appended to; a line cut short by a crash is dropped."""

    def __init__(self, path: Path) -> None:
        """Raises `SpecdecError` for a file that cannot be read or written."""
        self.path = path
        try:
            self.records = list(read_records(path)) if path.exists() else []
            self._file = path.open("ab")
            self._file.truncate(_whole_bytes(path))
        except OSError as error:
            raise SpecdecError(f"{path}: {error.strerror}") from None

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a line that could not be written was reported
            self._file.close()

    def append(self, record: Record) -> None:
        """Writes a line. Raises `SpecdecError` if the disk is full."""
        line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise SpecdecError(f"{self.path}: {error.strerror}") from None
        self.records.append(record)


def read_records(path: Path) -> Iterator[Record]:
    """The whole lines of a file. Raises `SpecdecError` for a line that is none of ours."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Record(**json.loads(line))
            except (ValueError, TypeError):
                raise SpecdecError(f"{path}, line {number}: no conversation; remove it") from None


def _whole_bytes(path: Path) -> int:
    """Length of a file up to its last line break."""
    data = path.read_bytes()
    return data.rfind(b"\n") + 1


# Loops


def repeated(tokens: Sequence[int]) -> int:
    """How many tokens at the end repeat a period of up to 32 three times; 0 = they do not."""
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        count = max(REPEATS * period, MIN_REPEATED)
        if tokens[-1] != tokens[-1 - period] or len(tokens) < count + period:
            continue
        if tokens[-count:] == tokens[-count - period : -period]:
            return count
    return 0


def _is_looping(tokens: Sequence[int]) -> bool:
    return repeated(tokens) > 0


# Writing


@dataclass(slots=True)
class _Sample:
    """A conversation in progress."""

    serial: int
    start: Start
    greedy: bool
    is_long: bool
    """It is to have a second turn."""
    stage: Literal["prompt", "answer", "follow-up"] = "prompt"
    loop: bool = False
    tokens: list[int] = field(default_factory=list)
    """Ids up to the place of the text in progress, or all of them."""
    supervised: list[list[int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The first user turn."""
        return str(self.messages[0]["content"]) if self.messages else ""


class _Writer:
    """Turns lanes and prompts into records."""

    def __init__(self, engine: Engine, options: DataOptions, file: RecordFile) -> None:
        self._engine, self._options, self._file = engine, options, file
        self._tokenizer = engine.tokenizer
        self._source = PromptSource(Openings.load(), options.seed)
        self._filter = PromptFilter(options.excluded)
        self._serial = 1 + max((record.serial for record in file.records), default=-1)
        self._n_loops = sum(record.loop for record in file.records)
        self._n_tokens = sum(record.n_supervised for record in file.records)
        self._n_empty = 0
        self._before = file.records[-1].seconds if file.records else 0.0
        self._tokens_before = self._n_tokens
        self._began = time.perf_counter()
        self._own = list(self._unanswered())
        for record in file.records:
            self._filter.add(record.prompt)
        for record in file.records[-200:]:
            self._remember(record)
        dtype = fastest_dtype(engine.target.device)
        n_ctx = options.n_ctx
        n_lanes = _lane_count(engine.target, options.n_lanes, n_ctx, dtype)
        prefix = _common_prefix(*(encode_chat(engine, [_user(text)]) for text in "a1"))
        self._lanes = Lanes(engine.target, n_lanes, n_ctx, dtype=dtype, prefix=prefix)
        self._breaks = {
            id for id in range(self._tokenizer.n_vocab) if b"\n" in self._tokenizer.piece(id)
        }
        self._control = frozenset(self._tokenizer.control_ids)

    def run(
        self,
        report: Callable[[DataProgress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Until the budget is used up."""
        reported = 0.0
        while self.progress().fraction < 1 and not (should_stop and should_stop()):
            while self._lanes.n_free:
                self._begin()
            for text in self._lanes.step():
                self._go_on(text)
            if report is not None and time.perf_counter() - reported > 1:
                reported = time.perf_counter()
                report(self.progress())

    def progress(self) -> DataProgress:
        """How far it is."""
        options, now = self._options, time.perf_counter() - self._began
        seconds = self._before + now
        fractions = [0.0]
        if options.minutes is not None:
            fractions.append(seconds / max(60 * options.minutes, 1e-9))
        if options.n_tokens is not None:
            fractions.append(self._n_tokens / max(options.n_tokens, 1))
        return DataProgress(
            n_conversations=len(self._file.records),
            n_tokens=self._n_tokens,
            seconds=seconds,
            tokens_per_second=(self._n_tokens - self._tokens_before) / max(now, 1e-9),
            fraction=min(max(fractions), 1.0),
        )

    def break_off(self) -> None:
        """Writes down what is known of the samples in progress: whole answers and long parts."""
        for text in self._lanes.texts:
            sample: _Sample = text.request.tag
            if sample.stage == "answer" and len(text.tokens) >= MIN_KEPT:
                if not self._options.unwanted.intersection(text.tokens):
                    self._take_answer(sample, text.tokens)
            if sample.supervised:
                self._write(sample)

    # One sample

    def _unanswered(self) -> Iterator[tuple[str, bool]]:
        """The user's prompts that have no answer yet, and whether it is to be a greedy one."""
        done = {(r.prompt, r.greedy) for r in self._file.records if r.source == "user"}
        for prompt in self._options.prompts:
            for greedy in (True, False):
                if (prompt, greedy) not in done:
                    yield prompt, greedy

    def _begin(self) -> None:
        """Puts a new sample into a lane; a prompt that does not fit is passed over."""
        serial, self._serial = self._serial, self._serial + 1
        rng = random.Random(f"{self._options.seed}/sample/{serial}")
        greedy, is_long = rng.random() < 0.5, rng.random() < SECOND_TURNS
        if self._own:
            text, greedy = self._own.pop(0)
            start = Start(text, "user", "user", is_whole=True)
        else:
            start = self._source.start(serial)
        sample = _Sample(serial, start, greedy, is_long)
        if start.source == "user":
            self._ask(sample, start.text)
        elif start.is_whole:
            self._ask_new(sample, start.text)
        else:
            self._write_prompt(sample)

    def _go_on(self, text: Text) -> None:
        """The next stage of a sample whose text is finished."""
        sample: _Sample = text.request.tag
        unwanted = self._options.unwanted
        if sample.stage != "answer":
            unwanted |= self._control
        if unwanted.intersection(text.tokens[:-1]):
            return
        if sample.stage == "prompt":
            words = sample.start.text + self._tokenizer.decode(text.tokens)
            self._ask_new(sample, words.strip())
        elif sample.stage == "follow-up":
            self._ask_again(sample, self._tokenizer.decode(text.tokens).strip())
        else:
            sample.loop = text.end is End.STOPPED
            self._take_answer(sample, text.tokens)
            if sample.is_long and text.end is End.END_TOKEN and self._write_follow_up(sample):
                return
            self._write(sample)

    def _write_prompt(self, sample: _Sample) -> None:
        """Lets the model finish the user's turn."""
        start, options = sample.start, self._options
        has_text = start.text.endswith((":", "\n", '"'))
        tokens = self._tokenizer.encode_chat(user_turn(self._engine) + start.text)
        if not tokens:  # without a template: what separates texts stands before a new one
            tokens = [self._first_token()]
        limit = options.text_limit if has_text or start.kind == "code" else options.prompt_limit
        if len(tokens) + limit <= self._lanes.n_ctx:
            self._add(sample, tokens, limit, 1.0 if sample.serial % 2 else 0.7, start.text)

    def _first_token(self) -> int:
        bos = self._tokenizer.bos_id
        return bos if bos is not None else min(self._tokenizer.end_tokens, default=0)

    def _write_follow_up(self, sample: _Sample) -> bool:
        """Lets the model write the user's second turn; False if there is no room for it."""
        if self._engine.chat_template is None:
            return False
        sample.is_long = False
        turn = self._tokenizer.encode_chat(user_turn(self._engine, sample.messages))
        if turn[: len(sample.tokens)] != sample.tokens:
            return False  # the answer reads differently when it is encoded again
        limit = self._options.prompt_limit
        if len(turn) + limit + self._options.answer_limit > self._lanes.n_ctx:
            return False
        sample.stage = "follow-up"
        self._add(sample, turn, limit, 1.0, "")
        return True

    def _ask_new(self, sample: _Sample, prompt: str) -> None:
        """Asks for an answer if the prompt is good and new."""
        if self._filter.accept(prompt, sample.start.kind):
            self._ask(sample, prompt)

    def _ask(self, sample: _Sample, prompt: str) -> None:
        sample.messages = [_user(prompt)]
        tokens = encode_chat(self._engine, sample.messages)
        if len(tokens) + self._options.answer_limit > self._lanes.n_ctx:
            if sample.start.source == "user":
                log.warning("a prompt of %d tokens is too long; left out", len(tokens))
            return
        self._answer(sample, tokens)

    def _ask_again(self, sample: _Sample, prompt: str) -> None:
        """Asks for the second answer; without a usable question the sample is finished."""
        messages: list[Message] = [*sample.messages, _user(prompt)]
        tokens = encode_chat(self._engine, messages)
        fits = len(tokens) + self._options.answer_limit <= self._lanes.n_ctx
        if fits and len(prompt.split()) > 1 and tokens[: len(sample.tokens)] == sample.tokens:
            sample.messages = messages
            self._answer(sample, tokens)
        else:
            self._write(sample)

    def _answer(self, sample: _Sample, tokens: list[int]) -> None:
        sample.stage, sample.tokens = "answer", tokens
        options = self._options
        self._lanes.add(
            Request(
                tokens,
                options.answer_limit,
                self._tokenizer.end_tokens,
                temperature=0.0 if sample.greedy else options.temperature,
                top_p=options.top_p,
                seed=f"{options.seed}/answer/{sample.serial}/{len(tokens)}",
                stop=_is_looping,
                tag=sample,
            )
        )

    def _add(
        self, sample: _Sample, tokens: list[int], limit: int, temperature: float, opening: str
    ) -> None:
        """Asks for a user's turn."""

        def stop(written: Sequence[int]) -> bool:
            if written[-1] in self._control:
                return True
            return written[-1] in self._breaks and is_finished(
                opening + self._tokenizer.decode(written)
            )

        self._lanes.add(
            Request(
                tokens,
                limit,
                self._tokenizer.end_tokens,
                temperature=temperature,
                top_p=self._options.top_p,
                seed=f"{self._options.seed}/turn/{sample.serial}/{len(tokens)}",
                stop=stop,
                tag=sample,
            )
        )

    def _take_answer(self, sample: _Sample, answer: list[int]) -> None:
        """Adds what the model wrote; repeats are cut off when there are too many loops."""
        if sample.loop and self._n_loops + 1 > MAX_LOOPS * (len(self._file.records) + 1):
            answer = answer[: -repeated(answer)]
            sample.loop = False
        start = len(sample.tokens)
        sample.tokens = sample.tokens + answer
        sample.supervised.append([start, len(sample.tokens)])
        content = self._tokenizer.decode(answer)
        sample.messages = [*sample.messages, {"role": "assistant", "content": content}]

    def _write(self, sample: _Sample) -> None:
        record = Record(
            serial=sample.serial,
            prompt=sample.prompt,
            source=sample.start.source,
            kind=sample.start.kind,
            greedy=sample.greedy,
            loop=sample.loop,
            seconds=round(self._before + time.perf_counter() - self._began, 1),
            tokens=sample.tokens,
            supervised=sample.supervised,
        )
        if record.n_supervised < 2:
            self._n_empty += 1
            if self._n_empty >= MAX_EMPTY:
                raise SpecdecError(
                    f"training: {MAX_EMPTY} answers in a row are empty or one repeated piece; try "
                    "another --chat-template, or this target is not worth a draft"
                )
            return
        self._n_empty = 0
        self._file.append(record)
        self._n_loops += record.loop
        self._n_tokens += record.n_supervised
        self._remember(record)

    def _remember(self, record: Record) -> None:
        """Keeps pieces of an answer for later prompts."""
        for start, end in record.supervised:
            self._source.material.add(self._tokenizer.decode(record.tokens[start:end]))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _common_prefix(left: list[int], right: list[int]) -> list[int]:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return [token for token, _ in same]


def _lane_count(target: Target, wanted: int, n_ctx: int, dtype: torch.dtype) -> int:
    """As many lanes as are wanted and fit `LANE_BYTES`, at least two."""
    shapes = [target.cache_shape(i) for i in range(len(target.layers))]
    width = sum(s.n_head_kv * (s.head_dim + s.head_dim_v) for s in shapes)
    return max(2, min(wanted, LANE_BYTES // (width * n_ctx * dtype.itemsize)))

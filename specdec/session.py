"""Sessions: requests that share a cache, each from a prompt to the pieces of a reply.

Adds four things to `generate.decode`: tokens to text and back, stop strings, reuse of a common
prefix, statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.chat import Message
from specdec.drafters.base import FirstOf
from specdec.generate import Finish, Limits, Round, decode
from specdec.options import Options
from specdec.sampling import build_chain
from specdec.stats import Statistics
from specdec.stops import StopFilter
from specdec.verify import Verifier, synthetic_rates

if TYPE_CHECKING:
    from specdec.engine import Engine

NATIVE_ROWS = 128
"""Prompt tokens per pass of native kernels: with more they need memory and are no faster."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the reply."""

    text: str
    drafted: bool
    """Whether it came from an accepted draft token."""


@dataclass(slots=True)
class Completion:
    """A finished reply."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    """None: it was broken off."""
    statistics: Statistics = field(default_factory=Statistics)

    def as_mapping(self) -> dict[str, Any]:
        """The reply as one JSON object; ``finish_reason`` is `interrupted` if it was broken off."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": "interrupted" if self.finish is None else self.finish.value,
            "timings": self.statistics.timings(),
            "speculation": self.statistics.as_mapping(),
        }


class Session:
    """A cache with the tokens of the last request, so that a common prefix is not read twice."""

    def __init__(self, engine: Engine, drafter: FirstOf) -> None:
        self.engine = engine
        self.drafter = drafter
        self._cache = engine.new_cache()
        self._text: list[int] = []  # the cache holds its first `cache.length` tokens
        self.last = Completion()
        """The reply in progress, or the last one: also after a break."""

    def generate(self, prompt: str | Sequence[Message], **overrides: Any) -> Completion:
        """The whole reply; ``overrides`` are dotted option paths with ``.`` written ``__``."""
        for _ in self.stream(prompt, **overrides):
            pass
        return self.last

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        progress: Callable[[int, int], None] | None = None,
        on_round: Callable[[Round], None] | None = None,
        **overrides: Any,
    ) -> Generator[Chunk]:
        """The pieces of the reply as they are found; `last` holds the sums so far.

        ``progress`` is told (tokens done, tokens in all) while the prompt is read, ``on_round`` of
        every round. ``overrides`` as for `generate`.
        """
        options = self.engine.options.merge(
            {name.replace("__", "."): value for name, value in overrides.items()}
        )
        tokens = self.engine.encode(prompt, template_variables(options))
        self.last = completion = Completion()
        rounds = self._rounds(tokens, options, progress)
        text = self.engine.tokenizer.stream_decoder(special=options.generate.special)
        stops = StopFilter(options.generate.stop)
        for done in rounds:
            pieces = []
            for i, token in enumerate(done.tokens):
                visible = stops.push("" if _hidden(token, done, i) else text.push(token))
                pieces.append(Chunk(visible, i < done.accepted))
                if stops.hit:
                    done.tokens, done.finish = done.tokens[: i + 1], Finish.STOP
                    break
            completion.statistics.add(done)
            completion.token_ids += done.tokens
            completion.finish = done.finish
            completion.text += "".join(piece.text for piece in pieces)
            if on_round is not None:
                on_round(done)
            yield from (piece for piece in pieces if piece.text)
            if stops.hit:
                break
        rest = stops.push(text.finish()) + stops.finish() if not stops.hit else ""
        completion.text += rest
        if rest:
            yield Chunk(rest, drafted=False)
        if options.generate.n_predict == 0:
            completion.finish = Finish.LENGTH

    def _rounds(
        self,
        tokens: list[int],
        options: Options,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Round]:
        """The rounds of one request, which starts with what the cache holds of its prompt."""
        kept = self._reuse(tokens, options)
        verifier = self._verifier(tokens, options)
        end_tokens = self.engine.tokenizer.end_tokens
        limits = Limits(
            n_ctx=self.engine.n_ctx,
            n_predict=max(options.generate.n_predict, -1),
            end_tokens=end_tokens,
            n_batch=min(options.model.n_batch, options.model.n_ubatch, self._most_rows()),
        )
        n_prompt = len(tokens) - 1 - kept
        report = None if progress is None else lambda done: progress(done, n_prompt)
        started, statistics = time.perf_counter(), self.last.statistics
        try:
            for done in decode(
                self.engine.target, self._cache, self.drafter, verifier, tokens, limits, report
            ):
                if not statistics.rounds:
                    statistics.n_prompt = n_prompt
                    statistics.prompt_seconds = time.perf_counter() - started - done.times.total
                self._text += done.tokens
                yield done
        except (Exception, KeyboardInterrupt):
            self._text = []  # a pass was broken off: cache and drafter may disagree
            raise

    def _reuse(self, tokens: list[int], options: Options) -> int:
        """Cuts cache and drafter to what they share with a new prompt; returns that length."""
        common = _common_prefix(self._text[: self._cache.length], tokens[:-1])
        kept = self._cache.reachable(common)
        while (held := self._cache.reachable(self.drafter.begin(options.sampling, kept))) < kept:
            kept = held
        self._cache.truncate(kept)
        self._text = list(tokens)
        return kept

    def _most_rows(self) -> int:
        """Prompt tokens per pass that are of use."""
        target = self.engine.target
        return NATIVE_ROWS if target.is_row_invariant else self.engine.n_ctx

    def _verifier(self, tokens: list[int], options: Options) -> Verifier:
        engine, tokenizer = self.engine, self.engine.tokenizer
        chain = build_chain(
            options.sampling,
            n_vocab=engine.target.config.n_vocab,
            end_tokens=tokenizer.end_tokens,
            encode=lambda part: tokenizer.encode(part, add_special=False),
            token_bytes=tokenizer.piece,
        )
        chain.begin(tokens)
        rates = synthetic_rates(options.spec, self.drafter.n_max)
        return Verifier(chain, tokenizer.end_tokens, rates=rates)


def _hidden(token: int, done: Round, index: int) -> bool:
    """Whether a token is the end token that finished the reply; it is not part of the text."""
    return done.finish is Finish.STOP and index == len(done.tokens) - 1


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def template_variables(options: Options) -> dict[str, Any]:
    """What a chat template is told besides the messages."""
    chat = options.chat
    variables: dict[str, Any] = dict(chat.template_kwargs)
    if chat.reasoning != "auto":
        variables["enable_thinking"] = chat.reasoning == "on"
    if chat.reasoning_effort != "default":
        variables["reasoning_effort"] = chat.reasoning_effort
    return variables

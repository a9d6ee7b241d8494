"""`specdec generate`: from options to library calls to what is shown."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from specdec.errors import UsageError
from specdec_cli import log
from specdec_cli.flags.ignored import IGNORED_DRAFT, IGNORED_MODEL, IGNORED_TEXT
from specdec_cli.flags.model import MODEL, ROPE
from specdec_cli.flags.output import LOGGING, OUTPUT
from specdec_cli.flags.removed import REMOVED
from specdec_cli.flags.sampling import SAMPLING
from specdec_cli.flags.spec import DRAFT, NGRAM
from specdec_cli.flags.text import CHAT, PROMPT
from specdec_cli.flags.unsupported import UNSUPPORTED
from specdec_cli.given import Given
from specdec_cli.interrupts import Interrupts
from specdec_cli.prompt import has_prompt, is_conversation, read_prompt, unescape

if TYPE_CHECKING:
    from specdec.chat import Message
    from specdec.engine import Engine
    from specdec.options import Options
    from specdec.session import Completion, Session
    from specdec_cli.render import Display

messages = logging.getLogger(__name__)

PANELS = (
    *(PROMPT, MODEL, DRAFT, NGRAM, SAMPLING, CHAT, OUTPUT, LOGGING, ROPE),
    *(UNSUPPORTED, IGNORED_DRAFT, IGNORED_MODEL, IGNORED_TEXT, REMOVED),
)


def generate(given: Given) -> None:
    """Answers a prompt with the target model, speculatively and without changing its output.

    [bold]specdec generate -m target.gguf -p "Tell me a story" --spec-type ngram-simple[/bold]
    """
    options = given.options()
    log.configure(options.output)
    options, has_template = _with_recommended(given)
    converses = is_conversation(options, has_template=has_template)
    asks = converses and not has_prompt(options.generate)
    prompt = None if asks else read_prompt(options.generate)
    with Run.start(options) as run:
        if converses:
            run.converse(prompt)
        else:
            assert prompt is not None
            run.answer(prompt)


class Run:
    """A loaded engine and everything that its replies go to."""

    def __init__(self, engine: Engine, display: Display, interrupts: Interrupts) -> None:
        self.engine = engine
        self.display = display
        self._interrupts = interrupts

    @classmethod
    @contextlib.contextmanager
    def start(cls, options: Options) -> Iterator[Run]:
        """Opens the output files, loads the model, and closes both at the end."""
        from specdec_cli.render import Display

        interrupts = Interrupts()
        with interrupts.handled(), Display(options.output, interrupts) as display:
            started = time.perf_counter()
            with interrupts.deferred(), display.loading() as progress:
                from specdec.engine import Engine

                engine = Engine.load(options, progress)
            display.load_seconds = time.perf_counter() - started
            with engine:
                yield cls(engine, display, interrupts)

    def answer(self, prompt: str) -> None:
        """One reply to one prompt. Leaves with 1 when `--spec-check` finds a difference."""
        request = self.engine.options.generate
        is_chat = request.conversation
        if is_chat is None:
            is_chat = self.engine.chat_template is not None
        if self.engine.options.chat.system_prompt and not is_chat:
            messages.warning("--system-prompt is not used: the prompt goes in without a template")
        whole = self._messages(prompt) if is_chat else prompt
        if self.engine.options.output.spec_check:
            self._check(whole)
        else:
            self.display.save(self._reply(self.engine.session(), whole).text)

    def converse(self, first: str | None) -> None:
        """A conversation, in one session, so that each turn reads only what is new."""
        from specdec_cli.chat import Conversation
        from specdec_cli.console import Console

        options, session = self.engine.options, self.engine.session()
        if self.engine.chat_template is None:
            raise UsageError("--chat-template: the model file has no chat template; give one")
        console = Console(multiline=options.generate.multiline, simple=options.output.simple_io)

        def answer(messages: Sequence[Message]) -> Completion:
            try:
                return self._reply(session, messages)
            except KeyboardInterrupt:
                if not console.is_terminal:
                    raise
                return session.last

        conversation = Conversation(answer, console, options.chat.system_prompt)
        conversation.run(first, single_turn=options.generate.single_turn)
        self.display.save("".join(f"{reply}\n" for reply in conversation.replies))

    def _messages(self, prompt: str) -> list[Message]:
        from specdec.chat import Message

        system = self.engine.options.chat.system_prompt
        turns = [Message(role="system", content=system)] if system else []
        return [*turns, Message(role="user", content=prompt)]

    def _reply(self, session: Session, prompt: str | Sequence[Message]) -> Completion:
        """Streams one reply; a break at any time still shows the statistics so far."""
        self.display.prompt(self.engine, prompt)
        display = self.display
        chunks = session.stream(prompt, progress=display.prompt_progress, on_round=display.round)
        with self._interrupts.deferred():
            try:
                with contextlib.closing(chunks):
                    for chunk in chunks:
                        display.write(chunk)
            except KeyboardInterrupt:
                display.end(session.last)
                raise
            display.end(session.last)
        self._hint(session.last, is_chat=not isinstance(prompt, str))
        return session.last

    def _hint(self, completion: Completion, *, is_chat: bool) -> None:
        """Says why acceptance is low, if it is."""
        from specdec.hints import explain

        cause = explain(self.engine, completion.statistics, used_template=is_chat)
        if cause is not None:
            self.display.hint(cause)

    def _check(self, prompt: str | Sequence[Message]) -> None:
        from specdec.check import check_request

        display, session = self.display, self.engine.session()
        display.prompt(self.engine, prompt)
        with self._interrupts.deferred():
            try:
                found = check_request(
                    session,
                    prompt,
                    on_chunk=display.write,
                    on_round=display.round,
                    on_plain_round=lambda _: self._interrupts.check(),
                    progress=display.prompt_progress,
                )
            except KeyboardInterrupt:
                display.end(session.last)
                raise
            display.end(found.speculative, found)
        display.save(found.speculative.text)
        display.verdict(found, self.engine.tokenizer)
        if found.equal is False:
            raise typer.Exit(1)


def _with_recommended(given: Given) -> tuple[Options, bool]:
    """The options with the model file's own sampling values below what the user gave.

    And whether there is a chat template.
    """
    from specdec.chat import find_template
    from specdec.resources import open_target, recommended_sampling

    with open_target(given.options()) as file:
        options = given.options(recommended_sampling(file))
        has_template = options.chat.template is not None or find_template(file.metadata) is not None
    return options.merge(_unescaped(options)), has_template


def _unescaped(options: Options) -> dict[str, object]:
    if not options.generate.escape:
        return {}
    return {
        "generate.stop": tuple(unescape(text) for text in options.generate.stop),
        "sampling.dry_sequence_breakers": tuple(
            unescape(text) for text in options.sampling.dry_sequence_breakers
        ),
    }

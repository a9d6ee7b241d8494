"""`specdec generate`: from options to a library call to what is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec_cli import log
from specdec_cli.flags import Given
from specdec_cli.flags.model import MODEL, ROPE
from specdec_cli.flags.sampling import SAMPLING
from specdec_cli.flags.spec import DRAFT, NGRAM, REMOVED
from specdec_cli.flags.text import CHAT, OUTPUT, PROMPT
from specdec_cli.prompt import read_prompt, unescape

if TYPE_CHECKING:
    from specdec.chat import Message
    from specdec.engine import Engine
    from specdec.options import Options
    from specdec_cli.render import Display

PANELS = (PROMPT, MODEL, DRAFT, NGRAM, SAMPLING, CHAT, OUTPUT, ROPE, REMOVED)


def generate(given: Given) -> None:
    """Answers a prompt with the target model, speculatively and without changing its output.

    [bold]specdec generate -m target.gguf -p "Tell me a story" --spec-type ngram-simple[/bold]
    """
    options = given.options()
    log.configure(options.output.verbosity, options.output.log_file)
    prompt = read_prompt(options.generate)
    options = _with_recommended(given)
    options = options.merge(_unescaped(options))
    from specdec.engine import Engine
    from specdec_cli.render import Display

    display = Display(options.output)
    with display.loading():
        engine = Engine.load(options)
    with engine:
        _reply(engine, display, _as_messages(engine, options, prompt))


def _with_recommended(given: Given) -> Options:
    """The options with the model file's own sampling values below what the user gave."""
    from specdec.resources import open_target, recommended_sampling

    with open_target(given.options()) as file:
        return given.options(recommended_sampling(file))


def _unescaped(options: Options) -> dict[str, object]:
    if not options.generate.escape:
        return {}
    return {
        "generate.stop": tuple(unescape(text) for text in options.generate.stop),
        "sampling.dry_sequence_breakers": tuple(
            unescape(text) for text in options.sampling.dry_sequence_breakers
        ),
    }


def _as_messages(engine: Engine, options: Options, prompt: str) -> str | Sequence[Message]:
    """The prompt as a user turn if a chat template applies, else the text itself."""
    conversation = options.generate.conversation
    if conversation is None:
        conversation = engine.chat_template is not None
    if not conversation:
        return prompt
    from specdec.chat import Message

    system = options.chat.system_prompt
    turns = [Message(role="system", content=system)] if system else []
    return [*turns, Message(role="user", content=prompt)]


def _reply(engine: Engine, display: Display, prompt: str | Sequence[Message]) -> None:
    """Streams one reply; a break still shows the statistics so far."""
    session = engine.session()
    try:
        for chunk in session.stream(prompt, progress=display.prompt_progress):
            display.write(chunk)
    finally:
        display.end(session.last)

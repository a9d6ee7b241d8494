"""Where the questions of a draft's training data come from.

The user's own come first. The rest the target writes itself: after its chat template up to the
place where the user's text begins (Magpie, arXiv 2406.08464), most of them behind an opening from
`data/openings.txt`, because a small model alone asks about few things. Some openings are whole
prompts, filled with words, numbers and pieces of the target's earlier answers.
"""

from __future__ import annotations

import importlib.resources
import random
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specdec.chat import Message
from specdec.engine import Engine
from specdec.session import template_variables

Source = Literal["user", "opening", "model"]

BARE_SHARE = 0.12
"""Share of prompts that the target begins itself."""
MATERIAL = 400
"""Pieces of earlier answers that are kept for openings with a place for them."""
MIN_WORDS = 3
MAX_NON_LETTERS = 0.4
MAX_KNOWN = 0.6
"""Share of five-word sequences that a prompt may have in common with all earlier ones."""
N_GRAM = 5
SYMBOL_KINDS = ("code", "math", "format")
"""Kinds in which many characters may be no letters."""

_MARKER = "QxMarkerxQ"
_PLACE = re.compile(r"\{([a-z]+)\}")
_WHOLE = (".", "?", "!", "}")


@dataclass(frozen=True, slots=True)
class Start:
    """The beginning of a user's turn, or all of it."""

    text: str
    source: Source
    kind: str
    is_whole: bool
    """Nothing is to be added."""


@dataclass(frozen=True, slots=True)
class Openings:
    """The lines of `data/openings.txt`."""

    weights: dict[str, float]
    lines: dict[str, list[str]]
    """Kind -> openings."""
    fillers: dict[str, list[str]]
    """Name of a place -> what may stand there."""

    @classmethod
    def load(cls) -> Openings:
        """The bundled ones."""
        source = importlib.resources.files("specdec.data").joinpath("openings.txt")
        return cls.parse(source.read_text(encoding="utf-8"))

    @classmethod
    def parse(cls, text: str) -> Openings:
        """``text`` is a file as described at the top of `openings.txt`."""
        openings = cls({}, {}, {})
        current: list[str] = []
        for line in text.splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith("[="):
                current = openings.fillers.setdefault(line[2:-1], [])
            elif re.fullmatch(r"\[\w+ \d+\]", line):
                kind, weight = line[1:-1].split()
                openings.weights[kind] = float(weight)
                current = openings.lines.setdefault(kind, [])
            else:
                current.append(line.replace("\\n", "\n"))
        return openings


@dataclass(slots=True)
class Material:
    """Pieces of answers, newest last, for openings with a place for a text."""

    texts: deque[str] = field(default_factory=lambda: deque(maxlen=MATERIAL))
    sentences: deque[str] = field(default_factory=lambda: deque(maxlen=MATERIAL))
    codes: deque[str] = field(default_factory=lambda: deque(maxlen=MATERIAL))

    def add(self, answer: str) -> None:
        """Takes what is of use from an answer."""
        codes = re.findall(r"```\w*\n(.+?)```", answer, flags=re.DOTALL)
        self.codes.extend(code.strip() for code in codes if 40 <= len(code) <= 500)
        if codes:
            return
        for paragraph in answer.split("\n\n"):
            paragraph = paragraph.strip()
            if 120 <= len(paragraph) <= 600 and paragraph.endswith((".", "!", "?")):
                self.texts.append(paragraph)
            for sentence in re.findall(r"[A-Z][^.!?\n:*]{20,120}[.!?]", paragraph)[:2]:
                self.sentences.append(sentence)

    def pick(self, place: str, rng: random.Random) -> str | None:
        """A piece for a place; None if there is none yet, or no such place."""
        pool = {"text": self.texts, "sentence": self.sentences, "code": self.codes}.get(place)
        return rng.choice(pool) if pool else None


class PromptSource:
    """Begins of prompts, one after another: a serial number says all about what is drawn."""

    def __init__(self, openings: Openings, seed: int) -> None:
        self._openings = openings
        self._seed = seed
        self.material = Material()

    def start(self, serial: int) -> Start:
        """The ``serial``-th beginning."""
        rng = random.Random(f"{self._seed}/start/{serial}")
        if rng.random() < BARE_SHARE:
            return Start("", "model", "bare", is_whole=False)
        kinds = list(self._openings.weights)
        while True:
            (kind,) = rng.choices(kinds, weights=list(self._openings.weights.values()))
            line = rng.choice(self._openings.lines[kind])
            text = self._fill(line, rng)
            if text is not None:
                return Start(text, "opening", kind, is_whole=line.endswith(_WHOLE))

    def _fill(self, line: str, rng: random.Random) -> str | None:
        """The line with its places filled; None if the material lacks a piece."""
        parts = _PLACE.split(line)
        for i in range(1, len(parts), 2):
            choices = [self._filler(parts[i], rng) for _ in range(4)]
            others = [choice for choice in choices if choice not in parts]
            filler = (others or choices)[0]
            if filler is None:
                return None
            if filler[0] in "aeiou" and parts[i - 1].endswith((" a ", "A ")):
                parts[i - 1] = f"{parts[i - 1][:-1]}n "
            parts[i] = filler
        return "".join(parts)

    def _filler(self, place: str, rng: random.Random) -> str | None:
        if place == "number":
            return str(rng.randint(13, 400))
        if place == "small":
            return str(rng.randint(2, 12))
        if place == "price":
            return f"${rng.randint(1, 80)}.{rng.choice(('00', '20', '50', '75', '99'))}"
        if place in self._openings.fillers:
            return rng.choice(self._openings.fillers[place])
        return self.material.pick(place, rng)


class PromptFilter:
    """Takes prompts that are worth an answer and unlike the earlier ones."""

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        """Near copies of ``excluded`` are refused from the start."""
        self._texts: set[str] = set()
        self._grams: set[int] = set()
        for text in excluded:
            self.add(text)

    def add(self, text: str) -> None:
        """Notes a prompt as known."""
        words = _words(text)
        self._texts.add(" ".join(words))
        self._grams.update(_grams(words))

    def accept(self, text: str, kind: str) -> bool:
        """Whether a prompt of that kind is good and new; it is known from then on if it is."""
        words = _words(text)
        letters = sum(c.isalpha() or c.isspace() for c in text)
        if len(words) < MIN_WORDS or " ".join(words) in self._texts:
            return False
        if kind not in SYMBOL_KINDS and letters < (1 - MAX_NON_LETTERS) * len(text):
            return False
        grams = _grams(words)
        known = sum(gram in self._grams for gram in grams)
        if known > MAX_KNOWN * len(grams):
            return False
        self.add(text)
        return True


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _grams(words: Sequence[str]) -> list[int]:
    return [hash(tuple(words[i : i + N_GRAM])) for i in range(len(words) - N_GRAM + 1)]


def is_finished(text: str) -> bool:
    """Whether a user's turn that a model writes should end, seen from its last line break.

    It ends with its first line, unless that announces a text ("Summarise this:"): such a turn goes
    on to its next empty line, code to two of them.
    """
    body = text.lstrip()
    if "\n" not in body:
        return False
    if not body.split("\n", 1)[0].rstrip().endswith(":"):
        return True
    rest = body.split("\n", 1)[1].lstrip("\n")
    return "\n\n" in rest and "```" not in rest


def user_turn(engine: Engine, history: Sequence[Message] = ()) -> str:
    """The chat template's text up to the place where the user's next turn begins.

    Empty without a template: a model without one continues any text.
    """
    if engine.chat_template is None:
        return ""
    messages: list[Message] = [*history, {"role": "user", "content": _MARKER}]
    text = engine.chat_template.render(messages, **template_variables(engine.options))
    return text[: text.rindex(_MARKER)]


def encode_chat(engine: Engine, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to the place of the answer, as at run time."""
    if engine.chat_template is None:
        return engine.encode("\n".join(str(message["content"]) for message in messages), {})
    return engine.encode(list(messages), template_variables(engine.options))

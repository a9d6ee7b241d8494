"""Counters of a request: what was drafted, what was accepted, where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.generate import Round


@dataclass(slots=True)
class DrafterStatistics:
    """One drafter's share. Rounds in which another drafter drafted do not count."""

    drafts: int = 0
    """Rounds whose draft it made."""
    drafts_accepted: int = 0
    """Of those, with at least one accepted token."""
    drafted: int = 0
    """Tokens drafted."""
    accepted: int = 0
    """Tokens accepted."""
    accepted_at: list[int] = field(default_factory=list)
    """How often the draft's position i was accepted."""
    draft_seconds: float = 0.0

    @property
    def per_position(self) -> list[float]:
        """Share of its drafts in which position i was accepted, i = 0 ... longest accepted."""
        return [count / self.drafts for count in self.accepted_at]


@dataclass(slots=True)
class Statistics:
    """Sums over the rounds of a request.

    ``acceptance_length`` is the field's measure: tokens emitted per target pass, rounds without a
    draft included. ``mean_draft_length`` is llama.cpp's `mean len`: 1 + accepted / rounds that had
    a draft.
    """

    n_prompt: int = 0
    """Prompt tokens evaluated for this request."""
    prompt_seconds: float = 0.0
    rounds: int = 0
    emitted: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    observe_seconds: float = 0.0
    drafters: dict[str, DrafterStatistics] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Draft length -> rounds with it."""
    chose_lengths: bool = False
    """Whether some of them were chosen from measured costs."""

    def add(self, done: Round) -> None:
        """Counts one round. Accepted tokens that a limit cut off do not count."""
        accepted = min(done.accepted, len(done.tokens) - 1)
        self.rounds += 1
        self.emitted += len(done.tokens)
        self.draft_seconds += done.times.draft
        self.target_seconds += done.times.target
        self.verify_seconds += done.times.verify
        self.observe_seconds += done.times.observe
        length = len(done.draft.tokens)
        self.lengths[length] = self.lengths.get(length, 0) + 1
        self.chose_lengths |= done.draft.end == "auto"
        if not length:
            return
        mine = self.drafters.setdefault(done.draft.drafter, DrafterStatistics())
        mine.drafts += 1
        mine.drafts_accepted += accepted > 0
        mine.drafted += length
        mine.accepted += accepted
        mine.draft_seconds += done.times.draft
        mine.accepted_at += [0] * (accepted - len(mine.accepted_at))
        for position in range(accepted):
            mine.accepted_at[position] += 1

    @property
    def drafted(self) -> int:
        """Tokens drafted by all drafters."""
        return sum(one.drafted for one in self.drafters.values())

    @property
    def accepted(self) -> int:
        """Draft tokens that stand."""
        return sum(one.accepted for one in self.drafters.values())

    @property
    def generate_seconds(self) -> float:
        """Wall-clock time of all rounds."""
        return self.draft_seconds + self.target_seconds + self.verify_seconds + self.observe_seconds

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass; 0 before the first."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_draft_length(self) -> float:
        """1 + accepted / rounds with a draft; 0 without drafts."""
        drafts = sum(one.drafts for one in self.drafters.values())
        return 1.0 + self.accepted / drafts if drafts else 0.0

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens per second."""
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generate_speed(self) -> float:
        """Emitted tokens per second."""
        return self.emitted / self.generate_seconds if self.generate_seconds else 0.0

    @property
    def per_position(self) -> list[float]:
        """Acceptance per draft position over all rounds that had a draft."""
        drafts = sum(one.drafts for one in self.drafters.values())
        longest = max((len(one.accepted_at) for one in self.drafters.values()), default=0)
        sums = [0] * longest
        for one in self.drafters.values():
            for position, count in enumerate(one.accepted_at):
                sums[position] += count
        return [count / drafts for count in sums]

    def timings(self) -> Mapping[str, float]:
        """Plain numbers for JSON under llama-server's names, and where the time of rounds went."""
        predicted_ms = self.generate_seconds * 1000
        prompt_ms = self.prompt_seconds * 1000
        return {
            "prompt_n": self.n_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / self.n_prompt if self.n_prompt else 0.0,
            "prompt_per_second": self.prompt_speed,
            "predicted_n": self.emitted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / self.emitted if self.emitted else 0.0,
            "predicted_per_second": self.generate_speed,
            "draft_ms": self.draft_seconds * 1000,
            "target_ms": self.target_seconds * 1000,
            "verify_ms": self.verify_seconds * 1000,
            "observe_ms": self.observe_seconds * 1000,
        }

    def as_mapping(self) -> Mapping[str, object]:
        """Plain numbers for JSON: the `speculation` object of a result."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "per_position": self.per_position,
            "lengths": {str(length): self.lengths[length] for length in sorted(self.lengths)},
            "drafters": {
                name: {
                    "drafts": one.drafts,
                    "drafts_accepted": one.drafts_accepted,
                    "drafted": one.drafted,
                    "accepted": one.accepted,
                    "per_position": one.per_position,
                    "draft_ms": one.draft_seconds * 1000,
                }
                for name, one in self.drafters.items()
            },
        }

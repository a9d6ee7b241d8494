"""The loop, read like a specification: scripted target, scripted drafts, one fact a test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fakes import ForcedVerifier, ScriptedDrafter, ScriptedTarget

from specdec.drafters.base import FirstOf
from specdec.errors import ContextFullError
from specdec.generate import Finish, Limits, Round, decode, prefill
from specdec.options import SamplingOptions
from specdec.sampling import build_chain
from specdec.verify import Verifier

PROMPT = [5, 6, 7]
END = 31


def next_token(text: list[int]) -> int:
    """The target's text: every token is the one before plus one, modulo 30."""
    return (text[-1] + 1) % 30


def right(observed: list[int], last_token: int, room: int) -> list[int]:
    """Three right tokens."""
    return [(last_token + i) % 30 for i in (1, 2, 3)][:room]


def wrong(observed: list[int], last_token: int, room: int) -> list[int]:
    """Three wrong ones."""
    return [0, 0, 0][:room]


def two_of_three(observed: list[int], last_token: int, room: int) -> list[int]:
    return [(last_token + 1) % 30, (last_token + 2) % 30, 0][:room]


def never(observed: list[int], last_token: int, room: int) -> list[int]:
    return []


class Run:
    """A request and everything one may ask about it afterwards."""

    def __init__(
        self,
        draft: Callable[[list[int], int, int], list[int]],
        limits: Limits,
        *,
        script: Callable[[list[int]], int] = next_token,
        prompt: list[int] = PROMPT,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.target = ScriptedTarget(script)
        self.cache = self.target.new_cache(limits.n_ctx)
        self.drafter = ScriptedDrafter(draft, taps)
        self.prompt = prompt
        chain = build_chain(SamplingOptions(temp=0), n_vocab=32, end_tokens=limits.end_tokens)
        verifier = Verifier(chain, limits.end_tokens)
        self.rounds: list[Round] = []
        self.reply: list[int] = []
        for done in decode(self.target, self.cache, self.drafter, verifier, prompt, limits):
            self.rounds.append(done)
            self.reply += done.tokens
            self.check_invariants()

    def check_invariants(self) -> None:
        """Cache and drafter hold exactly the text without its last token."""
        history = [*self.prompt, *self.reply][:-1]
        held, _ = self.cache.committed(0, torch.float32)
        assert [int(value) for value in held.flatten()] == history
        assert self.drafter.observed == history

    @property
    def shape(self) -> list[tuple[int, int, int]]:
        """(drafted, accepted, kept) of every round."""
        return [(len(r.draft.tokens), r.accepted, len(r.tokens)) for r in self.rounds]


def test_all_accepted_a_round_emits_the_draft_and_a_bonus() -> None:
    run = Run(right, Limits(64, n_predict=8))
    assert run.shape == [(3, 3, 4), (3, 3, 4)]
    assert run.reply == [8, 9, 10, 11, 12, 13, 14, 15]


def test_none_accepted_a_round_emits_the_targets_own_token() -> None:
    run = Run(wrong, Limits(64, n_predict=3))
    assert run.shape == [(2, 0, 1), (1, 0, 1), (0, 0, 1)]
    assert run.reply == [8, 9, 10]


def test_two_of_three_accepted() -> None:
    run = Run(two_of_three, Limits(64, n_predict=7))
    assert run.shape == [(3, 2, 3), (3, 2, 3), (0, 0, 1)]
    assert run.reply == [8, 9, 10, 11, 12, 13, 14]


def test_no_draft_is_plain_decoding() -> None:
    run = Run(never, Limits(64, n_predict=3))
    assert run.shape == [(0, 0, 1)] * 3
    assert "accept" not in " ".join(run.drafter.calls)


def test_a_draft_is_followed_by_one_accept_and_one_observe() -> None:
    run = Run(two_of_three, Limits(64, n_predict=7))
    # The first call shows the prompt without its last token; the last round has no room to draft.
    assert run.drafter.calls == ["observe", *["draft", "accept 2", "observe"] * 2, "observe"]


def test_an_empty_draft_is_not_followed_by_an_accept() -> None:
    run = Run(lambda o, last, room: [] if len(o) < 3 else [last + 1], Limits(64, n_predict=4))
    assert run.drafter.calls[:3] == ["observe", "empty", "observe"]
    assert run.drafter.calls[3:6] == ["draft", "accept 1", "observe"]


def ends_after(n: int) -> Callable[[list[int]], int]:
    """The target ends the reply with its n-th token."""
    return lambda text: END if len(text) == len(PROMPT) + n - 1 else next_token(text)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_end_token_inside_the_block_ends_the_reply(n: int) -> None:
    """The draft goes on behind the end token; nothing behind it is emitted."""
    script = ends_after(n)

    def draft(observed: list[int], last_token: int, room: int) -> list[int]:
        text = [*observed, last_token]
        for _ in range(3):
            text.append(script(text) if text[-1] != END else 1)
        return text[-3:]

    run = Run(draft, Limits(64, end_tokens=frozenset({END})), script=script)
    assert run.reply == [*range(8, 7 + n), END]
    assert run.rounds[-1].finish is Finish.STOP
    assert run.cache.length == len(PROMPT) + n - 1


def test_an_end_token_as_the_bonus() -> None:
    run = Run(right, Limits(64, end_tokens=frozenset({END})), script=ends_after(4))
    assert run.shape == [(3, 3, 4)]
    assert run.reply == [8, 9, 10, END]
    assert run.rounds[-1].finish is Finish.STOP


def test_an_end_token_as_the_correction() -> None:
    run = Run(wrong, Limits(64, end_tokens=frozenset({END})), script=ends_after(1))
    assert (run.shape, run.reply) == ([(3, 0, 1)], [END])


@pytest.mark.parametrize("n_predict", range(1, 12))
def test_the_token_limit_is_exact(n_predict: int) -> None:
    run = Run(right, Limits(64, n_predict=n_predict))
    assert len(run.reply) == n_predict
    assert [done.finish for done in run.rounds][-1] is Finish.LENGTH
    assert all(done.finish is None for done in run.rounds[:-1])


@pytest.mark.parametrize("n_ctx", range(4, 14))
def test_the_context_is_filled_exactly(n_ctx: int) -> None:
    run = Run(right, Limits(n_ctx))
    assert len(PROMPT) + len(run.reply) == n_ctx
    assert run.rounds[-1].finish is Finish.LENGTH


def test_room_of_one() -> None:
    rooms: list[int] = []

    def draft(observed: list[int], last_token: int, room: int) -> list[int]:
        rooms.append(room)
        return [last_token + 1]

    run = Run(draft, Limits(64, n_predict=2))
    assert (rooms, run.shape) == ([1], [(1, 1, 2)])


def test_without_room_nobody_is_asked() -> None:
    run = Run(right, Limits(64, n_predict=1))
    assert "draft" not in run.drafter.calls
    assert run.rounds[0].draft.end == "room"


def test_a_draft_past_the_limit_is_cut_when_it_is_verified() -> None:
    """A drafter that ignores ``room`` cannot break the limit."""
    run = Run(lambda o, last, room: [last + 1, last + 2, last + 3], Limits(64, n_predict=2))
    assert run.shape == [(3, 3, 2)]
    assert run.drafter.calls == ["observe", "draft", "accept 1", "observe"]


def test_n_predict_of_zero_does_nothing() -> None:
    run = Run(right, Limits(64, n_predict=0))
    assert (run.rounds, run.cache.length, run.drafter.calls) == ([], 0, [])


def test_n_predict_of_minus_one_runs_to_the_end_of_the_context() -> None:
    assert len(Run(right, Limits(40, n_predict=-1)).reply) == 37


@pytest.mark.parametrize("n_ctx", [1, 2, 3])
def test_a_prompt_as_long_as_the_context_is_an_error(n_ctx: int) -> None:
    with pytest.raises(ContextFullError, match=f"3 tokens do not fit the context of {n_ctx}; "):
        Run(right, Limits(n_ctx))


def test_a_prompt_one_shorter_than_the_context_gets_one_token() -> None:
    run = Run(right, Limits(4))
    assert (run.reply, run.rounds[0].finish) == ([8], Finish.LENGTH)


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    run = Run(right, Limits(64, n_predict=4), prompt=[5])
    assert run.reply == [6, 7, 8, 9]
    assert run.drafter.calls[0] == "draft"


def test_positions_say_where_a_round_begins() -> None:
    assert [done.position for done in Run(right, Limits(64, n_predict=8)).rounds] == [3, 7]


@pytest.mark.parametrize("n_batch", [1, 2, 3, 100])
def test_the_prompt_comes_in_chunks_without_its_last_token(n_batch: int) -> None:
    prompt, done = list(range(1, 9)), []
    run = Run(never, Limits(64, n_predict=1, n_batch=n_batch), prompt=prompt)
    assert run.reply == [9]
    target, drafter = ScriptedTarget(next_token), ScriptedDrafter(never)
    prefill(target, target.new_cache(64), drafter, prompt[:-1], n_batch, done.append)
    assert drafter.observed == prompt[:-1]
    assert done == sorted({min(end, 7) for end in range(n_batch, 7 + n_batch, n_batch)})


def test_what_cache_and_drafter_hold_is_not_read_again() -> None:
    target, drafter = ScriptedTarget(next_token), ScriptedDrafter(right)
    cache = target.new_cache(64)
    prefill(target, cache, drafter, PROMPT[:2], 512)
    drafter.calls.clear()
    prompt = [*PROMPT, 9, 4]
    rounds = decode(target, cache, drafter, ForcedVerifier([3]), prompt, Limits(64))
    assert next(rounds).tokens == [5, 6, 7, 8]
    assert drafter.observed == [*prompt, 5, 6, 7]
    assert drafter.calls == ["observe", "draft", "accept 3", "observe"]


def test_a_drafter_sees_the_taps_of_the_kept_rows() -> None:
    run = Run(two_of_three, Limits(64, n_predict=4), taps=(0, 2))
    seen = torch.cat(run.drafter.hidden)
    tokens = torch.tensor(run.drafter.observed)
    assert seen.shape == (len(tokens), 2, 1)
    torch.testing.assert_close(seen[:, 0, 0], tokens * 10.0)
    torch.testing.assert_close(seen[:, 1, 0], tokens * 10.0 + 2)


def test_several_drafters_share_rounds_and_get_their_own_taps() -> None:
    """The first non-empty draft wins, is cut to ``room``, and only its author is told."""
    early = ScriptedDrafter(lambda o, last, room: [] if len(o) % 2 else [last + 1] * 9, taps=(4,))
    late = ScriptedDrafter(right, taps=(1, 4))
    both = FirstOf([early, late])
    assert both.taps == (4, 1)
    target = ScriptedTarget(next_token)
    rounds = decode(
        target, target.new_cache(64), both, ForcedVerifier([1, 2]), PROMPT, Limits(64, 6)
    )
    first, second = next(rounds), next(rounds)
    assert (first.draft.tokens, first.draft.end) == ([8] * 5, "room")
    assert early.calls == [
        "observe",
        "draft",
        "accept 1",
        "observe",
        "draft",
        "accept 2",
        "observe",
    ]
    assert late.calls == ["observe"] * 3
    assert second.draft.drafter == "scripted"
    torch.testing.assert_close(torch.cat(early.hidden)[:, 0], torch.cat(late.hidden)[:, 1])


def test_a_common_length_is_kept_by_all_drafters() -> None:
    first, second = ScriptedDrafter(right), ScriptedDrafter(right)
    first.observed, second.observed = [1, 2, 3, 4], [1, 2]
    assert FirstOf([first, second]).begin(SamplingOptions(), 4) == 2
    assert (first.observed, second.observed) == ([1, 2], [1, 2])

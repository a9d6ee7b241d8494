"""Penalties, DRY, sequence breakers and logit bias."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling import Candidates, filters
from specdec.sampling.penalties import add_bias, dry, find_breakers, penalties

V = 12


def dry_amounts(
    window: list[int],
    breakers: dict[int, tuple[tuple[int, ...], ...]] | None = None,
    *,
    allowed: int = 2,
) -> dict[int, float]:
    """What DRY subtracts with multiplier 1 and base 2."""
    flat = Candidates(np.zeros(V, np.float32))
    after = dry(flat, window, breakers or {}, multiplier=1.0, base=2.0, allowed_length=allowed)
    return {i: -x for i, x in enumerate(after.logits.tolist()) if x}


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    tokens = Candidates(np.array([2.0, -2.0, 0.0, 1.0], np.float32))
    after = penalties(tokens, [0, 1, 2, 0], repeat=2.0, frequency=0.25, presence=0.5)
    assert after.logits.tolist() == [1.0 - 1.0, -4.0 - 0.75, -0.75, 1.0]
    assert tokens.logits.tolist() == [2.0, -2.0, 0.0, 1.0]  # the caller's row stays


def test_penalties_on_survivors_find_their_tokens() -> None:
    tokens = filters.top_k(Candidates(np.arange(10, dtype=np.float32)), 3)  # 9, 8, 7
    after = penalties(tokens, [9, 1, 7, 7], repeat=1.0, frequency=1.0, presence=0.0)
    assert dict(zip(after.token_ids().tolist(), after.logits.tolist(), strict=True)) == {
        9: 8.0,
        8: 8.0,
        7: 5.0,
    }
    assert after.token_ids()[after.in_order()].tolist() == [8, 9, 7]


def test_bias_adds_and_bans() -> None:
    after = add_bias(Candidates(np.zeros(3, np.float32)), {1: 1.5, 2: float("-inf")})
    assert after.logits.tolist() == [0.0, 1.5, float("-inf")]


def test_dry_penalises_the_token_that_extends_a_repetition() -> None:
    # 1 2 has been followed by 3 before: length 2, nothing over the allowed length
    assert dry_amounts([1, 2, 3, 4, 1, 2]) == {3: 1.0}
    assert dry_amounts([1, 2, 3, 4, 5, 1, 2, 3]) == {4: 2.0}
    assert dry_amounts([1, 2, 3, 4, 5, 1, 2, 3], allowed=4) == {}
    assert dry_amounts([1, 2, 3, 1, 3, 4]) == {}


def test_dry_takes_the_longest_repetition_of_each_token() -> None:
    # 2 3 -> 5 (length 2) and 1 2 3 -> 6 (3); 2 3 -> 6 elsewhere does not lower it
    window = [2, 3, 5, 1, 2, 3, 6, 2, 3, 6, 1, 2, 3]
    assert dry_amounts(window) == {5: 1.0, 6: 2.0}


def test_dry_look_back_ends_at_a_breaker() -> None:
    window = [1, 2, 3, 4, 5, 1, 2, 3]
    assert dry_amounts(window, {1: ((),)}) == {4: 1.0}  # only 2 3 counts
    assert dry_amounts(window, {2: ((),)}) == {}  # 3 alone is below the allowed length
    assert dry_amounts(window, {4: ((),)}) == {}  # the follower is a breaker: exempt
    assert dry_amounts(window, {4: ((9,),)}) == {4: 2.0}  # it only begins one: not exempt
    assert dry_amounts(window, {1: ((2,),)}) == {}  # a breaker of two tokens
    assert dry_amounts(window, {1: ((3,),)}) == {4: 2.0}  # that breaker does not occur
    assert dry_amounts(window, {3: ((9,),)}) == {4: 2.0}  # nor is it complete at the end


def test_dry_exponent_is_capped() -> None:
    window = [1] * 400
    after = dry(
        Candidates(np.zeros(V, np.float32)), window, {}, multiplier=1.0, base=2.0, allowed_length=2
    )
    assert after.logits[1].item() == -(2.0**127)  # int(88.72 / ln 2) = 127 (float32 still holds)


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 4), st.sets(st.integers(0, 3)))
def test_dry_agrees_with_the_definition(window: list[int], allowed: int, marks: set[int]) -> None:
    limit = next((i for i, t in enumerate(reversed(window)) if t in marks), len(window))
    expected: dict[int, float] = {}
    for end in range(1, len(window)):
        common = 0
        while common < min(end, limit) and window[end - 1 - common] == window[-1 - common]:
            common += 1
        if common >= allowed and len(window) > allowed and window[end] not in marks:
            amount = 2.0 ** (common - allowed)
            expected[window[end]] = max(amount, expected.get(window[end], 0.0))
    assert dry_amounts(window, dict.fromkeys(marks, ((),)), allowed=allowed) == expected


def test_breakers_are_found_inside_and_across_tokens() -> None:
    pieces = [b"a", b"\n", b"x\n\n", b"\r", b"-", b"--", b"b-"]
    vocabulary = {piece.decode(): i for i, piece in enumerate(pieces)}

    def encode(text: str) -> list[int]:
        return [vocabulary[letter] for letter in text]

    def find(*texts: str) -> dict[int, tuple[tuple[int, ...], ...]]:
        return find_breakers(
            texts, n_vocab=len(pieces), encode=encode, token_bytes=pieces.__getitem__
        )

    assert find("\n") == {1: ((),), 2: ((),)}
    assert find("---") == {4: ((4, 4),), 5: ((4,), (4, 4)), 6: ((4, 4),)}
    assert find("", "a") == {0: ((),)}
    assert find() == {}

"""Each filter against hand cases and a straightforward numpy reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import SpecdecError
from specdec.sampling import Candidates, filters
from specdec.sampling.infill import infill

NEVER = float("-inf")


def row(*probabilities: float) -> Candidates:
    return Candidates(np.log(np.array(probabilities, np.float32)))


def ids(candidates: Candidates) -> set[int]:
    return set(candidates.token_ids().tolist())


def ranked(logits: np.ndarray) -> list[int]:
    return sorted(
        (i for i in range(len(logits)) if logits[i] > NEVER), key=lambda i: (-logits[i], i)
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def wide_row(seed: int) -> np.ndarray:
    """Flat or peaked, of so many tokens that they are narrowed down in several steps."""
    generator = np.random.default_rng(seed)
    steps = generator.integers(-9, 9, 6000) if seed % 2 else generator.normal(0, 10, 6000)
    return steps.round(int(generator.integers(0, 3)))


# steps make ties common
logit_rows = st.one_of(
    st.lists(st.integers(-20, 20), min_size=1, max_size=30),
    st.integers(0, 99).map(wide_row),
).map(lambda steps: np.array(steps, dtype=np.float32) / 4)


@given(logit_rows, st.integers(1, 40) | st.integers(1000, 7000))
def test_top_k_keeps_the_k_largest_and_lower_ids_of_equals(logits: np.ndarray, k: int) -> None:
    kept = filters.top_k(Candidates(logits), k)
    expected = sorted(ranked(logits)[:k])
    assert kept.token_ids().tolist() == expected
    assert kept.logits.tolist() == logits[expected].tolist()


@given(logit_rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_head_that_reaches_p(logits: np.ndarray, p: float) -> None:
    order = ranked(logits)
    sums = softmax(logits)[order].cumsum()
    n = min(int((sums < p).sum()) + 1, len(order))
    if abs(sums[n - 1] - p) < 1e-5 or (n > 1 and abs(sums[n - 2] - p) < 1e-5):
        return  # on the edge: rounding decides
    kept = filters.top_p(Candidates(logits), p)
    assert kept.token_ids().tolist() == sorted(order[:n])


@given(logit_rows, st.floats(0.001, 1.0))
def test_min_p_keeps_all_above_the_floor(logits: np.ndarray, p: float) -> None:
    floor = float(logits.max()) + math.log(p)
    if any(abs(float(logit) - floor) < 1e-5 for logit in logits) and p != 1.0:
        return
    kept = filters.min_p(Candidates(logits), p)
    assert ids(kept) == {i for i, logit in enumerate(logits) if logit >= floor}


@given(logit_rows, st.floats(0.1, 4.0))
def test_top_n_sigma_keeps_all_within_n_deviations(logits: np.ndarray, n: float) -> None:
    floor = float(logits.max()) - n * float(logits.astype(np.float64).std())
    if any(abs(float(logit) - floor) < 1e-4 for logit in logits):
        return
    kept = filters.top_n_sigma(Candidates(logits), n)
    assert ids(kept) == {i for i, logit in enumerate(logits) if logit >= floor}


@given(logit_rows, st.floats(0.05, 0.95))
def test_typical_keeps_the_least_surprising(logits: np.ndarray, p: float) -> None:
    order = ranked(logits)
    q = softmax(logits)[order]
    entropy = -(q * np.log(q)).sum()
    distance = np.abs(-np.log(q) - entropy)
    if np.diff(np.sort(np.unique(np.round(distance, 5)))).min(initial=1.0) < 1e-3:
        return  # near ties are ordered by rounding
    by_distance = np.argsort(np.round(distance, 4), kind="stable")
    sums = q[by_distance].cumsum()
    n = min(int((sums <= p).sum()) + 1, len(order))
    if np.abs(sums - p).min() < 1e-5:
        return
    kept = filters.typical(Candidates(logits), p)
    assert ids(kept) == {order[i] for i in by_distance[:n]}


def test_top_p_includes_the_token_that_reaches_p() -> None:
    half = row(0.5, 0.25, 0.125, 0.125)
    assert ids(filters.top_p(half, 0.5)) == {0}
    assert ids(filters.top_p(half, 0.51)) == {0, 1}
    assert ids(filters.top_p(half, 0.0)) == {0}
    assert len(filters.top_p(half, 0.99)) == 4


def test_min_p_above_one_leaves_the_best() -> None:
    assert ids(filters.min_p(row(0.6, 0.4), 1.5)) == {0}


def test_typical_can_drop_the_most_probable_token() -> None:
    # entropy 1.33 nats; surprises 0.69, 1.90, 2.08 ...: the second token is nearest
    tokens = row(0.52, 0.24, 0.12, 0.12)
    assert 0 not in ids(filters.typical(tokens, 0.2))


def test_typical_goes_on_until_p_is_exceeded() -> None:
    assert ids(filters.typical(row(0.25, 0.25, 0.25, 0.25), 0.5)) == {0, 1, 2}


def test_top_n_sigma_ignores_banned_tokens() -> None:
    logits = np.array([2.0, 1.0, 0.0, NEVER], np.float32)  # deviation 0.816
    assert ids(filters.top_n_sigma(Candidates(logits), 1.3)) == {0, 1}


def test_filters_act_on_what_is_left() -> None:
    tokens = row(0.4, 0.3, 0.2, 0.1)
    after_k = filters.top_k(tokens, 2)  # 0.57, 0.43
    assert ids(filters.top_p(after_k, 0.57)) == {0}
    assert ids(filters.top_k(filters.top_p(tokens, 0.57), 2)) == {0, 1}


def test_temperature_divides_and_zero_leaves_the_first_maximum() -> None:
    tokens = Candidates(np.array([1.0, 3.0, 3.0], np.float32))
    assert filters.temperature(tokens, 2.0).logits.tolist() == [0.5, 1.5, 1.5]
    for cold in (0.0, 1e-40):
        assert filters.temperature(tokens, cold).token_ids().tolist() == [1]


def test_dynamic_temperature_follows_the_entropy() -> None:
    flat = Candidates(np.zeros(4, np.float32))
    assert np.array_equal(filters.dynamic_temperature(flat, 1.0, 0.5, 1.0).logits, flat.logits)
    tokens = row(0.75, 0.25)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    expected = 0.5 + 1.0 * (entropy / math.log(2)) ** 2
    changed = filters.dynamic_temperature(tokens, 1.0, 0.5, 2.0)
    assert np.allclose(changed.logits, tokens.logits / expected)
    peaked = Candidates(np.array([0.0, 500.0], np.float32))
    assert filters.dynamic_temperature(peaked, 0.3, 0.5, 1.0).token_ids().tolist() == [1]


def test_xtc_drops_all_top_choices_but_the_last() -> None:
    coin = torch.Generator().manual_seed(1)
    tokens = row(0.2, 0.4, 0.3, 0.1)
    assert ids(filters.xtc(tokens, 1.0, 0.15, coin)) == {0, 3}
    assert ids(filters.xtc(tokens, 1.0, 0.35, coin)) == {0, 1, 2, 3}  # one top choice: kept
    assert ids(filters.xtc(tokens, 1.0, 0.51, coin)) == {0, 1, 2, 3}


def test_xtc_acts_with_its_probability() -> None:
    coin = torch.Generator().manual_seed(7)
    tokens = row(0.5, 0.3, 0.2)
    acted = sum(len(filters.xtc(tokens, 0.3, 0.25, coin)) == 2 for _ in range(2000))
    assert abs(acted / 2000 - 0.3) < 0.03  # three standard deviations


def test_head_skips_banned_tokens() -> None:
    logits = np.full(1000, NEVER, np.float32)
    logits[[5, 900]] = 1.0, 2.0
    assert Candidates(logits).head(40).token_ids().tolist() == [5, 900]


@pytest.mark.parametrize("value", [NEVER, float("nan")])
def test_nothing_to_choose_from_is_an_error(value: float) -> None:
    with pytest.raises(SpecdecError, match="no token is left"):
        filters.top_k(Candidates(np.full(50, value, np.float32)), 3)
    if np.isnan(value):  # a single one, wherever it is
        for place in (0, 3000, 4999):
            logits = np.zeros(5000, np.float32)
            logits[place] = value
            with pytest.raises(SpecdecError, match="no token is left"):
                filters.top_k(Candidates(logits), 3)
    with pytest.raises(SpecdecError, match="no token is left"):
        filters.min_p(Candidates(np.full(50, math.nan, np.float32)), 0.5)


@given(logit_rows, st.floats(0, 1, exclude_max=True))
def test_draw_walks_down_from_the_most_probable(logits: np.ndarray, uniform: float) -> None:
    order = ranked(logits)
    sums = softmax(logits)[order].cumsum()
    if np.abs(sums - uniform).min() < 1e-5:
        return
    expected = order[int((sums <= uniform).sum())]
    assert Candidates(logits).draw(uniform) == expected


def test_draw_looks_beyond_the_first_sorted_head() -> None:
    flat = Candidates(np.zeros(1000, np.float32))
    assert [flat.draw(u) for u in (0.0005, 0.2505, 0.4005, 1 - 2**-53)] == [0, 250, 400, 999]


def test_draw_never_ends_on_a_banned_token() -> None:
    tokens = Candidates(np.array([NEVER, math.log(0.1), math.log(0.3)], np.float32))
    assert tokens.draw(0.74) == 2
    assert tokens.draw(0.76) == 1
    assert tokens.draw(1 - 2**-53) == 1


WORDS = [b"<end>", b"return", b"ret", b"if", b"x"]


def test_infill_ends_when_the_end_is_likely() -> None:
    ends = frozenset({0})
    assert ids(infill(row(0.2, 0.5, 0.1, 0.1, 0.1), ends, WORDS.__getitem__)) == {0}


def test_infill_merges_prefixes_and_drops_unlikely_text() -> None:
    ends = frozenset({0})
    # "ret" (0.12) joins "return" (0.15 becomes 0.27); "x" is above 0.2 but below 1 / (3 + 1)
    tokens = row(0.02, 0.15, 0.12, 0.50, 0.21)
    assert ids(infill(tokens, ends, WORDS.__getitem__)) == {0, 1, 3}


def test_infill_without_clear_text_ends() -> None:
    texts = [b"<end>", *(bytes([97 + i]) for i in range(9))]
    unsure = Candidates(np.array([-9.0] + [0.0] * 9, np.float32))
    assert infill(unsure, frozenset({0}), texts.__getitem__).token_ids().tolist() == [0]
    without_end = filters.top_k(unsure, 8)
    assert infill(without_end, frozenset({0}), texts.__getitem__).token_ids().tolist() == [0]
    assert infill(without_end, frozenset(), texts.__getitem__).token_ids().tolist() == [1]

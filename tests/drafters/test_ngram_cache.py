"""ngram-cache against its rules written out as plain loops; its file, also damaged ones."""

from __future__ import annotations

import copy
import struct
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.base import FirstOf
from specdec.drafters.ngram_cache import Counts, NgramCache, load_counts, save_counts
from specdec.errors import ModelFileError
from specdec.options import SamplingOptions

SAMPLING = SamplingOptions()
LAX = ((2, 2, 1, 1), (66, 50, 50, 50))
STRICT = ((4, 3, 2, 2), (75, 66, 66, 66))


def table_of(text: list[int], sizes: range = range(1, 5)) -> Counts:
    """How often each token followed each n-gram."""
    table: Counts = {}
    for position in range(len(text)):
        for n in sizes:
            if n <= position:
                after = table.setdefault(tuple(text[position - n : position]), {})
                after[text[position]] = after.get(text[position], 0) + 1
    return table


def primary(table: Counts, limits: tuple, text: list[int], s: dict[int, int]) -> int | None:
    for n in (4, 3, 2, 1):
        c = table.get(tuple(text[-n:])) if n <= len(text) else None
        if not c:
            continue
        best, best_score = None, 0
        for token, number in c.items():
            score = number * (100 * s[token] if token in s else 1)
            if score > best_score:
                best, best_score = token, score
        total = sum(c.values())
        if total < limits[0][n - 1] or 100 * c[best] < limits[1][n - 1] * total:
            continue
        return best
    return None


def reference(h: list[int], id_last: int, dynamic: Counts, static: Counts) -> list[int]:
    text = [*h, id_last]
    context = table_of(text)
    drafted: list[int] = []
    while len(text) >= 2 and len(drafted) < 8:
        s = static.get(tuple(text[-2:]), {})
        token = primary(context, LAX, text, s)
        if token is None:
            token = primary(dynamic, STRICT, text, s)
        if token is None and s:
            best, total = max(s, key=lambda token: s[token]), sum(s.values())
            token = best if total >= 2 and 100 * s[best] >= 50 * total else None
        if token is None:
            break
        drafted.append(token)
        text.append(token)
    return drafted


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=30)
ROUNDS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=10)


@given(st.lists(st.tuples(TEXT, ROUNDS), min_size=1, max_size=3), TEXT, TEXT)
def test_against_the_rules(
    requests: list[tuple[list[int], list[tuple[int, int]]]],
    earlier: list[int],
    corpus: list[int],
) -> None:
    dynamic, static = table_of(earlier), table_of(corpus, range(2, 3))
    drafter = NgramCache(static, dynamic)
    for prompt, rounds in requests:
        drafter.begin(SAMPLING)
        h, id_last = prompt[:-1], prompt[-1]
        drafter.observe(torch.tensor(h, dtype=torch.int64), None)
        for n_accepted, token in rounds:
            expected = reference(h, id_last, dynamic, static)
            draft = drafter.draft(id_last, 1000)
            assert draft.tokens == expected
            assert draft.end == ("n_max" if len(expected) == 8 else "no match")
            assert drafter.draft(id_last, 1).tokens == expected[:1]
            block = [id_last, *expected[:n_accepted]]
            drafter.observe(torch.tensor(block), None)
            h, id_last = h + block, token


def test_every_token_is_learned_across_seams() -> None:
    """One token a round teaches as much as the whole text at once."""
    text = [1, 2, 3, 4, 1, 2, 3, 4]
    drafter = NgramCache({}, {})
    drafter.begin(SAMPLING)
    for token in text:
        drafter.observe(torch.tensor([token]), None)
    assert drafter.draft(1, 8).tokens == [2, 3, 4, 1, 2, 3, 4, 1]


def write(path: Path, *words: int) -> Path:
    path.write_bytes(struct.pack(f"={len(words)}i", *words))
    return path


def test_the_file_is_records_of_native_integers(tmp_path: Path) -> None:
    path = tmp_path / "cache.bin"
    save_counts(path, {(7, 8): {9: 3, 1: 2}, (5,): {6: 1}})
    words = [7, 8, -1, -1, 2, 9, 3, 1, 2, 5, -1, -1, -1, 1, 6, 1]
    assert path.read_bytes() == struct.pack("=16i", *words)
    assert list(tmp_path.iterdir()) == [path]
    assert load_counts(path, 10) == {(7, 8): {9: 3, 1: 2}, (5,): {6: 1}}


@given(TEXT)
def test_round_trip(text: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.bin"
        save_counts(path, table_of(text))
        loaded = load_counts(path, 4)
    assert loaded == table_of(text)
    assert [list(after) for after in loaded.values()] == [
        list(after) for after in table_of(text).values()
    ]


def test_the_first_of_equal_records_and_tokens_counts(tmp_path: Path) -> None:
    record = (1, -1, -1, -1, 2, 5, 3, 5, 9)
    path = write(tmp_path / "cache.bin", *record, 1, -1, -1, -1, 1, 7, 7)
    assert load_counts(path, 10) == {(1,): {5: 3}}


GOOD = (1, 2, -1, -1, 1, 5, 3)
HOSTILE = {
    "cut in the head": (*GOOD, 1, 2),
    "cut before the number": (*GOOD, 1, 2, -1, -1),
    "cut in the entries": GOOD[:-1],
    "no entries": (1, 2, -1, -1, 0),
    "negative number of entries": (1, 2, -1, -1, -1, 5, 3),
    "huge number of entries": (1, 2, -1, -1, 2**31 - 1, 5, 3),
    "count of zero": (1, 2, -1, -1, 1, 5, 0),
    "negative count": (1, 2, -1, -1, 1, 5, -3),
    "token beyond the vocabulary": (1, 2, -1, -1, 1, 10, 3),
    "negative token": (1, 2, -1, -1, 1, -1, 3),
    "n-gram beyond the vocabulary": (1, 10, -1, -1, 1, 5, 3),
    "negative token in the n-gram": (1, -2, -1, -1, 1, 5, 3),
    "empty n-gram": (-1, -1, -1, -1, 1, 5, 3),
    "hole in the n-gram": (1, -1, 2, -1, 1, 5, 3),
}


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, words: tuple[int, ...]) -> None:
    path = write(tmp_path / "cache.bin", *words)
    with pytest.raises(ModelFileError) as info:
        load_counts(path, 10)
    assert str(info.value).startswith(f"{path}: not a lookup cache of this model: ")
    assert "\n" not in str(info.value)


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.bin"
        path.write_bytes(data)
        try:
            load_counts(path, 10)
        except ModelFileError:
            return


def test_a_file_of_odd_size_or_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"12345")
    with pytest.raises(ModelFileError, match="5 bytes are no whole number of integers"):
        load_counts(tmp_path / "odd", 10)
    with pytest.raises(ModelFileError, match="cannot read lookup cache"):
        load_counts(tmp_path, 10)
    with pytest.raises(ModelFileError, match="cannot read lookup cache: No such file"):
        load_counts(tmp_path / "missing", 10)


def test_save_adds_every_token_once_to_the_dynamic_file(tmp_path: Path) -> None:
    path = tmp_path / "dynamic.bin"
    drafter = NgramCache({}, table_of([1, 2, 3]), path)
    session = copy.copy(drafter)
    session.begin(SAMPLING)
    session.observe(torch.tensor([4, 5]), None)
    session.draft(6, 8)
    session.begin(SAMPLING, kept=2)
    session.observe(torch.tensor([6]), None)
    FirstOf([drafter]).save()
    expected = {ngram: Counter(after) for ngram, after in table_of([1, 2, 3]).items()}
    for ngram, after in table_of([4, 5, 6]).items():
        expected[ngram] = expected.get(ngram, Counter()) + Counter(after)
    assert load_counts(path, 10) == expected
    drafter.save()
    assert load_counts(path, 10) == expected


def test_without_a_dynamic_file_nothing_is_kept(tmp_path: Path) -> None:
    drafter = NgramCache({}, {})
    drafter.observe(torch.tensor([4, 5]), None)
    drafter.save()
    assert drafter.learned == {}


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "missing folder" / "dynamic.bin"
    with pytest.raises(ModelFileError, match="cannot write lookup cache"):
        save_counts(path, {(1,): {2: 3}})

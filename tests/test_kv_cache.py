"""The cache against a plain list of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import kv_cache
from specdec.errors import CacheError
from specdec.kv_cache import CacheShape, KVCache

STEPS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), max_size=8)


@given(STEPS)
def test_append_and_truncate(steps: list[tuple[int, int]]) -> None:
    cache = KVCache([CacheShape(2, 3, 1)], 2000, device=torch.device("cpu"))
    rows: list[float] = []
    counter = 0.0
    for n_new, n_cut in steps:
        values = [counter + i for i in range(n_new)]
        counter += n_new
        k = torch.tensor(values)[:, None, None].expand(-1, 2, 3)
        held, held_v = cache.append(0, k, k[..., :1])
        cache.advance(n_new)
        rows += values
        assert held.shape == (2, len(rows), 3)
        assert held[1, :, 2].tolist() == held_v[0, :, 0].tolist() == rows
        rows = rows[: max(len(rows) - n_cut, 0)]
        cache.truncate(len(rows))
        assert cache.length == len(rows)


def test_lengths_out_of_reach() -> None:
    cache = KVCache([CacheShape(1, 1, 1)], 4, device=torch.device("cpu"))
    with pytest.raises(CacheError, match="5 rows do not fit the context of 4"):
        cache.append(0, torch.zeros(5, 1, 1), torch.zeros(5, 1, 1))
    with pytest.raises(CacheError, match="cannot truncate"):
        cache.truncate(1)


def test_room_for_what_is_known_to_come() -> None:
    shapes = [CacheShape(2, 3, 1), CacheShape(0, 0, 0, state=((2,),)), CacheShape(1, 4, 4)]
    cache = KVCache(shapes, 700, device=torch.device("cpu"))
    cache.append(0, torch.ones(5, 2, 3), torch.ones(5, 2, 1))
    cache.append(2, torch.ones(5, 1, 4), torch.ones(5, 1, 4))
    cache.advance(5)
    cache.put_state(1, 0, (torch.zeros(2),))
    for rows, capacity in ((600, 700), (9, 700), (5000, 700)):
        cache.make_room(rows)
        found = [cache.reserve(layer, 1)[0] for layer in (0, 2)]
        assert [keys.shape[1] for keys in found] == [capacity, capacity]
    buffers = [keys.data_ptr() for keys in found]
    cache.advance(600)
    assert [cache.reserve(layer, 90)[0].data_ptr() for layer in (0, 2)] == buffers
    assert cache.reserve(0, 1)[0][:, :5].eq(1).all()


def test_memory_of_replaced_buffers_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(kv_cache, "trim_memory", lambda: trimmed.append(cache.length))
    monkeypatch.setattr(kv_cache, "TRIMMED", 4 * 256 * (6 + 2) * 2)
    cache = KVCache([CacheShape(2, 3, 1)] * 2, 2000, device=torch.device("cpu"))
    for _ in range(8):
        for layer in range(2):
            cache.append(layer, torch.zeros(200, 2, 3), torch.zeros(200, 2, 1))
        cache.advance(200)
    assert trimmed[:4] == [200, 400, 400, 600]  # as soon as that much is free

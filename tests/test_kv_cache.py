"""The cache against a plain list of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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

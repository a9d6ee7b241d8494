"""Rows of a block give the same bits, whatever they stand beside and however many threads run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specdec.models.layers import activate
from specdec.models.rows import ROW_BLOCK, by_element, narrow_linear


@pytest.fixture(params=[1, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_equal_rows(found: torch.Tensor) -> None:
    for row in found[1:]:
        assert torch.equal(row, found[0])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("width", [3, 40, 1001, 9728, 14336])
def test_functions_of_elements(width: int) -> None:
    x = torch.randn(width, generator=torch.Generator().manual_seed(width)).repeat(ROW_BLOCK, 1)
    for function in (torch.sigmoid, torch.nn.functional.softplus):
        assert_equal_rows(by_element(function, x))
        torch.testing.assert_close(by_element(function, x), function(x))
    assert_equal_rows(activate(x, "silu"))
    assert_equal_rows(activate(x, "gelu_tanh"))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("height", [1, 2, 3, 5, 8])
def test_products_with_few_columns(height: int) -> None:
    random = torch.Generator().manual_seed(height)
    weight = torch.randn(height, 64, generator=random)
    for _ in range(20):
        x = torch.randn(64, generator=random).repeat(ROW_BLOCK, 1)
        assert_equal_rows(narrow_linear(x, weight))
        torch.testing.assert_close(narrow_linear(x, weight), x @ weight.T)

"""What a training changes of the process, and that it is changed back."""

from __future__ import annotations

import torch

from specdec.train.precision import fast_memory

TINY = 2.0**-140


def is_zero() -> bool:
    """Whether a number too small for a normal float32 is lost in a product."""
    return float(torch.tensor([TINY]) * 0.5) == 0.0


def test_tiny_numbers_count_again_after_a_training() -> None:
    assert not is_zero()
    with fast_memory():
        pass
    assert not is_zero()
    try:
        with fast_memory():
            assert is_zero()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not is_zero()

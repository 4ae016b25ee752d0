"""Host memory that is used again: who takes which block, and what is waited for."""

from __future__ import annotations

import torch

from megalight.parallel.host_memory import HostPool


def test_blocks_are_used_again() -> None:
    pool, waits = HostPool(torch.device("cpu")), list[str]()
    small, large = pool.take(10), pool.take(40)
    assert (small.numel(), large.numel(), pool.pinned) == (10, 40, 50)
    pool.give(large, lambda: waits.append("large"))
    pool.give(small, lambda: waits.append("small"))
    # a block may be twice as large as what it serves for, and the smallest that fits is taken
    again, other = pool.take(9), pool.take(20)
    assert again.data_ptr() == small.data_ptr()
    assert other.data_ptr() == large.data_ptr()
    assert waits == ["small", "large"]
    assert pool.pinned == 50


def test_the_oldest_block_comes_first() -> None:
    """Its last copy was made first, so the wait is short."""
    pool = HostPool(torch.device("cpu"))
    one, two = pool.take(8), pool.take(8)
    pool.give(two, None)
    pool.give(one, None)
    assert pool.take(8).data_ptr() == two.data_ptr()


def test_a_block_that_does_not_fit_stays() -> None:
    pool = HostPool(torch.device("cpu"))
    pool.give(pool.take(21), None)
    assert pool.take(10).numel() == 10
    assert pool.take(22).numel() == 22
    assert pool.take(21).numel() == 21
    assert pool.pinned == 21 + 10 + 22
    pool.clear()
    assert pool.take(21).numel() == 21
    assert pool.pinned == 21 + 10 + 22 + 21

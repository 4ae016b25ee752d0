"""Shared memory of saves, pinned for copies from a GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from megalight.checkpoint.async_save.saves import SharedMemory

pytestmark = pytest.mark.gpu


def test_copies_arrive_also_after_growing() -> None:
    memory = SharedMemory()
    for size in (1 << 20, 1 << 23):
        values = torch.arange(size, device="cuda").to(torch.uint8)
        memory.reserve(size).copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory.reserve(size), values.cpu())
    memory.close()


def test_memory_that_cannot_be_locked_is_no_error_of_training(caplog: pytest.LogCaptureFixture) -> None:
    memory = SharedMemory()
    memory.reserve(1 << 20)
    with caplog.at_level(logging.WARNING):
        memory._pin()  # CUDA refuses memory that is locked already
    assert "cannot be pinned" in caplog.text
    assert float(torch.ones(3, device="cuda").sum()) == 3
    memory._pinned = True
    memory.close()

"""The benchmark of the NVTX callback still fits the callback."""

from __future__ import annotations

from benchmarks.nvtx import microseconds_per_range


def test_a_range_is_timed() -> None:
    assert microseconds_per_range() > 0

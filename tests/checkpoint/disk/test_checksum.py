"""The checksum sees what storage does wrong."""

from __future__ import annotations

import numpy as np
import pytest

from megalight.checkpoint.disk.files import BLOCK, blocks, checksum


@pytest.mark.parametrize("size", [0, 1, 7, 8, 4095, 4096, 4097, 3 * 4096 + 5, 1 << 20])
def test_every_kind_of_change_shows(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before = checksum(data.data)
    assert len(before) == 16
    assert checksum(data.tobytes()) == before
    assert checksum(data.tobytes() + b"\0") != before
    for position in {0, size // 2, size - 1} if size else ():
        for bit in range(8):
            changed = data.copy()
            changed[position] ^= 1 << bit
            assert checksum(changed.data) != before
    if size >= 8192:
        rows, columns = data.copy(), data.copy()
        rows[:4096], rows[4096:8192] = data[4096:8192], data[:4096]
        columns[:8], columns[8:16] = data[8:16], data[:8]
        lost = data.copy()
        lost[4096:8192] = 0
        assert len({before, *(checksum(changed.data) for changed in (rows, columns, lost))}) == 4


def test_blocks_tile() -> None:
    assert list(blocks(0)) == []
    assert list(blocks(BLOCK)) == [(0, BLOCK)]
    assert list(blocks(2 * BLOCK + 3)) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 3)]


def test_the_value_is_fixed_for_ever() -> None:
    assert checksum(bytes(range(256)) * 100) == GOLDEN


GOLDEN = "8050d91a5fb8f78f"

"""Random numbers by a counter: known values, the same from all backends, and independent of each other."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from megalight.imports import has
from megalight.ops.philox import draws, exponentials


def test_are_those_of_philox() -> None:
    """The known answer of Philox4x32-10 for counters and keys of 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [hex(number) for number in draws(zero, zero, 4)[0]] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


@pytest.mark.skipif(
    not has("triton") or torch.cuda.is_available(), reason="needs triton, and no GPU (where the kernels run for real)"
)
@pytest.mark.parametrize("size", [1, 6, 5000])
def test_kernels_draw_the_same(size: int) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    module = importlib.import_module("megalight.ops.philox")
    seeds, positions = torch.tensor([0, 2**63 - 1, 3 << 31]), torch.tensor([5, 0, 2**31 + 3])
    assert torch.equal(module.triton_draws(seeds, positions, size), draws(seeds, positions, size, backend="reference"))


def test_a_row_depends_on_its_own_seed_and_position() -> None:
    seeds, positions = torch.tensor([3, 4, 3]), torch.tensor([7, 7, 8])
    rows = draws(seeds, positions, 50)
    assert torch.equal(rows[2:], draws(seeds[2:], positions[2:], 50))
    assert len({tuple(row.tolist()) for row in rows}) == 3


def test_exponentials_have_their_distribution() -> None:
    found = exponentials(torch.arange(8), torch.arange(8), 5000).double()
    assert found.min() > 0
    for least in (0.1, 1.0, 3.0):
        assert (found > least).double().mean() == pytest.approx(torch.exp(torch.tensor(-least)).item(), abs=0.01)

"""Boxes of tensors in files: right values, and no more bytes than asked for where gaps are worth it."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megalight.checkpoint import boxes
from megalight.checkpoint.disk.datafile import OpenFile
from tests.support.programs import forked

SHAPES = [(), (40,), (12, 9), (5, 1, 7), (4, 6, 3, 5)]


@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("gap", [1, 24, 1 << 30])
def test_boxes_of_every_kind(block: int, gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "BLOCK", block)
    monkeypatch.setattr(boxes, "GAP", gap)
    rng = random.Random(0)
    for shape in SHAPES:
        whole = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).view(shape)
        (tmp_path / "x").write_bytes(b"head" * 3 + whole.numpy().tobytes())
        for _ in range(20):
            ranges = [sorted(rng.sample(range(extent + 1), 2)) for extent in shape]
            expected = whole[tuple(slice(*r) for r in ranges)]
            dtype = rng.choice([torch.float32, torch.float64])
            target = torch.zeros(expected.shape, dtype=dtype)
            if rng.random() < 0.5:
                target = torch.zeros(expected.shape[::-1], dtype=dtype).permute(tuple(reversed(range(target.ndim))))
            with OpenFile(tmp_path / "x", "x", np.empty(block, np.uint8)) as file:
                boxes.read_box(file, 12, torch.float32, shape, [low for low, _ in ranges], target)
            assert torch.equal(target, expected.to(dtype))
            if gap == 1:
                assert file.count == expected.nbytes
            else:
                first, last = boxes.hull(shape, [low for low, _ in ranges], expected.shape)
                assert expected.nbytes <= file.count <= 4 * (last - first)


def test_threads_of_a_forked_process(tmp_path: Path) -> None:
    """PyTorch renews its pool of threads in each forked process, and fails if two threads are the first to ask."""
    assert forked(_fork_and_read, output=tmp_path / "none") == 0


def _fork_and_read() -> None:
    torch.set_num_threads(32)  # a large pool takes long to renew
    torch.get_num_threads()
    for _ in range(3):
        if (child := os.fork()) == 0:
            os._exit(0 if _reads_rightly() else 1)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(1)


def _reads_rightly() -> bool:
    together = threading.Barrier(boxes.THREADS)

    def read(_: str, items: Sequence[int]) -> float:
        together.wait(60)
        return float(torch.ones(100_000).add_(items[0]).sum())

    sums = boxes.in_threads(read, [(str(number), [number]) for number in range(boxes.THREADS)])
    return sums == [100_000.0 * (1 + number) for number in range(boxes.THREADS)]

"""Boxes of tensors in files: right values, and no more bytes than asked for where gaps are worth it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megalight.checkpoint import boxes
from megalight.checkpoint.disk.datafile import OpenFile

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

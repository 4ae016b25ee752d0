"""Writer and reader on chunks of many blocks in many files; a rank verifies the blocks that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint import Box, View, boxes
from megalight.checkpoint.disk import datafile, files, index, rank_files
from megalight.errors import CheckpointError

SHAPE = (37, 5, 11)


@pytest.fixture(params=[64, 72, 4096])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small blocks and files, so that small tensors have many."""
    for module in (boxes, files, datafile, index, boxes):
        monkeypatch.setattr(module, "BLOCK", request.param)
    monkeypatch.setattr(rank_files, "MAX_FILE", 3000)
    return request.param


def box(whole: Tensor, *ranges: tuple[int, int]) -> Box:
    offset = tuple(low for low, _ in ranges)
    return Box(offset, whole[tuple(slice(*r) for r in ranges)].contiguous())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_boxes_across_blocks_and_files(block: int, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randint(-100, 100, SHAPE).to(dtype)
    saved = [
        box(whole, (0, 20), (0, 5), (0, 11)),
        box(whole, (20, 37), (0, 2), (0, 11)),
        box(whole, (20, 37), (2, 5), (0, 11)),
    ]
    checkpoint.save(tmp_path / "a.ckpt", {"x": View("x", SHAPE, saved)})
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert len(opened.tensors["x"].chunks) == 3
    for ranges in (
        ((0, 37), (0, 5), (0, 11)),
        ((3, 30), (1, 4), (2, 9)),
        ((19, 21), (4, 5), (10, 11)),
        ((5, 6), (0, 5), (3, 4)),
    ):
        wanted = box(torch.zeros(SHAPE, dtype=dtype), *ranges)
        opened.fill(checkpoint.targets_of({"x": View("x", SHAPE, [wanted])}))
        assert torch.equal(wanted.data, box(whole, *ranges).data)


def test_a_rank_verifies_what_it_reads_and_no_more(block: int, tmp_path: Path) -> None:
    whole = torch.randn(1000)
    checkpoint.save(tmp_path / "a.ckpt", {"x": View("x", (1000,), [Box((0,), whole)])})
    opened = checkpoint.open(tmp_path / "a.ckpt")
    (chunk,) = opened.tensors["x"].chunks
    file = tmp_path / "a.ckpt" / chunk.file
    data = bytearray(file.read_bytes())
    data[chunk.start + 4 * 10] ^= 1
    file.write_bytes(data)
    if block < 4096:
        part = torch.zeros(1000 - block)
        opened.fill(checkpoint.targets_of({"x": View("x", (1000,), [Box((block,), part)])}))
        assert torch.equal(part, whole[block:])
    part = torch.zeros(20)
    with pytest.raises(CheckpointError, match="torn: bytes"):
        opened.fill(checkpoint.targets_of({"x": View("x", (1000,), [Box((5,), part)])}))
    assert not part.any()


def test_a_disk_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "a.ckpt", {"x": View("x", (9,), [Box((0,), torch.ones(9))])})
    opened = checkpoint.open(tmp_path / "a.ckpt")

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(datafile.os, "preadv", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        opened.fill(checkpoint.targets_of({"x": View("x", (9,), [Box((0,), torch.zeros(9))])}))


def test_what_ranks_hold_must_make_whole_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="8 of 9 elements"):
        checkpoint.save(tmp_path / "a.ckpt", {"x": View("x", (9,), [Box((1,), torch.ones(8))])})
    with pytest.raises(CheckpointError, match="complex128"):
        checkpoint.save(tmp_path / "a.ckpt", {"x": View("x", (1,), [Box((0,), torch.ones(1, dtype=torch.complex128))])})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_tensors_on_the_device(tmp_path: Path) -> None:
    whole = torch.randn(3000, 700, device="cuda", dtype=torch.bfloat16)
    checkpoint.save(tmp_path / "a.ckpt", {"x": View("x", (3000, 700), [Box((0, 0), whole)])})
    opened = checkpoint.open(tmp_path / "a.ckpt")
    again = torch.zeros_like(whole)
    opened.fill(checkpoint.targets_of({"x": View("x", (3000, 700), [Box((0, 0), again)])}))
    assert torch.equal(whole, again)
    part = torch.zeros(3000, 100, device="cuda", dtype=torch.float32)
    opened.fill(checkpoint.targets_of({"x": View("x", (3000, 700), [Box((0, 300), part)])}))
    assert torch.equal(part, whole[:, 300:400].float())

"""The format fsdp_dtensor from a GPU's memory, and by torch's own DCP back into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalight import checkpoint
from megalight.checkpoint import Box, View

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_from_a_gpu_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    # the second box has more blocks than there are buffers between GPU and disk, and is a view of memory with more
    whole = torch.randn(4117, 4097, device="cuda").to(dtype)
    boxes = [Box((0, 0), whole[:20].clone()), Box((20, 0), whole[20:])]
    checkpoint.save(
        tmp_path / "a.ckpt", {"model.weight": View("model.weight", whole.shape, boxes)}, scheme="fsdp_dtensor"
    )
    theirs = {"model": {"weight": torch.zeros_like(whole)}}
    dcp.load(theirs, checkpoint_id=tmp_path / "a.ckpt")
    assert torch.equal(theirs["model"]["weight"].view(torch.uint8), whole.view(torch.uint8))
    ours = torch.zeros_like(whole)
    checkpoint.open(tmp_path / "a.ckpt").fill(
        checkpoint.targets_of({"model.weight": View("model.weight", whole.shape, [Box((0, 0), ours)])})
    )
    assert torch.equal(ours.view(torch.uint8), whole.view(torch.uint8))

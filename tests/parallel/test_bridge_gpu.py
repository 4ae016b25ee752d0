from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.mesh import ParallelMesh
from tests.support.workers import meeting

pytestmark = pytest.mark.gpu
COUNT, ROWS, HIDDEN = 4, 3, 1 << 20


def _both_send_first(rank: int, size: int, place: str) -> None:
    """One forward, one backward in turn, many megabytes each; the host never waits for the device."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", place, rank=rank, world_size=size)
    half = size // 2
    src = ParallelMesh(half, rank, offset=0)
    bridge = BridgeCommunicator(src, ParallelMesh(half, rank, tp=half, offset=half), batch_dim={"x": 1, "id": 0})
    place = src.rank("dp") if bridge.is_source else 0
    sent = [
        {
            "x": torch.full((2, ROWS + place, HIDDEN), 1.0 + place + index, dtype=torch.bfloat16, device="cuda"),
            "id": torch.full((1,), index, device="cuda"),
        }
        for index in range(COUNT)
    ]
    outputs = []
    for steady in (False, True):  # first calls may make the host wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if steady else "default")
        if bridge.is_source:
            for message in sent:
                message["x"].requires_grad_()
            bridge.send_forward(sent[0])
            outputs = [bridge.send_forward_recv_backward(message) for message in sent[1:]]
            outputs.append(bridge.recv_backward())
        else:
            outputs = [bridge.recv_forward()]
            for _ in range(COUNT - 1):
                outputs.append(bridge.send_backward_recv_forward({"x": outputs[-1]["x"].detach() * 2}))
            bridge.send_backward({"x": outputs[-1]["x"].detach() * 2})
        bridge.finish()
        torch.cuda.set_sync_debug_mode("default")
    for index, message in enumerate(outputs):
        if bridge.is_source:
            assert message["x"].shape == (2, ROWS + place, HIDDEN)
            assert bool((message["x"] == 2 * (1 + place + index)).all())
        else:
            x = message["x"].detach()
            assert message["id"].tolist() == [index] * half
            assert x.shape[1] == sum(ROWS + replica for replica in range(half))
            assert x[1, :, -1].tolist() == [1.0 + r + index for r in range(half) for _ in range(ROWS + r)]
    dist.destroy_process_group()


def test_both_sides_may_send_first_over_nccl() -> None:
    size = min(torch.cuda.device_count(), 4) // 2 * 2
    if not size:
        pytest.skip("needs two GPUs")
    mp.spawn(_both_send_first, (size, meeting()), nprocs=size)

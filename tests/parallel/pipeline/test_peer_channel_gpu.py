"""Messages through slots on GPUs: every element arrives, whatever each rank computes meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.collectives import Message
from megalight.parallel.mesh import ParallelMesh, shared_group
from megalight.parallel.peers.memory import PeerMemory
from megalight.parallel.pipeline.p2p_communication import P2PCommunicator, PeerChannel
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu
SIZES = (1 << 10, 1 << 20, (1 << 22) + 3, 12345)
"""Elements of the messages of a run, in turn: slots grow, and are larger than what they hold."""
RUNS, MESSAGES, SLOTS = 16, 12, 3


def _values(seed: int, size: int) -> Tensor:
    return torch.arange(size, device="cuda", dtype=torch.int32) * 7 + seed * 1000003


def _exchange() -> tuple[int, int]:
    """Return the number of wrong elements on both ranks, and of messages of one direction through slots."""
    rank = dist.get_rank()
    edges = P2PCommunicator.between(ParallelMesh(2, rank, pp=2), around=False, messages="symmetric")
    work = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    out, into = (
        (edges.activations_out, edges.gradients_in) if rank == 0 else (edges.gradients_out, edges.activations_in)
    )
    assert isinstance(out, PeerChannel)
    assert isinstance(into, PeerChannel)
    for run in range(RUNS):
        size = SIZES[run % len(SIZES)]
        edges.prepare(SLOTS)
        sent: list[Message] = []
        for number in range(MESSAGES):
            seed = run * 100 + number
            for _ in range((run * number + rank) % 3):
                work @ work
            # Rank 0 begins; rank 1 answers what it has received.
            if rank == 0:
                sent.append(out.send([_values(seed, size)]))
            message = into.receive([torch.full((size,), -1, device="cuda", dtype=torch.int32)])
            for _ in range(number % 3):
                work @ work
            (found,) = message.wait()
            wrong += (found != _values(seed if rank else -seed, size)).sum()
            if rank == 1:
                sent.append(out.send([_values(-seed, size)]))
            # Its memory is used again at once.
            sent = [message for message in sent if not message.done()]
            if number % 4 == 3:
                time.sleep(0.002 * rank)
        for message in sent:
            message.wait()
    dist.all_reduce(wrong)
    return int(wrong), out._number


def _around() -> tuple[int, int]:
    """Return as above, where each rank sends to the next one, and rank 0 met with nobody before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        PeerMemory(shared_group((rank,), "alone")).reserve(SIZES[0])
    edges = P2PCommunicator.between(ParallelMesh(world, rank, pp=world), around=True, messages="symmetric")
    out, into = edges.activations_out, edges.activations_in
    assert isinstance(out, PeerChannel)
    assert isinstance(into, PeerChannel)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for run in range(RUNS):
        size = SIZES[run % len(SIZES)]
        edges.prepare(SLOTS)
        for number in range(MESSAGES):
            sent = out.send([_values(run * 100 + number + 7919 * rank, size)])
            message = into.receive([torch.full((size,), -1, device="cuda", dtype=torch.int32)])
            (found,) = message.wait()
            wrong += (found != _values(run * 100 + number + 7919 * ((rank - 1) % world), size)).sum()
            sent.wait()
    dist.all_reduce(wrong)
    return int(wrong), out._number


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    # Results are found by arguments, and each world size has its own.
    return [(_exchange, ())] if world == 2 else [(_around, ())]


def test_every_element_arrives() -> None:
    wrong, through_slots = runs_of(jobs, 2).outcome(())
    assert wrong == 0
    # Messages larger than the slots so far are plain: those of the first three runs, each the first of its size.
    assert through_slots == (RUNS - 3) * MESSAGES


@pytest.mark.parametrize("world", [3, 4, 8])
def test_around_several_gpus(world: int) -> None:
    wrong, through_slots = runs_of(jobs, world).outcome(())
    assert wrong == 0
    assert through_slots == (RUNS - 3) * MESSAGES

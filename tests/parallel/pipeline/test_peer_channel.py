"""Messages through slots: the same values as by collectives, in every schedule; who cannot have them is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import LayoutError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers.memory import BOUNDARY
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.executor import Executor
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.p2p_communication import Carry, P2PCommunicator, PeerChannel, offsets
from megalight.parallel.pipeline.schedules import Messages, PipelineOptions
from megalight.parallel.pipeline.timeline import rank_schedule_of
from megalight.types import Loss
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.parallel.pipeline.test_executor import WIDTH, Chunk
from tests.support.workers import run

ROWS = ((3, 3, 3), (3, 3, 3), (7, 1, 2, 5))
"""Rows of the micro-batches of each step: the last one has other shapes, and more of them than fit a slot."""


def _train(name: str, vpp: int, messages: Messages) -> tuple[list[Tensor], int, int]:
    """Train three steps. Return losses and gradients, how many messages went through slots, and the slots."""
    pp, rank = dist.get_world_size(), dist.get_rank()
    layout = PipelineLayout.even(pp * vpp, pp, vpp)
    chunks = [Chunk(stage.index) for stage in layout.of_rank(rank)]
    mesh = ParallelMesh(pp, rank, pp=pp)
    executor = Executor(chunks, layout, mesh, torch.device("cpu"), messages=messages)
    found: list[Tensor] = []

    def forward_step(chunk: nn.Module, batch: Tensor, carry: Carry | None) -> Carry:
        # A carry of several tensors, one without elements, and one that needs no gradient.
        x = batch if carry is None else carry["x"] * carry["twice"].to(carry["x"].dtype)
        twice = torch.full((len(x), 1), 2, dtype=torch.int16)
        return {"x": chunk(x), "none": batch.new_empty(0, 5), "twice": twice}

    def loss_step(carry: Carry, batch: Any) -> Loss:
        return Loss(carry["x"].square().sum())

    for step, rows in enumerate(ROWS):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for n in rows]
        rank_schedule = rank_schedule_of(rank, schedules.build(name, pp, vpp, len(batches)))
        losses = executor.train(rank_schedule, batches, forward_step, loss_step, lambda loss: loss.sum)
        found += [loss.sum for loss in losses]
    found += [p.main_grad.clone() for chunk in chunks for p in chunk.parameters()]
    edges = executor.edges
    channels = [edges.activations_in, edges.activations_out, edges.gradients_in, edges.gradients_out]
    memories = [line.memory for line in edges.lines]
    return (
        found,
        sum(channel._number for channel in channels if isinstance(channel, PeerChannel)),
        max((memory.slots for memory in memories if memory is not None), default=0),
    )


def _both(name: str, vpp: int) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    plain, number, _ = _train(name, vpp, "plain")
    assert number == 0
    with symmetric_on_cpu():
        through_slots, number, slots = _train(name, vpp, "auto")
    return plain, through_slots, (number, slots)


@pytest.mark.parametrize(
    ("name", "ranks", "vpp"),
    [
        ("1f1b", 2, 1),
        ("interleaved", 2, 2),
        ("zero_bubble", 3, 2),
        pytest.param("zero_bubble", 2, 1, marks=pytest.mark.full),
        ("combined", 2, 2),
    ],
)
def test_values_are_those_of_collectives(name: str, ranks: int, vpp: int) -> None:
    for rank, (plain, through_slots, (number, slots)) in enumerate(run(_both, ranks, name, vpp)):
        assert len(plain) == len(through_slots) > 0
        assert all(map(torch.equal, plain, through_slots)), rank
        # The first step has no slots yet. In the second every message fits. In the third the activations of 7 rows do
        # not, and their gradient, which travels without the other tensors, does.
        stages = ranks * vpp
        neighbors = sum(1 if stage in (0, stages - 1) else 2 for stage in range(stages) if stage % ranks == rank)
        assert number == neighbors * (3 + 3 + 3 + 4)
        assert slots >= 2


def _evaluated() -> list[Tensor]:
    """Forward passes alone, before and after slots are there; slots grow for larger messages."""
    with symmetric_on_cpu():
        rank = dist.get_rank()
        layout = PipelineLayout.even(2, 2)
        chunks = [Chunk(stage.index) for stage in layout.of_rank(rank)]
        executor = Executor(chunks, layout, ParallelMesh(2, rank, pp=2), torch.device("cpu"), messages="symmetric")
        rank_schedule = rank_schedule_of(rank, schedules.build("forward_only", 2, 1, 2))

        def forward_step(chunk: nn.Module, batch: Tensor, carry: Carry | None) -> Carry:
            return {"x": chunk(batch if carry is None else carry["x"])}

        found = []
        capacities = []
        for rows in (2, 2, 40, 40, 3):
            batches = [torch.full((rows, WIDTH), float(place), dtype=torch.float64) for place in range(2)]
            found += [carry["x"] for carry in executor.forward(rank_schedule, batches, forward_step)]
            memory = executor.edges.lines[0].memory
            capacities.append(0 if memory is None else memory.capacity)
        # Between runs, by powers of two.
        assert capacities == [0, 256, 256, 2048, 2048]
        return found


def test_slots_grow_between_runs() -> None:
    one, two = Chunk(0), Chunk(1)
    wanted = []
    for rows in (2, 2, 40, 40, 3):
        wanted += [two(one(torch.full((rows, WIDTH), float(place), dtype=torch.float64))) for place in range(2)]
    first, last = run(_evaluated, 2)
    assert first == []
    for found, expected in zip(last, wanted, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)


def test_tensors_have_places_apart() -> None:
    tensors = [torch.empty(3, dtype=torch.int8), torch.empty(0, 2), torch.empty(65, dtype=torch.float64)]
    assert offsets(tensors) == [0, BOUNDARY, 4 * BOUNDARY]
    assert offsets([]) == [0]


def _refused() -> str:
    with pytest.raises(LayoutError) as caught:
        P2PCommunicator.between(ParallelMesh(2, dist.get_rank(), pp=2), around=False, messages="symmetric")
    return str(caught.value)


def test_who_cannot_share_memory_is_told() -> None:
    for message in run(_refused, 2):
        assert "pipeline.messages='symmetric' cannot serve ranks 0 and 1: it " in message
        assert message.endswith("Set pipeline.messages='auto', which takes plain messages there.")


def test_without_a_pipeline_there_are_no_messages() -> None:
    with pytest.raises(LayoutError, match=r"messages='symmetric' with pp=1.*Raise pipeline_parallel"):
        PipelineOptions(messages="symmetric").check(1, 1, None)
    assert PipelineOptions(messages="symmetric").check(2, 1, None) == 1

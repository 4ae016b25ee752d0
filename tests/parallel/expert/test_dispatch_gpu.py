"""Experts divided over GPUs: outputs and gradients equal those of one device, whatever number of tokens a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.nn import Activation
from megalight.nn.init import initialize as initialize_whole
from megalight.nn.moe import Experts
from megalight.ops.router import Routes
from megalight.parallel.apply import parallelize
from megalight.parallel.expert import ExpertOptions
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Expert
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu
WIDTH, INNER, EXPERTS, TOP_K = 64, 96, 8, 3
TOKENS = (130, 0, 77, 1, 64, 3, 0, 200)
"""Number of tokens of each rank."""
CASES: list[tuple[int, str, dict[str, int]]] = [
    (2, "all_to_all", {"ep": 2}),
    (2, "all_gather", {"ep": 2}),
    (2, "all_to_all", {"etp": 2}),
    (4, "all_to_all", {"ep": 4}),
    (4, "all_to_all", {"ep": 2, "etp": 2}),
    (4, "all_gather", {"ep": 2, "etp": 2}),
    (2, "symmetric", {"ep": 2}),
    (2, "symmetric", {"etp": 2}),
    (4, "symmetric", {"ep": 2, "etp": 2}),
    (4, "symmetric", {"ep": 4}),
    (8, "all_to_all", {"ep": 8}),
    (8, "all_gather", {"ep": 8}),
    (8, "symmetric", {"ep": 8}),
    (8, "symmetric", {"ep": 4, "etp": 2}),
]


def stack() -> Experts:
    return Experts(EXPERTS, WIDTH, INNER, Activation("swiglu"), std=0.1, down_std=0.1)


def inputs(rank: int) -> tuple[Tensor, Routes, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    count = TOKENS[rank]
    hidden, cotangent = torch.randn(2, count, WIDTH, generator=generator).cuda()
    probs = torch.rand(count, TOP_K, generator=generator).cuda().requires_grad_()
    experts = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].cuda()
    return hidden.requires_grad_(), Routes(probs, experts), cotangent


def answers(experts: Experts, rank: int) -> list[Tensor]:
    hidden, routes, cotangent = inputs(rank)
    copies, memo = experts.dispatcher.dispatch(hidden, routes, len(experts))
    out = experts.dispatcher.combine(experts(copies), memo)
    wanted = [hidden, routes.probs, *experts.parameters()]
    return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), wanted)]


def divided(dispatcher: str, degrees: dict[str, int]) -> float:
    """The largest relative error on any rank, after two rounds: the second one uses memory again."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    root = nn.ModuleDict({"experts": stack()}).to("meta")
    specs = parallelize(root, ParallelizePlan({Experts: Expert()}), mesh, expert=ExpertOptions(dispatcher))
    materialize(root, "cuda")
    initialize(root, specs, 3)
    whole = nn.ModuleDict({"experts": stack().cuda()})
    initialize_whole(whole, 3)
    ranks = [answers(whole["experts"], rank) for rank in range(mesh.world_size)]  # type: ignore[arg-type]
    gradients = [torch.stack(parts).sum(0) for parts in zip(*(rank[3:] for rank in ranks), strict=True)]
    width, count = INNER // mesh.etp, EXPERTS // mesh.ep
    part, mine = slice(mesh.rank("etp") * width, (mesh.rank("etp") + 1) * width), slice(mesh.rank("ep") * count, None)
    up, down = gradients[0].unflatten(1, (2, INNER))[mine, :, part][:count].flatten(1, 2), gradients[1][mine][:count]
    expected = [*ranks[mesh.global_rank][:3], up, down[:, :, part]]
    errors = []
    for _ in range(2):
        found = answers(root["experts"], mesh.global_rank)  # type: ignore[arg-type]
        pairs = zip(found, expected, strict=True)
        errors += [float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs if b.numel()]
    worst = torch.tensor(max(errors), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


CAPACITY = 40


def even(rank: int) -> tuple[Tensor, Routes, Tensor]:
    """Equally many tokens on each rank."""
    generator = torch.Generator().manual_seed(rank)
    hidden, cotangent = torch.randn(2, 64, WIDTH, generator=generator).cuda()
    probs = torch.rand(64, TOP_K, generator=generator).cuda().requires_grad_()
    experts = torch.rand(64, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].cuda()
    return hidden.requires_grad_(), Routes(probs, experts), cotangent


def pass_of(experts: Experts, given: tuple[Tensor, Routes, Tensor], capacity: int) -> list[Tensor]:
    hidden, routes, cotangent = given
    copies, memo = experts.dispatcher.dispatch(hidden, routes, len(experts), capacity)
    out = experts.dispatcher.combine(experts(copies), memo)
    wanted = [hidden, routes.probs, *experts.parameters()]
    return [out.detach(), *torch.autograd.grad((out * cotangent).sum(), wanted)]


def padded(dispatcher: str, degrees: dict[str, int], capacity: int) -> float:
    """A fixed number of rows: no wait, and a CUDA graph whose replays equal eager passes."""
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), **degrees)
    root = nn.ModuleDict({"experts": stack()}).to("meta")
    options = ExpertOptions(dispatcher, equal_tokens=True)
    specs = parallelize(root, ParallelizePlan({Experts: Expert()}), mesh, expert=options)
    materialize(root, "cuda")
    initialize(root, specs, 3)
    experts: Any = root["experts"]
    given, other = even(mesh.global_rank), even(mesh.global_rank + 10)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # parameters and tokens were made there
    with torch.cuda.stream(side):
        for _ in range(3):  # loads kernels and opens communicators
            pass_of(experts, given, capacity)
        torch.cuda.synchronize()  # communicators are open on all ranks
        torch.cuda.set_sync_debug_mode("error")
        try:
            pass_of(experts, given, capacity)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = pass_of(experts, other, capacity)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            found = pass_of(experts, given, capacity)
        with torch.no_grad():  # other tokens and routes in the memory that the graph reads
            given[0].copy_(other[0])
            given[1].probs.copy_(other[1].probs)
            given[1].experts.copy_(other[1].experts)
            given[2].copy_(other[2])
        graph.replay()
    torch.cuda.synchronize()
    errors = [float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, expected, strict=True)]
    worst = torch.tensor(max(errors), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


EVEN: list[tuple[str, dict[str, int]]] = [
    ("all_to_all", {"ep": 2}),
    ("all_gather", {"ep": 2}),
    ("symmetric", {"ep": 2}),
]


def jobs(world: int) -> Sequence[tuple[Any, tuple[Any, ...]]]:
    wide = [(divided, (dispatcher, degrees)) for size, dispatcher, degrees in CASES if size == world]
    return [*wide, *((padded, (*case, CAPACITY)) for case in EVEN if world == 2)]


@pytest.mark.parametrize(("world", "dispatcher", "degrees"), CASES)
def test_outputs_and_gradients_equal_one_device(world: int, dispatcher: str, degrees: dict[str, int]) -> None:
    assert runs_of(jobs, world).outcome((dispatcher, degrees)) < 1e-4


@pytest.mark.parametrize(("dispatcher", "degrees"), EVEN)
def test_a_fixed_number_of_rows_needs_no_wait_and_can_be_recorded(dispatcher: str, degrees: dict[str, int]) -> None:
    assert runs_of(jobs, 2).outcome((dispatcher, degrees, CAPACITY)) < 1e-6

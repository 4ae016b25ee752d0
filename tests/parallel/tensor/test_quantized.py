"""Inputs and gradients gathered quantized give, bit for bit, what gathering them first gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.ops.linear import WeightGradients, deferring, linear
from megalight.ops.linear.low_precision import LowPrecision, Session, precision_of
from megalight.ops.parameter import state_of
from megalight.ops.quantize.recipes import recipe
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shared_state import SharedState
from megalight.parallel.tensor import linear as row
from megalight.parallel.tensor.linear import RowLinear, column_linear
from megalight.parallel.tensor.overlap import spec
from megalight.parallel.tensor.overlap.spec import TensorOptions
from tests.ops.test_linear import Parameter, with_main_grad
from tests.support.workers import run

IN, OUT = 32, 48


def _largest(amax: Tensor) -> None:
    dist.all_reduce(amax, dist.ReduceOp.MAX)


def _weight(name: str, session: Session) -> Parameter:
    weight = with_main_grad(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    state_of(weight).precision = LowPrecision(
        recipe(name), session, emulate=True, margin=int(recipe(name).one_scale), reduce_history=_largest
    )
    return weight


def _compare(name: str, dim: int, shape: tuple[int, ...], wait: bool, kept: bool = False) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = SharedState(ParallelMesh(size, rank, tp=size), True, dim, tensor=TensorOptions(keep_gathered=kept))
    generator = torch.Generator().manual_seed(1)
    sent: list[torch.dtype] = []
    saved: list[Tensor] = []
    gather = row.start_all_gather

    sessions = Session(), Session()
    ours, theirs = (_weight(name, session) for session in sessions)
    found: dict[str, Any] = {"equal": []}

    def watched(x: Tensor, *args: Any) -> Any:
        sent.append(x.dtype)
        return gather(x, *args)

    row.start_all_gather = spec.start_all_gather = watched
    try:
        for step in range(3):
            whole = (
                torch.randn(shape, generator=generator, dtype=torch.float64)
                * torch.logspace(-2, 0, shape[dim])[(slice(None),) + (None,) * (len(shape) - 1 - dim)]
            )
            grad_y = torch.randn(*shape[:-1], OUT, generator=generator, dtype=torch.float64)
            x = whole.chunk(size, dim)[rank].clone().requires_grad_()
            expected_x = whole.clone().requires_grad_()
            for weight in (ours, theirs):
                weight.main_grad.zero_()
            queue = WeightGradients()
            with sessions[0].step(step), deferring(queue) if wait else torch.enable_grad():
                keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
                with keep:
                    y = column_linear(x, ours, None, shared)
                y.backward(grad_y)
                queue.run()
            with sessions[1].step(step):
                expected = linear(expected_x, theirs)
                expected.backward(grad_y)
            assert expected_x.grad is not None
            summed = expected_x.grad * size  # every rank has the same weight
            found["equal"] += [
                torch.equal(y, expected),
                torch.allclose(x.grad, summed.chunk(size, dim)[rank], rtol=1e-12),
                torch.equal(ours.main_grad, theirs.main_grad),
            ]
    finally:
        row.start_all_gather = spec.start_all_gather = gather
    found["sent"] = set(sent)
    found["saved"] = max(t.nbytes for t in saved)
    return found


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    ("dim", "shape", "wait", "kept"),
    [(0, (22, IN), False, False), (1, (3, 10, IN), True, False), (0, (22, IN), False, True)],
)
def test_quantized_values_of_shares_are_shares_of_the_quantized_values(
    name: str, dim: int, shape: tuple[int, ...], wait: bool, kept: bool
) -> None:
    for found in run(_compare, 2, name, dim, shape, wait, kept):
        assert all(found["equal"]), found["equal"]
        assert found["sent"] == {torch.uint8}
        assert found["saved"] == torch.Size(shape).numel() // (1 if kept else 2)  # a byte for each element kept


def test_other_recipes_gather_the_input() -> None:
    for found in run(_compare, 2, "rowwise", 0, (32, IN), False):
        assert all(found["equal"])
        assert found["sent"] == {torch.float64}


def _gradients(name: str, dim: int, shape: tuple[int, ...], wait: bool) -> dict[str, Any]:
    """A layer that sums over ranks, with its gradient gathered quantized, and gathered before it is cast."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = SharedState(ParallelMesh(size, rank, tp=size), True, dim)
    tokens = tuple(n // size if d == dim else n for d, n in enumerate(shape[:-1]))
    ways: list[dict[str, Any]] = []
    gather_gradient = row.gather_gradient
    for gathering in (gather_gradient, lambda *_: None):
        session, draws = Session(), torch.Generator().manual_seed(rank)
        layer = RowLinear(_weight(name, session), None, shared)
        way: dict[str, Any] = {"values": [], "sent": []}
        gather = row.start_all_gather

        def watched(x: Tensor, *args: Any, way: dict[str, Any] = way, gather: Any = gather) -> Any:
            way["sent"].append((x.dtype, x.nbytes))
            return gather(x, *args)

        row.start_all_gather = spec.start_all_gather = watched
        row.gather_gradient = gathering
        try:
            for step in range(3):
                x = torch.randn(shape, generator=draws, dtype=torch.float64).requires_grad_()
                grad_y = torch.randn(*tokens, OUT, generator=draws, dtype=torch.float64) * (rank + 1)
                layer.weight.main_grad.zero_()
                queue = WeightGradients()
                with session.step(step), deferring(queue) if wait else torch.enable_grad():
                    y = layer(x)
                    y.backward(grad_y)
                    queue.run()
                history = precision_of(layer.weight).history
                past = torch.zeros(()) if history is None else history.past
                way["values"] += [y.detach(), x.grad, layer.weight.main_grad.clone(), past.clone()]
        finally:
            row.start_all_gather = spec.start_all_gather = gather
            row.gather_gradient = gather_gradient
        ways.append(way)
    ours, theirs = ways
    return {
        "equal": [torch.equal(a, b) for a, b in zip(ours["values"], theirs["values"], strict=True)],
        "there": all(bool(value.isfinite().all()) for value in ours["values"]),
        "sent": ours["sent"],
        "instead of": theirs["sent"],
    }


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    ("ranks", "dim", "shape", "wait"),
    [(2, 0, (22, IN), False), (4, 1, (3, 20, IN), True)],
)
def test_gradients_travel_quantized(name: str, ranks: int, dim: int, shape: tuple[int, ...], wait: bool) -> None:
    for found in run(_gradients, ranks, name, dim, shape, wait):
        assert found["there"]
        assert all(found["equal"]), found["equal"]
        elements = torch.Size(shape[:-1]).numel() // ranks * OUT
        assert found["sent"] == [(torch.uint8, elements)] * 3
        assert found["instead of"] == [(torch.float64, 8 * elements)] * 3


def test_other_recipes_gather_gradients_in_their_dtype() -> None:
    for found in run(_gradients, 2, "rowwise", 0, (32, IN), False):
        assert all(found["equal"])
        assert {dtype for dtype, _ in found["sent"]} == {torch.float64}

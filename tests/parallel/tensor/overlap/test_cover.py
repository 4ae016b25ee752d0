"""Weight gradients that wait for messages: when they are computed, and that they are those of the plain way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.parallel.apply import parallelize
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.parallel.tensor.overlap import pipelined
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.parallel.tensor.overlap.symmetric import Cover
from tests.parallel.peers.shared_files import symmetric_on_cpu
from tests.parallel.test_apply import BASE, batch, jitter, twin
from tests.support.workers import run


class _Then(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], object]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.then()
        return grad, None


def backward(*steps: Callable[[], object]) -> None:
    """Run a backward pass of these steps, in this order."""
    with torch.enable_grad():
        y = torch.zeros(1, requires_grad=True)
        for step in reversed(steps):
            y = _Then.apply(y, step)  # type: ignore[no-untyped-call]
        y.sum().backward()


class Log:
    """What a cover computes, and when."""

    def __init__(self) -> None:
        self.cover, self.events = Cover(), []  # type: ignore[var-annotated]

    def put_off(self, name: str, seconds: float) -> Callable[[], None]:
        return lambda: self.cover.put_off(seconds, lambda: self.events.append(name))

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.events.append(name)

    def under(self, seconds: float) -> Callable[[], None]:
        return lambda: self.cover.under(seconds)


def test_a_gradient_waits_for_the_next_message_or_the_end() -> None:
    log = Log()
    backward(log.put_off("a", 2.0), log.note("product"), log.under(1.0), log.put_off("b", 3.0), log.note("last"))
    assert log.events == ["product", "a", "last", "b"]
    assert log.cover.seconds == 0


def test_a_long_message_takes_the_next_gradient_too() -> None:
    log = Log()
    backward(log.put_off("a", 1.0), log.under(1.5), log.put_off("b", 3.0), log.note("last"), log.put_off("c", 1.0))
    assert log.events == ["a", "b", "last", "c"]


def test_the_older_one_comes_first() -> None:
    log = Log()
    backward(log.put_off("a", 1.0), log.put_off("b", 1.0), log.note("last"))
    assert log.events == ["a", "last", "b"]


def test_a_pass_inside_of_another_has_its_own() -> None:
    log = Log()
    inner = lambda: backward(log.put_off("inner", 1.0), log.note("last inner"))  # noqa: E731
    backward(log.put_off("outer", 1.0), inner, log.note("last outer"))
    assert log.events == ["last inner", "inner", "last outer", "outer"]


def test_a_pass_that_fails_leaves_nothing() -> None:
    log = Log()
    held = torch.zeros(3)
    alive = weakref.ref(held)

    def put_off(held: Tensor = held) -> None:
        log.cover.put_off(1.0, held.sum)

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        backward(put_off, fail)
    del held, put_off
    gc.collect()
    assert alive() is None
    backward(log.put_off("next", 1.0))
    assert log.events == ["next"]


KINDS = [RecomputeOptions(), RecomputeOptions(granularity="full", num_layers=2)]


def covered(size: int, links: float) -> list[str]:
    """Gradients of three micro-batches, with messages that are hidden by one weight gradient or by none.

    Replicas have other tokens, and sum their gradients bucket by bucket while the last pass runs.
    """
    mesh = ParallelMesh(dist.get_world_size(), dist.get_rank(), tp=size)
    first = 3 * mesh.rank("dp")
    attention = AttentionConfig(qk_norm=True, qkv_bias=True, proj_bias=True)
    whole = twin(GPTConfig(**BASE, num_kv_heads=2, attention=attention, mlp_bias=True))
    jitter(whole)
    tokens, labels, _, sequences = batch(101, [7, 1, 5, 8], size)

    def gradients(tensor: TensorOptions, recompute: RecomputeOptions) -> dict[str, Any]:
        model = copy.deepcopy(whole)
        specs = parallelize(model, gpt_plan(model), mesh, sequence_parallel=True, tensor=tensor)
        apply_recompute(model, recompute)
        infos = [ParamInfo(name, p, specs[name], 0) for name, p in model.named_parameters()]
        engine = DataParallelEngine(infos, mesh, DataParallelOptions(bucket_size=1))
        engine.zero_grad()
        with engine.micro_batches(3):
            for index in range(3):
                model((tokens + first + index) % 101, sequences, labels).losses.sum().backward()
        engine.finish_grad_sync()
        # The sums over replicas of this rank's part of each parameter.
        return {
            each.infos[0].name: sums for each, sums in zip(engine.buckets, engine.main_gradients.values, strict=True)
        }

    wanted = gradients(TensorOptions(overlap="plain"), RecomputeOptions())
    waited: list[float] = []
    put_off = Cover.put_off

    def noted(self: Cover, seconds: float, compute: Callable[[], Any]) -> None:
        put_off(self, seconds, compute)
        waited.append(self.seconds)

    wrong = []
    with (
        symmetric_on_cpu(),
        patch.object(pipelined, "LINK", links),
        patch.object(pipelined, "LATENCY", 1 / links),
        patch.object(Cover, "put_off", noted),
    ):
        for recompute in KINDS:
            waited.clear()
            found = gradients(TensorOptions(overlap="symmetric", pieces=size), recompute)
            assert len(waited) == 3 * 8  # qkv, proj, gate and up, down in two layers
            assert any(waited)
            for name, gradient in wanted.items():
                error = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6))
                wrong += [f"{recompute.granularity} {name}: {error:.1e}"] * (not error < 1e-12)
    return wrong


@pytest.mark.parametrize("links", [1e3, pytest.param(1e30, marks=pytest.mark.full)], ids=["slow", "fast"])
@pytest.mark.parametrize(
    ("tp", "dp"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.full), pytest.param(2, 2, marks=pytest.mark.full)]
)
def test_gradients_are_those_of_the_plain_way(tp: int, dp: int, links: float) -> None:
    assert run(covered, tp * dp, tp, links) == [[]] * (tp * dp)

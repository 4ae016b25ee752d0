"""The first gradient of a step is written, the others are added, and what none reaches is zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.ops import use_backends
from megalight.ops.cross_entropy import linear_cross_entropy
from megalight.ops.linear import WeightGradients, deferring, linear
from megalight.ops.parameter import state_of
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.mesh import ParallelMesh
from tests.parallel.data_parallel.helpers import assert_close, infos, mesh
from tests.parallel.data_parallel.stale import stale_gradients
from tests.support.workers import run

WIDTH, VOCABULARY = 5, 11


class Branches(nn.Module):
    """A tied embedding, fused and autograd's own gradients, a weight used twice, and branches that rest at times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.head_bias = nn.Parameter(torch.randn(VOCABULARY))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, WIDTH)
        self.plain = nn.Parameter(torch.randn(WIDTH))
        self.none = nn.Parameter(torch.randn(0, WIDTH))

    def forward(self, tokens: Tensor, branches: str) -> Tensor:
        hidden = self.norm(self.table[tokens])
        for _ in range(2):
            hidden = torch.tanh(linear(hidden, self.twice.weight, self.twice.bias))
        if "f" in branches:
            hidden = hidden + linear(hidden, self.fused.weight, self.fused.bias)
        if "p" in branches:
            hidden = hidden * self.plain
        hidden = hidden + self.none.sum()
        return linear_cross_entropy(hidden, self.table, tokens.roll(1), bias=self.head_bias).sum()


def models(dtype: torch.dtype = torch.float64) -> tuple[Branches, Branches]:
    torch.manual_seed(3)
    model = Branches().to(dtype)
    return model, copy.deepcopy(model)


def draw(step: int, replicas: int, micro: int) -> Tensor:
    """Tokens ``[replicas, micro, 6]``."""
    return torch.randint(0, VOCABULARY, (replicas, micro, 6), generator=torch.Generator().manual_seed(step))


def expect(reference: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.named_parameters()}


def reduced(engine: DataParallelEngine) -> dict[str, tuple[Tensor, int, int]]:
    """What this rank holds of each sum, and which elements of the whole that is."""
    found = {}
    for shard, gradient in zip(engine.shards, engine.main_gradients.values, strict=True):
        for piece, first, last, start in shard.intervals():
            found[piece.name] = gradient[start : start + last - first], first, last
    return found


def check(engine: DataParallelEngine, reference: nn.Module, tolerance: float = 1e-12) -> None:
    expected = expect(reference)
    for name, (part, first, last) in reduced(engine).items():
        wanted = expected[name].flatten()[first:last].double()
        assert (part.double() - wanted).norm() <= tolerance * (1 + wanted.norm()), name
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    assert_close(engine.grad_norm(), norm, max(tolerance, 1e-9))


PATTERNS = (("fp", "fp"), ("f", "fp"), ("", ""), ("fp", ""), ("p", "f"))
"""Branches of the micro-batches of five steps."""


def branches(level: str, dtype: torch.dtype, late: bool) -> None:
    run_branches(mesh(), level, dtype, late)


def run_branches(
    grid: ParallelMesh, level: str, dtype: torch.dtype, late: bool, device: str = "cpu", backend: str = "auto"
) -> None:
    """Five steps, each against torch alone; ``late``: weight gradients come after all passes, by ``backend``."""
    world, rank = grid.world_size, grid.global_rank
    model, reference = (each.to(device) for each in models(dtype))
    engine = DataParallelEngine(
        infos(model), grid, DataParallelOptions(level=level, bucket_size=40, overlap_grad_reduce=not late)
    )
    for step, pattern in enumerate(PATTERNS):
        tokens, queue = draw(step, world, len(pattern)).to(device), WeightGradients()
        with stale_gradients():
            engine.zero_grad()
        use_backends(weight_gradient=backend)
        with engine.micro_batches(len(pattern)):
            for batch, which in zip(tokens[rank], pattern, strict=True):
                with deferring(queue):
                    model(batch, which).backward()
                if not late:
                    queue.run()
            queue.run()
        use_backends(weight_gradient="auto")
        assert all(parameter.grad is parameter.main_grad for parameter in model.parameters())
        engine.finish_grad_sync()
        reference.zero_grad()
        for replica in tokens:
            for batch, which in zip(replica, pattern, strict=True):
                reference.double()(batch, which).backward()
        check(engine, reference, 1e-12 if dtype == torch.float64 else 3e-2)


def begun() -> tuple[nn.Module, DataParallelEngine]:
    """A model at the beginning of a step, with rubbish for gradients."""
    model, _ = models()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    with stale_gradients():
        engine.zero_grad()
    return model, engine


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("level", ["no_shard", "optim"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_kind_of_gradient(world: int, level: str, late: bool) -> None:
    """With weight gradients at once, and all of them after the passes."""
    run(branches, world, level, torch.float64, late)


def test_half_parameters_with_wide_sums() -> None:
    run_branches(ParallelMesh(), "optim", torch.bfloat16, False)


def test_later_windows_add() -> None:
    """What the first passes leave out, and the next ones reach, begins from zero."""
    model, reference = models()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    for step in range(3):
        with stale_gradients():
            engine.zero_grad()
        reference.zero_grad()
        for window, branches in enumerate(("f", "p", "fp")):
            (tokens,) = draw(10 * step + window, 1, 2)
            assert engine.main_gradients.first == (window == 0)
            with engine.micro_batches(2, reduce=window == 2):
                for batch in tokens:
                    model(batch, branches).backward()
                    reference(batch, branches).backward()
        engine.finish_grad_sync()
        check(engine, reference)


def test_nothing_is_set_to_zero_but_what_is_left_over() -> None:
    model, engine = begun()
    buffers = {name: p.main_grad for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert all(buffer.isnan().all() for buffer in buffers.values())
    with engine.micro_batches(1):
        model(draw(0, 1, 1)[0, 0], "f").backward()
        assert buffers["plain"].isnan().all()
    assert not buffers["plain"].any()
    assert all(bucket.grads.isfinite().all() for bucket in engine.buckets), "nor are gaps between parameters"


def test_a_step_without_passes_is_zero() -> None:
    _, engine = begun()
    engine.finish_grad_sync()
    assert float(engine.grad_norm()) == 0.0


def test_an_overflow_is_gone_with_its_step() -> None:
    """Scaling by what is not finite reaches gaps and all."""
    model, reference = models()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    (batch,) = draw(0, 1, 1)[0]
    for factor in (float("nan"), float("inf"), 1.0):
        engine.zero_grad()
        with engine.micro_batches(1):
            model(batch, "f").backward()
        engine.finish_grad_sync()
        engine.scale_gradients(torch.tensor(factor))
    reference(batch, "f").backward()
    check(engine, reference)


def test_no_tokens_give_zeros() -> None:
    model, engine = begun()
    with engine.micro_batches(1):
        model(torch.zeros(0, dtype=torch.long), "fp").backward()
    engine.finish_grad_sync()
    assert float(engine.grad_norm()) == 0.0


def test_some_are_only_added_to() -> None:
    """For passes that are recorded once: the others are written as before."""
    model, reference = models()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    for step in range(3):
        with stale_gradients():
            engine.zero_grad()
        if step == 1:  # in the midst of a step
            engine.main_gradients.only_add([*model.fused.parameters(), nn.Parameter(torch.zeros(3))])
        elif step == 2:
            assert not model.fused.weight.main_grad.any()  # type: ignore[union-attr]
            assert model.twice.weight.main_grad.isnan().all()  # type: ignore[union-attr]
        reference.zero_grad()
        with engine.micro_batches(2):
            for batch in draw(step, 1, 2)[0]:
                model(batch, "fp").backward()
                reference(batch, "fp").backward()
        engine.finish_grad_sync()
        check(engine, reference)


@pytest.mark.parametrize("window", [0, 1])
def test_passes_that_never_reached_the_device_are_forgotten(window: int) -> None:
    """As where a recording fails: sums of earlier passes stay, and without any the next gradient is written."""
    model, reference = models()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    (batches,) = draw(0, 1, 2)
    with stale_gradients():
        engine.zero_grad()
    for number, batch in enumerate(batches):
        reference(batch, "f").backward()
        first = engine.main_gradients.first
        if number == window:
            kept = [bucket.grads.clone() for bucket in engine.buckets]
            with engine.micro_batches(1, reduce=False):
                model(batch, "fp").backward()
            for bucket, grads in zip(engine.buckets, kept, strict=True):
                bucket.grads.copy_(grads)
            engine.main_gradients.give_up(first)
        with engine.micro_batches(1, reduce=number == 1):
            model(batch, "f").backward()
    engine.finish_grad_sync()
    check(engine, reference)


class Silent(torch.autograd.Function):
    """Tells autograd of a weight, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


def _silent() -> list[bool]:
    """Whether buckets were sent while the passes of each of three steps ran."""
    model = nn.Bilinear(3, 3, 3, bias=True)
    engine = DataParallelEngine(infos(model), mesh(), DataParallelOptions(bucket_size=1))
    early = []
    for _ in range(3):
        with stale_gradients():
            engine.zero_grad()
        with engine.micro_batches(1):
            Silent.apply(model.bias.sum(), model.weight).backward()  # type: ignore[no-untyped-call]
            early.append(all(bucket.sent for bucket in engine.buckets))
        engine.finish_grad_sync()
        assert float(engine.grad_norm()) == pytest.approx(2 * 3**0.5)
    return early


def test_an_arrival_of_nothing_is_zero() -> None:
    """Also in buckets that are sent while the passes run."""
    assert run(_silent, 2) == [[False, True, True]] * 2


class Careless(torch.autograd.Function):
    """Adds to what a main gradient happens to hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.weight.main_grad.add_(1.0)
        state_of(ctx.weight).mark_grad_ready()
        return grads[0], None


def test_who_adds_without_asking_is_told() -> None:
    model, _ = models()
    engine = DataParallelEngine(infos(model), ParallelMesh())
    engine.zero_grad()
    with pytest.raises(MegalightError, match=r"added to main_grad of plain without asking.*add_gradient"):
        Careless.apply(torch.ones((), requires_grad=True), model.plain).backward()  # type: ignore[no-untyped-call]

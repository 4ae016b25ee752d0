"""The executor does what the schedule says, in its order, and keeps no more than the theory of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.nn import Linear
from megalight.ops.linear import WeightGradients
from megalight.ops.parameter import collect
from megalight.parallel.collectives import Message
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.executor import Executor, _Run
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.p2p_communication import Carry, Channel
from megalight.parallel.pipeline.schedules import Action, ActionKind
from megalight.parallel.pipeline.timeline import rank_schedule_of, simulate
from megalight.types import Loss
from tests.support.workers import run

WIDTH, ROWS = 6, 3


class Chunk(nn.Module):
    """Every one alike, so that each keeps equally much."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.one, self.two = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.double()
        for parameter in self.parameters():
            collect(parameter, torch.zeros_like(parameter))
            parameter.grad = parameter.main_grad

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))


class Mark(torch.autograd.Function):
    """Tells when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.tell()
        return gradient, None


class Tracked(torch.autograd.Function):
    """Its output lies in memory of which Python knows whether it is still there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: list[Any]) -> Tensor:
        array = x.detach().numpy().copy()
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Saved:
    """Bytes that autograd keeps for backward passes now, and at most; parameters aside."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.now = self.most = 0

    def keep(self, tensor: Tensor) -> Any:
        class Kept:
            pass

        kept: Any = Kept()
        kept.tensor = tensor
        if tensor.untyped_storage().data_ptr() not in self.known:
            self._add(tensor.nbytes)
            weakref.finalize(kept, self._add, -tensor.nbytes)
        return kept

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.keep, lambda kept: kept.tensor)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(count)]


def _play(name: str, vpp: int, count: int, group: int | None) -> dict[str, Any]:
    """Two steps of a schedule; everything worth knowing of the second one on this rank."""
    pp, rank = dist.get_world_size(), dist.get_rank()
    mesh = ParallelMesh(pp, rank, pp=pp)
    layout = PipelineLayout.even(pp * vpp, pp, vpp)
    chunks = [Chunk(stage.index) for stage in layout.of_rank(rank)]
    executor = Executor(chunks, layout, mesh, torch.device("cpu"))
    rank_schedule = rank_schedule_of(rank, schedules.build(name, pp, vpp, count, group))
    log: list[tuple[str, int, int]] = []
    memory: list[Any] = []
    alive: list[list[int]] = []
    parts = {id(chunk): place for place, chunk in enumerate(chunks)}
    saved = Saved([p for chunk in chunks for p in chunk.parameters()])
    places: list[tuple[int, int]] = []

    def forward_step(chunk: nn.Module, batch: tuple[int, Tensor], carry: Carry | None) -> Carry:
        index, x = batch
        place = parts[id(chunk)], index
        log.append(("F", *place))
        alive.append([n for n, ref in enumerate(memory) if ref() is not None])
        x = x.clone().requires_grad_() if carry is None else carry["x"]
        x = Mark.apply(x, lambda: log.append(("I", *place)))
        places.append(place)
        return {"x": Tracked.apply(chunk(x), memory)}

    def loss_step(carry: Carry, batch: Any) -> Loss:
        return Loss(carry["x"].sum())

    def objective(loss: Loss) -> Tensor:
        return loss.sum

    def step() -> list[Loss]:
        return executor.train(rank_schedule, list(enumerate(batches(count))), forward_step, loss_step, objective)

    run_weights = WeightGradients.run

    def weights(self: WeightGradients) -> None:
        log.append(("W", -1, -1))
        run_weights(self)

    step()
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.zero_()
    log.clear()
    memory.clear()
    alive.clear()
    with mock.patch.object(WeightGradients, "run", weights), saved.hooks():
        losses = step()
    return {
        "log": log,
        "peak": executor.peak,
        "bytes": saved.most,
        "left": saved.now + sum(ref() is not None for ref in memory),
        "alive": alive,
        "losses": [float(loss.sum) for loss in losses],
        "gradients": [[p.main_grad.numpy() for p in chunk.parameters()] for chunk in chunks],
    }


def by_hand(stages: int, count: int) -> tuple[list[float], list[list[Any]], int]:
    """Losses, gradients by stage, and the bytes that one chunk keeps of one micro-batch."""
    chunks = [Chunk(stage) for stage in range(stages)]
    losses = []
    for x in batches(count):
        x = x.requires_grad_()
        for chunk in chunks:
            x = chunk(x)
        x.sum().backward()
        losses.append(float(x.detach().sum()))
    saved = Saved(list(chunks[0].parameters()))
    with saved.hooks():
        kept = chunks[0](batches(1)[0].requires_grad_())
    assert kept.grad_fn is not None
    return losses, [[p.main_grad.numpy() for p in chunk.parameters()] for chunk in chunks], saved.now


ROWS_OF_SCHEDULES = [
    ("1f1b", 2, 1, 5, None),
    ("1f1b", 4, 1, 2, None),
    ("1f1b", 4, 1, 7, None),
    ("interleaved", 2, 2, 5, None),
    ("interleaved", 4, 2, 6, None),
    ("interleaved", 2, 3, 7, 3),
    ("interleaved", 4, 2, 2, None),
    ("zero_bubble", 2, 1, 6, None),
    ("zero_bubble", 4, 1, 7, None),
    ("zero_bubble", 2, 2, 5, None),
    ("zero_bubble", 4, 2, 1, None),
    ("combined", 2, 1, 6, None),
    ("combined", 2, 2, 5, None),
]


def entries(action: Action) -> list[tuple[str, int, int]]:
    """What the log says of an action. Of a pair whose passes never pause, the backward comes first."""
    if action.overlapped is not None:
        kinds = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
        parts = [*(action._replace(kind=kind, overlapped=None) for kind in kinds), action.overlapped]
        return [entry for part in parts for entry in entries(part)]
    name = {ActionKind.FORWARD: "F", ActionKind.WEIGHT_GRADIENT: "W"}.get(action.kind, "I")
    return [("W", -1, -1) if name == "W" else (name, action.chunk, action.micro_batch)]


@pytest.mark.parametrize(("name", "pp", "vpp", "count", "group"), ROWS_OF_SCHEDULES)
def test_order_memory_and_gradients(name: str, pp: int, vpp: int, count: int, group: int | None) -> None:
    plans = schedules.build(name, pp, vpp, count, group)
    theory = simulate(plans).peak
    losses, gradients, size = by_hand(pp * vpp, count)
    assert size > 0
    for rank, found in enumerate(run(_play, pp, name, vpp, count, group)):
        assert found["log"] == [entry for action in plans[rank] for entry in entries(action)]
        assert found["peak"] == theory[rank]
        if name == "1f1b":
            assert found["peak"] == min(count, pp - rank)
        assert found["bytes"] <= theory[rank] * size, "more activations live than the theory allows"
        assert found["bytes"] == theory[rank] * size or name in ("zero_bubble", "combined")
        assert found["left"] == 0
        assert found["losses"] == pytest.approx(losses if rank == pp - 1 else [], rel=1e-9)
        for chunk in range(vpp):
            for mine, theirs in zip(found["gradients"][chunk], gradients[chunk * pp + rank], strict=True):
                assert abs(mine - theirs).max() <= 1e-9 * abs(theirs).max()


def _play_with_news(*args: Any) -> dict[str, Any]:
    """With a backend that tells when a send is done, as NCCL does. (gloo tells who waits.)"""

    def done(self: Message) -> bool:
        self.wait()
        return True

    with mock.patch.object(Message, "done", done):
        return _play(*args)


class Once:
    """A transfer that may be waited for again."""

    def __init__(self, work: dist.Work) -> None:
        self.work: dist.Work | None = work

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None

    def is_completed(self) -> bool:
        return self.work is None


def _play_stopping(*args: Any) -> dict[str, Any]:
    """Every action waits until all is through that its rank has posted before: as hosts do that load kernels."""
    open_transfers: list[Once] = []
    start = Channel._start

    def started(self: Channel, *args: Any) -> Message:
        message = start(self, *args)
        works = [Once(work) for work in message.works]
        open_transfers.extend(works)
        return Message(message.tensors, works)  # type: ignore[arg-type]

    def after_all(action: Callable[..., None]) -> Callable[..., None]:
        def patient(*args: Any) -> None:
            for work in open_transfers:
                work.wait()
            open_transfers.clear()
            action(*args)

        return patient

    kinds = ("_forward", "_backward", "_input_gradient", "_weight_gradient")
    actions = {name: after_all(getattr(_Run, name)) for name in kinds}
    with mock.patch.object(Channel, "_start", started), mock.patch.multiple(_Run, **actions):
        return _play(*args)


@pytest.mark.parametrize(("name", "pp", "vpp", "count", "group"), ROWS_OF_SCHEDULES)
def test_hosts_may_stop_until_all_messages_are_through(
    name: str, pp: int, vpp: int, count: int, group: int | None
) -> None:
    losses, _, _ = by_hand(pp * vpp, count)
    found = run(_play_stopping, pp, name, vpp, count, group)
    assert found[-1]["losses"] == pytest.approx(losses, rel=1e-9)


def test_an_output_is_let_go_once_it_is_sent() -> None:
    """On the first of four ranks three outputs leave before the first gradient is back: none waits for that."""
    for found in run(_play_with_news, 4, "1f1b", 1, 5, None)[:-1]:
        assert found["alive"] == [[]] * 5


def test_an_output_is_let_go_once_its_gradient_is_back() -> None:
    """Where nobody tells whether a send is done."""
    for rank, found in enumerate(run(_play, 4, "1f1b", 1, 7, None)):
        assert max(map(len, found["alive"])) < 4 - rank

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import LayoutError, MegalightError
from megalight.parallel.apply import parallelize
from megalight.parallel.bridge import BridgeCommunicator, BridgeLane, lanes
from megalight.parallel.collectives import join
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Column, Row
from tests.parallel.gathering import gather_canonical, relative_error
from tests.support.workers import run

HIDDEN, LENGTH, MICRO_BATCHES = 6, 3, 3


def meshes(src: dict[str, int], dest: dict[str, int], rank: int | None = None) -> tuple[ParallelMesh, ParallelMesh]:
    """Side by side: source, then destination. ``world_size`` is that of each."""
    rank = dist.get_rank() if rank is None else rank
    size = src.get("world_size", 1)
    return (
        ParallelMesh(**{**src, "world_size": size}, global_rank=rank, offset=0),
        ParallelMesh(**dest, global_rank=rank, offset=size),
    )


def test_lanes() -> None:
    fan_in = meshes({"world_size": 8, "tp": 2}, {"world_size": 8, "tp": 2, "pp": 2}, rank=0)
    assert lanes(*fan_in) == (
        BridgeLane(((0, 1), (2, 3)), ((8, 9),)),
        BridgeLane(((4, 5), (6, 7)), ((10, 11),)),
    )
    fan_out = meshes({"world_size": 4, "tp": 2, "pp": 2}, {"world_size": 8, "cp": 2, "tp": 2}, rank=0)
    (lane,) = lanes(*fan_out)
    assert lane == BridgeLane(((2, 3),), ((4, 5, 6, 7), (8, 9, 10, 11)))
    assert (lane.source_leaders, lane.destination_leaders) == ((3,), (4, 8))


def test_lanes_of_many_thousand_ranks() -> None:
    found = lanes(*meshes({"world_size": 4096, "tp": 4, "pp": 2}, {"world_size": 12288, "tp": 8, "pp": 12}, rank=5000))
    assert len(found) == 128
    assert found[-1].source_leaders == tuple(4095 - 4 * back for back in (3, 2, 1, 0))
    assert found[-1].destination_leaders == (4096 + 1016,)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(HIDDEN, 2 * HIDDEN, dtype=torch.float64)
        self.leave = nn.Linear(2 * HIDDEN, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(torch.tanh(self.enter(x)))


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(2)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Staged:
    """This rank's stage of a model on a mesh; stages are joined by plain sends."""

    def __init__(self, mesh: ParallelMesh, seed: int) -> None:
        self.mesh, self.model = mesh, Model(seed)
        for index in range(2):
            if index * mesh.pp // 2 != mesh.rank("pp"):
                del self.model.layers[str(index)]
        plan = ParallelizePlan({"layers.*.enter": Column(), "layers.*.leave": Row()})
        self.specs = parallelize(self.model, plan, mesh)
        stages, stage = mesh.ranks("pp"), mesh.rank("pp")
        self.before = stages[stage - 1] if stage else None
        self.after = stages[stage + 1] if stage + 1 < mesh.pp else None
        self.passed: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """``x``: the input in the first stage, a tensor of its shape in others."""
        if self.before is not None:
            dist.recv(x := torch.empty_like(x), self.before)
            x.requires_grad_()
        y = self.model(x)
        if self.after is not None:
            dist.send(y.detach(), self.after)
        self.passed.append((x, y))
        return y

    def backward(self, grad: Tensor) -> None:
        """The oldest pass; ``grad``: of the output in the last stage."""
        x, y = self.passed.pop(0)
        if self.after is not None:
            dist.recv(grad := torch.empty_like(y), self.after)
        y.backward(grad)
        if self.before is not None:
            dist.send(x.grad, self.before)

    def gradients(self) -> dict[str, Tensor]:
        grads = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        if (replicas := self.mesh.group("dp")) is not None:
            for grad in grads.values():
                dist.all_reduce(grad, group=replicas)
        return gather_canonical(grads, self.specs, self.mesh)


def data(rows: int, dim: int, ndim: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[micro-batches, ..., rows, ..., h]`` and targets ``[micro-batches, rows, h]``."""
    generator = torch.Generator().manual_seed(7)
    shape = [LENGTH] * (ndim - 1) + [HIDDEN]
    shape[dim] = rows
    x = torch.randn(MICRO_BATCHES, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(MICRO_BATCHES, rows, HIDDEN, generator=generator, dtype=torch.float64)


def loss_of(y: Tensor, target: Tensor, dim: int) -> Tensor:
    """Differs for every row, so that rows must not change places."""
    y = y.movedim(dim, 0)
    return (y - target.view(len(target), *[1] * (y.ndim - 2), -1)).pow(3).sum()


def expected(rows: int, dim: int, ndim: int) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    encoder, decoder = Model(1), Model(2)
    loss = torch.stack([loss_of(decoder(encoder(x)), t, dim) for x, t in zip(*data(rows, dim, ndim), strict=True)])
    loss.sum().backward()
    return (float(loss.sum()), *({n: p.grad for n, p in m.named_parameters()} for m in (encoder, decoder)))


def source(bridge: BridgeCommunicator, rows: tuple[int, ...], dim: int, ndim: int) -> dict[str, Tensor]:
    """All forwards, then all backwards."""
    mesh = bridge.src_mesh
    encoder = Staged(mesh, 1)
    first = sum(rows[: mesh.rank("dp")])
    mine = slice(first, first + rows[mesh.rank("dp")])
    for x in data(sum(rows), dim, ndim)[0]:
        y = encoder.forward(x.narrow(dim, first, rows[mesh.rank("dp")]).contiguous())
        if bridge.is_source:
            bridge.send_forward({"x": y, "row": torch.arange(sum(rows))[mine]})
    for _ in range(MICRO_BATCHES):
        encoder.backward(bridge.recv_backward()["x"] if bridge.is_source else torch.empty(0))
    return encoder.gradients()


def destination(bridge: BridgeCommunicator, rows: tuple[int, ...], dim: int, ndim: int) -> tuple[float, dict[str, Any]]:
    """A backward after each forward."""
    mesh = bridge.dest_mesh
    decoder = Staged(mesh, 2)
    first_stage = mesh.ranks("pp")[0]
    total = 0.0
    for target in data(sum(rows), dim, ndim)[1]:
        shape = torch.zeros(ndim + 1, dtype=torch.int64)
        if bridge.is_destination:
            message = bridge.recv_forward()
            x, row = message["x"], message["row"]
            assert x.requires_grad
            assert not row.requires_grad
            shape = torch.tensor([*x.shape, int(row[0])])
        if mesh.pp > 1:
            dist.broadcast(shape, first_stage, group=mesh.group("pp"))
        if not bridge.is_destination:
            x = torch.empty(*shape[:-1], dtype=torch.float64)
            row = shape[-1] + torch.arange(x.shape[dim])
        y = decoder.forward(x)
        grad = torch.empty(0)
        if decoder.after is None:
            loss = loss_of(y, target[row], dim)
            (grad,) = torch.autograd.grad(loss, y, retain_graph=True)
            total += float(loss)
        decoder.backward(grad)
        if bridge.is_destination:
            bridge.send_backward()
    losses = torch.tensor(total)
    if (group := mesh.group("pp", "dp")) is not None:
        dist.all_reduce(losses, group=group)
    return float(losses), decoder.gradients()


def train(src: dict[str, int], dest: dict[str, int], rows: tuple[int, ...], dim: int, ndim: int) -> float:
    torch.set_default_dtype(torch.float64)
    src_mesh, dest_mesh = meshes(src, dest)
    bridge = BridgeCommunicator(src_mesh, dest_mesh, batch_dim={"x": dim, "row": 0})
    loss, encoder, decoder = expected(sum(rows), dim, ndim)
    if src_mesh.contains(dist.get_rank()):
        found, wanted = source(bridge, rows, dim, ndim), encoder
        errors = []
    else:
        (total, found), wanted = destination(bridge, rows, dim, ndim), decoder
        errors = [abs(total - loss) / abs(loss)]
    bridge.finish()
    assert found.keys() == wanted.keys()
    return max(errors + [relative_error(found[name], wanted[name]) for name in wanted])


LAYOUTS = {
    "one to one": ({}, {"world_size": 1}, (4,), 0, 2),
    "fan-in": ({"world_size": 2}, {"world_size": 1}, (3, 2), 1, 3),
    "fan-out": ({"world_size": 1}, {"world_size": 2}, (5,), 0, 2),
    "fan-in, tp behind": ({"world_size": 2}, {"world_size": 2, "tp": 2}, (1, 4), 0, 3),
    "fan-out, tp before": ({"world_size": 2, "tp": 2}, {"world_size": 2}, (3,), 1, 3),
    "pp before, tp behind": ({"world_size": 2, "pp": 2}, {"world_size": 2, "tp": 2}, (3,), 0, 2),
    "tp before, pp behind": ({"world_size": 2, "tp": 2}, {"world_size": 2, "pp": 2}, (3,), 1, 4),
    "two lanes": ({"world_size": 2}, {"world_size": 2}, (2, 5), 0, 2),
}
LARGE_LAYOUTS = {
    "4 to 2": ({"world_size": 4}, {"world_size": 2}, (2, 3, 1, 4), 0, 2),
    "2 to 4": ({"world_size": 2}, {"world_size": 4}, (5, 2), 1, 3),
    "4 to 1, tp": ({"world_size": 4}, {"world_size": 2, "tp": 2}, (2, 3, 1, 4), 0, 2),
    "tp and dp to tp": ({"world_size": 4, "tp": 2}, {"world_size": 2, "tp": 2}, (2, 3), 1, 3),
    "tp to tp and dp": ({"world_size": 2, "tp": 2}, {"world_size": 4, "tp": 2}, (5,), 0, 2),
    "tp and pp to dp": ({"world_size": 4, "tp": 2, "pp": 2}, {"world_size": 2}, (5,), 0, 2),
    "dp to tp and pp": ({"world_size": 2}, {"world_size": 4, "tp": 2, "pp": 2}, (1, 2), 0, 2),
    "dp and pp to dp": ({"world_size": 4, "pp": 2}, {"world_size": 2}, (2, 3), 0, 3),
}


def world(src: dict[str, int], dest: dict[str, int]) -> int:
    return src.get("world_size", 1) + dest["world_size"]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_training_equals_one_device(layout: Any) -> None:
    assert max(run(train, world(*layout[:2]), *layout)) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize("layout", LARGE_LAYOUTS.values(), ids=LARGE_LAYOUTS)
def test_training_on_six_ranks_equals_one_device(layout: Any) -> None:
    assert max(run(train, world(*layout[:2]), *layout)) < 1e-9


DTYPES = (
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def any_tensors() -> bool:
    """Any dtype, any number of dims, replicas that get no row; transposed memory, strided gradients."""
    bridge = BridgeCommunicator(*meshes({}, {"world_size": 2}), batch_dim=-1)
    generator = torch.Generator().manual_seed(0)
    sent = {str(dtype): (8 * torch.randn(2, 3, 1, generator=generator)).to(dtype) for dtype in DTYPES}
    sent["whole.weight"] = torch.randn(5, 4, generator=generator).t()
    sent["vector"] = torch.arange(7)
    for tensor in sent.values():
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            tensor.requires_grad_()
    wanted = {name for name, tensor in sent.items() if tensor.requires_grad}
    assert wanted == {"torch.float64", "torch.bfloat16", "torch.float16", "whole.weight"}
    if bridge.is_source:
        bridge.send_forward(sent)
        grads = bridge.recv_backward()
        bridge.finish()
        assert grads.keys() == wanted
        return all(
            grads[name].dtype == sent[name].dtype and torch.equal(grads[name], (2 * sent[name].detach()))
            for name in wanted
        )
    received = bridge.recv_forward()
    place = bridge.dest_mesh.rank("dp")
    assert received.keys() == sent.keys()
    for name, tensor in received.items():
        part = sent[name].tensor_split(2, dim=-1)[place]
        assert (tensor.dtype, tensor.requires_grad) == (part.dtype, part.requires_grad)
        assert tensor.shape == part.shape
        assert torch.equal(tensor.float(), part.float())
    bridge.send_backward({name: 2 * received[name].detach().mT.clone().mT for name in wanted})
    bridge.finish()
    return True


def test_any_tensors_travel() -> None:
    assert all(run(any_tensors, 3))


def packed() -> list[list[float]]:
    """Rows split as told; a gradient that is left out is zeros; what wants none needs no answer."""
    bridge = BridgeCommunicator(*meshes({}, {"world_size": 2}))
    x = torch.arange(7.0, requires_grad=True)
    if bridge.is_source:
        bridge.send_forward({"note": torch.ones(2)})
        bridge.send_forward({"x": x, "y": x * 2}, parts={"x": [5, 2]})
        grads = bridge.recv_backward()
        bridge.finish()
        return [grads["x"].tolist(), grads["y"].tolist()]
    assert not bridge.recv_forward()["note"].requires_grad
    message = bridge.recv_forward()
    bridge.send_backward({"x": message["x"].detach() + 1})
    bridge.finish()
    return [message["x"].tolist(), message["y"].tolist()]


def test_parts_are_as_told_and_gradients_may_be_left_out() -> None:
    sent, first, second = run(packed, 3)
    assert first == [[0, 1, 2, 3, 4], [0, 2, 4, 6]]
    assert second == [[5, 6], [8, 10, 12]]
    assert sent == [[1, 2, 3, 4, 5, 6, 7], [0] * 7]


def both_send_first(count: int) -> list[float]:
    """One forward, one backward in turn, with more bytes under way than sockets hold."""
    bridge = BridgeCommunicator(*meshes({}, {"world_size": 1}))
    if bridge.is_source:
        messages = [torch.full((1 << 20,), float(i), requires_grad=True) for i in range(count)]
        bridge.send_forward({"x": messages[0]})
        grads = [bridge.send_forward_recv_backward({"x": x}) for x in messages[1:]]
        grads.append(bridge.recv_backward())
        bridge.finish()
        return [float(grad["x"].max()) for grad in grads]
    message = bridge.recv_forward()
    for _ in range(count - 1):
        message = bridge.send_backward_recv_forward({"x": message["x"].detach() + 1})
    bridge.send_backward({"x": message["x"].detach() + 1})
    bridge.finish()
    return []


def test_both_sides_may_send_first() -> None:
    assert run(both_send_first, 2, 4, timeout=60)[0] == [1, 2, 3, 4]


def received_ahead() -> list[float]:
    """Two messages under way at once, into memory with gaps on the leader; answered in their order."""
    bridge = BridgeCommunicator(*meshes({"world_size": 2}, {"world_size": 2, "tp": 2}), batch_dim=1)
    if bridge.is_source:
        for value in (1.0, 2.0):
            bridge.send_forward({"x": torch.full((2, 3), value + dist.get_rank(), requires_grad=True)})
        grads = [float(bridge.recv_backward()["x"].max()) for _ in range(2)]
        bridge.finish()
        return grads
    first, second = bridge.start_recv_forward(), bridge.start_recv_forward()
    messages = [arriving.wait()["x"] for arriving in (first, second)]
    for x in messages:
        x.square().sum().backward()
        bridge.send_backward()
    bridge.finish()
    return [x[0].tolist() for x in messages]


def test_messages_may_be_received_ahead() -> None:
    assert run(received_ahead, 4) == [[2, 4], [4, 6], *[[[1, 1, 1, 2, 2, 2], [2, 2, 2, 3, 3, 3]]] * 2]


def shares_of_a_sequence() -> float:
    """Each context rank of the destination uses a share of the rows; the source gets the sum."""
    bridge = BridgeCommunicator(*meshes({}, {"world_size": 2, "cp": 2}))
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    model = nn.Linear(3, 3, dtype=torch.float64)
    if bridge.is_source:
        bridge.send_forward({"x": model(x)})
        bridge.backward()
        found = model.weight.grad.clone()
        model.weight.grad = None
        model(x).pow(3).sum().backward()
        return relative_error(found, model.weight.grad)
    received = bridge.recv_forward()["x"]
    rank = bridge.dest_mesh.rank("cp")
    received[[rank, 3 - rank, 4 + rank]].pow(3).sum().backward()
    bridge.send_backward()
    bridge.finish()
    return 0.0


def test_gradients_of_context_shares_are_summed() -> None:
    assert max(run(shares_of_a_sequence, 3)) < 1e-9


def shares_at_both_ends() -> float:
    """Ranks of the source compute a share of the rows each, and join them; those of the destination use a share."""
    bridge = BridgeCommunicator(*meshes({"world_size": 2, "cp": 2}, {"world_size": 2, "cp": 2}))
    torch.manual_seed(0)
    x = torch.randn(6, 3, dtype=torch.float64)
    model = nn.Linear(3, 3, dtype=torch.float64)
    if bridge.is_source:
        group, place = bridge.src_mesh.group("cp"), bridge.src_mesh.rank("cp")
        bridge.send_forward({"x": join(model(x[3 * place : 3 * place + 3]), group, 0)})
        bridge.backward()
        dist.all_reduce(found := model.weight.grad.clone(), group=group)
        model.weight.grad = None
        model(x).pow(3).sum().backward()
        return relative_error(found, model.weight.grad)
    received = bridge.recv_forward()["x"]
    place = bridge.dest_mesh.rank("cp")
    received[place::2].pow(3).sum().backward()
    bridge.send_backward()
    bridge.finish()
    return 0.0


def test_context_parallelism_at_both_ends() -> None:
    assert max(run(shares_at_both_ends, 4)) < 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (({"world_size": 2, "offset": 0}, {"world_size": 2, "offset": 1}), "both meshes of the bridge have ranks 1"),
        (({"world_size": 2, "offset": 0}, {"world_size": 3, "offset": 2}), "are 2 .source. and 3 .destination."),
        (({"global_rank": 0, "offset": 0}, {"global_rank": 1, "offset": 1}), "have the global ranks 0 and 1"),
        (({"world_size": 2, "tp": 2, "offset": 0}, {"offset": 2}), "torch.distributed is not initialized"),
    ],
)
def test_impossible_bridges(options: tuple[dict[str, int], dict[str, int]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        BridgeCommunicator(*(ParallelMesh(**layout) for layout in options))


def refusals() -> list[str]:
    """What this rank is refused, before anything moves."""
    src_mesh, dest_mesh = meshes({"world_size": 2, "pp": 2}, {"world_size": 1})
    bridge = BridgeCommunicator(src_mesh, dest_mesh, batch_dim={"x": 1, "ids": 0})
    told = []

    def refused(call: str, *args: Any) -> None:
        with pytest.raises((LayoutError, MegalightError)) as caught:
            getattr(bridge, call)(*args)
        told.append(str(caught.value))

    with pytest.raises(LayoutError, match="use ranks up to 4, but there are only 4 processes"):
        BridgeCommunicator(src_mesh, replace(dest_mesh, world_size=3))
    x = torch.ones(2, 3, requires_grad=True)
    if bridge.is_source:
        refused("recv_backward")
        refused("send_forward", {"x": torch.ones(3)})
        refused("send_forward", {"y": x})
        refused("send_forward", {"x": x.to("meta")})
        refused("send_forward", {"x": x}, {"x": [2]})
        refused("send_forward", {"x": x}, {"z": [3]})
        refused("recv_forward")
        bridge.send_forward({"x": x, "ids": torch.ones(3)})
        assert bridge.recv_backward()["x"].tolist() == [[1.0] * 3] * 2
        refused("backward")
    elif bridge.is_destination:
        refused("send_backward")
        message = bridge.recv_forward()
        refused("send_backward", {"x": torch.ones(3, 2)})
        refused("send_backward", {"x": torch.ones(2, 3, dtype=torch.float64)})
        refused("send_backward", {"ids": torch.ones(3)})
        bridge.send_backward({"x": torch.ones_like(message["x"])})
    else:
        refused("send_forward", {"x": x})
        refused("recv_forward")
    bridge.finish()
    return told


def test_refusals() -> None:
    first, last, behind, elsewhere = run(refusals, 4)
    assert "rank 3 is in neither mesh" in elsewhere[0]
    assert "last pipeline stage of the source mesh, but rank 0 is in stage 0 of 2" in first[0]
    for text, message in zip(
        last,
        [
            "recv_backward: no message waits",
            r"x [3] has no batch dim 1",
            "batch_dim of the bridge has no 'y'",
            "is on meta, but the bridge sends cpu",
            "parts of x are [2]; give 1 numbers",
            "parts has z",
            "first pipeline stage of the destination mesh, but rank 1 is in stage 1 of 2 of",
            "backward: no message waits",
        ],
        strict=True,
    ):
        assert message in text
    for text, message in zip(
        behind,
        [
            "send_backward: no message waits",
            "the gradient of x has shape torch.Size([3, 2]), but the tensor has torch.Size([2, 3])",
            "has dtype torch.float64",
            "gradients of ids were not requested; the message needs those of x",
        ],
        strict=True,
    ):
        assert message in text


def different_messages(other: dict[str, Any]) -> str:
    bridge = BridgeCommunicator(*meshes({"world_size": 2}, {"world_size": 1}))
    shape = {"size": (2, 3), "dtype": torch.float64, "name": "x"}
    told = ""
    if bridge.is_source:
        mine = {**shape, **other} if dist.get_rank() else shape
        bridge.send_forward({mine["name"]: torch.ones(mine["size"], dtype=mine["dtype"])})
    else:
        with pytest.raises(LayoutError) as caught:
            bridge.recv_forward()
        told = str(caught.value)
    dist.barrier()  # the headers have arrived; the data never will
    return told


@pytest.mark.parametrize(
    "other", [{"size": (2, 4)}, {"dtype": torch.int64}, {"name": "y"}], ids=["size", "dtype", "name"]
)
def test_replicas_that_disagree_are_told(other: dict[str, Any]) -> None:
    assert "ranks 0 and 1 sent messages that cannot be joined: x [2, 3] float64" in run(different_messages, 3, other)[2]

from __future__ import annotations

import random
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.ops.cross_entropy import linear_cross_entropy
from megalight.ops.linear import WeightGradients, deferring, linear
from tests.ops.test_linear import Parameter, with_main_grad


def weights(count: int = 3) -> list[Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [with_main_grad(torch.randn(6, 6, generator=generator, dtype=torch.float64)) for _ in range(count)]


def inputs() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()


def chain(x: Tensor, layers: list[Parameter]) -> Tensor:
    for weight in layers:
        x = linear(x, weight).sin()
    return x.sum()


def immediate() -> tuple[list[Parameter], Tensor]:
    layers, x = weights(), inputs()
    for _ in range(2):
        chain(x, layers).backward()
    return layers, x.grad


def test_equal_to_immediate_ones_to_the_bit() -> None:
    expected, expected_x = immediate()
    layers, x = weights(), inputs()
    queues = [WeightGradients(), WeightGradients()]
    for queue in queues:
        with deferring(queue):
            chain(x, layers).backward()
    assert torch.equal(x.grad, expected_x)
    assert all(weight.ready == 0 and not weight.main_grad.any() for weight in layers)
    assert [len(queue) for queue in queues] == [3, 3]
    for queue in queues:
        queue.run()
        assert not len(queue)
        queue.run()
    for ours, theirs in zip(layers, expected, strict=True):
        assert torch.equal(ours.main_grad, theirs.main_grad)
        assert (ours.ready, theirs.ready) == (2, 2)
        assert not ours.main_grad.requires_grad


def test_micro_batches_may_run_in_any_order() -> None:
    expected, _ = immediate()
    layers, x = weights(), inputs()
    queues = [WeightGradients() for _ in range(2)]
    for queue in queues:
        with deferring(queue):
            chain(x, layers).backward()
    random.Random(0).shuffle(queues)
    for queue in reversed(queues):
        queue.run()
    for ours, theirs in zip(layers, expected, strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.main_grad, rtol=1e-14, atol=1e-14)


def test_only_inside_the_context() -> None:
    layers, queue = weights(), WeightGradients()
    loss = chain(inputs(), layers)
    with pytest.raises(KeyboardInterrupt), deferring(queue):
        raise KeyboardInterrupt
    loss.backward()
    assert not len(queue)
    assert [weight.ready for weight in layers] == [1, 1, 1]


def test_the_innermost_queue_takes_them() -> None:
    outer, inner = WeightGradients(), WeightGradients()
    with deferring(outer):
        with deferring(inner):
            chain(inputs(), weights(2)).backward()
        chain(inputs(), weights(3)).backward()
    assert (len(outer), len(inner)) == (3, 2)


def test_seen_from_another_thread() -> None:
    """Autograd runs the backward of CUDA ops in a thread of its own."""
    layers, queue = weights(), WeightGradients()
    loss = chain(inputs(), layers)
    with deferring(queue):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert len(queue) == 3


def test_ordinary_gradients_are_not_put_off() -> None:
    plain, main, queue = nn.Parameter(torch.randn(6, 6, dtype=torch.float64)), weights(1)[0], WeightGradients()
    with deferring(queue):
        chain(inputs(), [plain, main]).backward()
    assert plain.grad is not None
    assert len(queue) == 1


def test_biases_and_the_output_layer_are_computed_at_once() -> None:
    weight, head, queue = *weights(2), WeightGradients()
    bias = with_main_grad(torch.randn(6, dtype=torch.float64))
    hidden = linear(inputs(), weight, bias)
    losses = linear_cross_entropy(hidden, head, torch.arange(5))
    with deferring(queue):
        losses.sum().backward()
    assert (bias.ready, head.ready, weight.ready) == (1, 1, 0)
    assert len(queue) == 1


def test_half_weights() -> None:
    x = torch.randn(3, 21, 8).bfloat16()
    found = []
    for queue in (None, WeightGradients()):
        weight = with_main_grad(torch.ones(4, 8).bfloat16(), torch.float32)
        if queue is None:
            linear(x, weight).square().sum().backward()
        else:
            with deferring(queue):
                linear(x, weight).square().sum().backward()
            queue.run()
        found.append(weight.main_grad)
    assert torch.equal(*found)


class Box:
    """Something that can be watched."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor = tensor


class Node(torch.autograd.Function):
    """The identity, with a box in its place in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boxes: list[weakref.ref[Box]]) -> Tensor:
        ctx.box = Box()
        boxes.append(weakref.ref(ctx.box))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_the_graph_is_free_before_they_run() -> None:
    layers, queue = weights(), WeightGradients()
    saved: list[weakref.ref[Box]] = []
    nodes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        saved.append(weakref.ref(box))
        return box

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        loss = chain(Node.apply(inputs(), nodes), layers)
    assert all(box() is not None for box in saved + nodes)
    with deferring(queue):
        loss.backward()
    assert len(queue) == 3
    assert not [box for box in saved if box() is not None]
    del loss
    assert not [box for box in nodes if box() is not None]


def test_under_recomputation() -> None:
    """The region has run again by the time its weight gradients wait."""
    expected, _ = immediate()
    layers, x, queue = weights(), inputs(), WeightGradients()
    for _ in range(2):
        with deferring(queue):
            checkpoint(chain, x, layers, use_reentrant=False).backward()
    queue.run()
    assert all(torch.equal(a.main_grad, b.main_grad) for a, b in zip(layers, expected, strict=True))


def test_the_next_input_comes_during_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    add = "megalight.ops.linear.add_weight_gradient"
    monkeypatch.setattr(add, lambda weight, grad_y, x: events.append(f"product {x}"))
    queue = WeightGradients()

    def put(name: str) -> None:
        def begin() -> Any:
            events.append(f"begin {name}")
            return lambda: name

        queue.put(torch.empty(0), torch.empty(0), begin)

    for name in "abc":
        put(name)
    queue.run()
    assert events == ["begin a", "begin b", "product a", "begin c", "product b", "product c"]

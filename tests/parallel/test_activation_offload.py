"""Activations in host memory: the same gradients, nothing kept on the device, and copies one call ahead."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalight.errors import ConfigurationError
from megalight.parallel import activation_offload
from megalight.parallel.activation_offload import ActivationOffloading, Away, chosen
from tests.parallel.data_parallel.helpers import assert_close

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 4, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.recompute = recompute
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def _inputs(count: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(2)
    return [torch.randn(5, 6, dtype=torch.float64, generator=draws) for _ in range(count)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("patterns", [("",), ("norm", "up"), ("*",)])
def test_gradients_are_equal(patterns: tuple[str, ...], recompute: bool) -> None:
    """With several forward passes before their backward passes, in both orders."""
    net, expected = Net(recompute=recompute), Net(recompute=recompute)
    offloading = ActivationOffloading(chosen(net, patterns), CPU, 1)
    for model in (net, expected):
        one, other, third = (model(x).square().sum() for x in _inputs(3))
        third.backward()
        one.backward()
        other.backward()
    for found, wanted in zip(net.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert_close(found.grad, wanted.grad)
    # torch's checkpoint keeps inputs of layers only, and must see everything else.
    assert (offloading.moved > 0) != recompute
    before = offloading.moved
    with torch.no_grad():
        net(_inputs(1)[0])
    offloading.remove()
    net(_inputs(1)[0]).sum().backward()
    assert offloading.moved == before


def test_a_failed_forward_leaves_no_hooks() -> None:
    net = Net()
    offloading = ActivationOffloading(chosen(net, ("",)), CPU, 1)
    with pytest.raises(RuntimeError):
        net.layers[0](torch.ones(5, 7, dtype=torch.float64))
    moved = offloading.moved
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert offloading.moved == moved


def test_activations_leave_the_device() -> None:
    """What a module saved is freed after its call, and what came back is freed once it was used."""
    net, saved = Net(3), list[weakref.ref[Tensor]]()

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        saved.append(weakref.ref(output))

    for layer in net.layers:
        layer.up.register_forward_hook(note)
    ActivationOffloading(chosen(net, ("",)), CPU, 1)
    copies: list[weakref.ref[Away]] = []
    init = Away.__init__

    def noted(self: Away, *args: Any) -> None:
        copies.append(weakref.ref(self))
        init(self, *args)

    with patch.object(Away, "__init__", noted):
        loss = net(_inputs(1)[0]).sum()
    gc.collect()
    assert [tensor() is None for tensor in saved] == [True, True, True]
    loss.backward()
    assert copies
    assert all(copy() is None for copy in copies)


def test_tensors_come_back_one_call_ahead() -> None:
    net = Net(4)
    order: list[str] = []
    take, fetch = Away.take, activation_offload.Call.fetch
    calls: dict[int, int] = {}

    def taken(self: Away) -> Tensor:
        order.append(f"use {calls.setdefault(id(self.call), len(calls))}")
        return take(self)

    def fetched(self: Any, ahead: bool = True) -> None:
        order.append(f"fetch {calls.setdefault(id(self), len(calls))}")
        fetch(self, ahead)

    ActivationOffloading(chosen(net, ("up",)), CPU, 1)
    loss = net(_inputs(1)[0]).sum()
    with patch.object(Away, "take", taken), patch.object(activation_offload.Call, "fetch", fetched):
        loss.backward()
    firsts = [order.index(f"fetch {n}") for n in range(3)]
    uses = [order.index(f"use {n}") for n in range(3)]
    assert uses == sorted(uses)
    assert all(fetch < use for fetch, use in zip(firsts[1:], uses[1:], strict=True))
    assert all(firsts[n + 1] < uses[n + 1] and firsts[n + 1] > uses[n] for n in range(2))


def test_what_stays() -> None:
    net = Net(2)
    offloading = ActivationOffloading(chosen(net, ("",)), CPU, 6 * 9 + 1)
    net(_inputs(1)[0]).sum().backward()
    assert offloading.moved == 0, "weights have 54 elements, and activations fewer"
    with pytest.raises(ConfigurationError, match=r"pattern 'upp' of ActivationOffload .* Did you mean 'up'"):
        list(chosen(net, ("upp",)))
    with pytest.raises(ConfigurationError, match="has 1 layers here"):
        list(chosen(Net(1), ("up",)))

"""Activations in host memory: the same gradients, nothing kept on the device, and copies one call ahead."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megalight.errors import ConfigurationError
from megalight.models.gpt import GPT
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.parallel import activation_offload
from megalight.parallel import host_memory as host_pool
from megalight.parallel.activation_offload import ActivationOffloading, OffloadedTensor, check_patterns, chosen
from megalight.parallel.host_memory import HostPool, host_memory
from megalight.parallel.layers import translated
from megalight.types import PackedSequences
from tests.parallel.data_parallel.helpers import assert_close
from tests.strategies.training import BASE

CPU = torch.device("cpu")
EXPERTS = replace(BASE, num_layers=4, moe=MoEConfig(num_experts=4, ffn_hidden_size=48, pattern=(True,)))


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
    offloading = ActivationOffloading(chosen(net, patterns), HostPool(CPU), 1)
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
    offloading = ActivationOffloading(chosen(net, ("",)), HostPool(CPU), 1)
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
    ActivationOffloading(chosen(net, ("",)), HostPool(CPU), 1)
    copies: list[weakref.ref[OffloadedTensor]] = []
    init = OffloadedTensor.__init__

    def noted(self: OffloadedTensor, *args: Any) -> None:
        copies.append(weakref.ref(self))
        init(self, *args)

    with patch.object(OffloadedTensor, "__init__", noted):
        loss = net(_inputs(1)[0]).sum()
    gc.collect()
    assert [tensor() is None for tensor in saved] == [True, True, True]
    loss.backward()
    assert copies
    assert all(copy() is None for copy in copies)


def test_tensors_come_back_one_call_ahead() -> None:
    net = Net(4)
    order: list[str] = []
    take, fetch = OffloadedTensor.take, activation_offload.ModuleCall.fetch
    calls: dict[int, int] = {}

    def taken(self: OffloadedTensor) -> Tensor:
        order.append(f"use {calls.setdefault(id(self.call), len(calls))}")
        return take(self)

    def fetched(self: Any, ahead: bool = True) -> None:
        order.append(f"fetch {calls.setdefault(id(self), len(calls))}")
        fetch(self, ahead)

    ActivationOffloading(chosen(net, ("up",)), HostPool(CPU), 1)
    loss = net(_inputs(1)[0]).sum()
    with patch.object(OffloadedTensor, "take", taken), patch.object(activation_offload.ModuleCall, "fetch", fetched):
        loss.backward()
    firsts = [order.index(f"fetch {n}") for n in range(3)]
    uses = [order.index(f"use {n}") for n in range(3)]
    assert uses == sorted(uses)
    assert all(fetch < use for fetch, use in zip(firsts[1:], uses[1:], strict=True))
    assert all(firsts[n + 1] < uses[n + 1] and firsts[n + 1] > uses[n] for n in range(2))


def test_steps_use_the_same_host_memory() -> None:
    """Also with several micro-batches under way, and with shorter ones later."""
    net, pool = Net(), HostPool(CPU)
    ActivationOffloading(chosen(net, ("",)), pool, 1)
    sum(net(x).sum() for x in _inputs(2)).backward()  # type: ignore[union-attr]
    taken = pool.pinned
    assert taken > 0
    for rows in (5, 5, 4, 5):
        sum(net(x[:rows]).sum() for x in _inputs(2)).backward()  # type: ignore[union-attr]
        assert pool.pinned == taken


def test_what_stays() -> None:
    net = Net(2)
    offloading = ActivationOffloading(chosen(net, ("",)), HostPool(CPU), 6 * 9 + 1)
    net(_inputs(1)[0]).sum().backward()
    assert offloading.moved == 0, "weights have 54 elements, and activations fewer"
    with pytest.raises(ConfigurationError, match=r"pattern 'upp' of ActivationOffload .* Did you mean 'up'"):
        check_patterns([net], ("upp",), bool)
    check_patterns([net], ("upp",), lambda here: True)  # another stage has such a module
    assert chosen(Net(1), ("up",)) == []
    assert len(chosen(Net(3), ("up",), last=False)) == 3


class Counting(TorchDispatchMode):
    """Counts the memory that is alive, but that of copies in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.host: list[Tensor] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def copy(self, *args: Any) -> Tensor:
        # Kept: the memory of a copy that is gone could become that of another tensor.
        self.host.append(host_memory(*args))
        return self.host[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        there = {tensor.untyped_storage()._cdata for tensor in self.host}
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for key, (_, size) in self._alive.items() if key not in there))
        return out


NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""What Megatron calls the modules whose activations it can move."""


def _pass(names: tuple[str, ...]) -> tuple[int, dict[str, Tensor]]:
    """The peak of a pass through layers with experts, and the gradients."""
    model = GPT(EXPERTS).double()
    initialize(model, 3, "model.")
    ids = torch.randint(0, EXPERTS.vocab_size, (72,), generator=torch.Generator().manual_seed(4))
    offloading = ActivationOffloading(chosen(model, translated(names)), HostPool(CPU), 64)
    with Counting() as counting, patch.object(host_pool, "host_memory", counting.copy):
        model(ids, PackedSequences.of_uniform(3, 24), labels=ids.roll(1)).losses.sum().backward()
    assert bool(offloading.moved) == bool(names)
    offloading.remove()
    return counting.peak, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.full
def test_every_name_of_megatron_saves_memory() -> None:
    whole, expected = _pass(())
    for name in NAMES:
        # The input of the projection is the output of the core, which keeps it: they save memory together.
        beside = ("core_attn",) if name == "attn_proj" else ()
        peak, gradients = _pass((*beside, name))
        assert peak < (_pass(beside)[0] if beside else whole), name
        assert gradients.keys() == expected.keys()
        for parameter, gradient in gradients.items():
            assert_close(gradient, expected[parameter])

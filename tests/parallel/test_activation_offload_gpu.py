"""Activations in pinned host memory: the same gradients with less memory, and the host never waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.nn.moe.layer import on_side_stream
from megalight.parallel.activation_offload import ActivationOffloading, chosen
from megalight.parallel.host_memory import HostPool
from tests.parallel.data_parallel.helpers import assert_close

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, TOKENS = 2048, 8, 8192


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _passes(patterns: tuple[str, ...]) -> tuple[list[Tensor], int]:
    """Gradients of three steps, and the peak of the last one."""
    gc.collect()
    model = Net().cuda().bfloat16()
    offloading = ActivationOffloading(chosen(model, patterns), HostPool(torch.device("cuda"))) if patterns else None
    draws = torch.Generator().manual_seed(1)
    inputs = [torch.randn(TOKENS, WIDTH, generator=draws).cuda().bfloat16() for _ in range(3)]
    for step, x in enumerate(inputs):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("error")
        model(x).float().square().mean().backward()
    torch.cuda.set_sync_debug_mode("default")
    if offloading is not None:
        assert offloading.moved >= 3 * (LAYERS - 1) * 3 * TOKENS * WIDTH * 2
    return [
        p.grad.clone() for p in model.parameters() if p.grad is not None
    ], torch.cuda.max_memory_allocated() - before


def test_gradients_are_equal_with_less_memory() -> None:
    expected, peak = _passes(())
    for patterns in (("",), ("up", "down")):
        found, less = _passes(patterns)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, 1e-6)  # the same kernels on the same values
        if patterns == ("",):  # outside of the two products, tanh keeps its output
            assert less < 0.8 * peak


class Forked(nn.Module):
    """Two products save the same input, one of them on a stream of its own, as a shared expert does."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        aside = on_side_stream(self.aside, x)
        out: Tensor = self.here(x) + aside()
        return out


def _slow(original: Any) -> Any:
    @contextmanager
    def after_computation() -> Iterator[None]:
        with original():
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
            yield

    return after_computation


def _forked(offload: bool) -> list[Tensor]:
    model = Net()
    model.layers = nn.ModuleList(Forked() for _ in range(3))
    model.cuda()
    if offload:
        offloading = ActivationOffloading(chosen(model, ("",)), HostPool(torch.device("cuda")))
        assert offloading.up is not None
        offloading.up.after_computation = _slow(offloading.up.after_computation)  # type: ignore[method-assign]
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(1024, WIDTH, generator=draws).cuda()
    # Memory that is used again must not hold the right values by chance.
    spoilt = [torch.full_like(x, torch.nan) for _ in range(16)]
    del spoilt
    model(x).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_each_stream_waits_for_what_it_uses() -> None:
    for one, other in zip(_forked(True), _forked(False), strict=True):
        assert_close(one, other, 1e-6)


def _ahead(offload: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of three steps that the host prepares while the device is in the first, and pinned bytes after each."""
    model, pool, pinned = Net().cuda(), HostPool(torch.device("cuda")), list[int]()
    if offload:
        ActivationOffloading(chosen(model, ("",)), pool)
    draws = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1024, WIDTH, generator=draws).cuda() for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    for x in inputs:
        model(x).square().mean().backward()
        pinned.append(pool.pinned)
    busy = not torch.cuda.current_stream().query()
    assert busy or not offload, "the device was done before the host, so the test has shown nothing"
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None], pinned


def test_a_host_that_is_ahead_takes_no_more_memory() -> None:
    _ahead(True)  # pins memory, for which the host waits
    found, pinned = _ahead(True)
    for one, other in zip(found, _ahead(False)[0], strict=True):
        assert_close(one, other, 1e-6)
    assert pinned[0] > 0
    assert pinned == pinned[:1] * 3

"""The choice between ways to accumulate, with a clock of our own."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megalight.ops.linear.aligned import ROUNDS, MeasuredChoice
from megalight.ops.parameter import put


@dataclass
class Device:
    """Time goes on while a way works; events are reached at once, or later."""

    now: float = 0.0
    busy: bool = False
    called: list[str] = field(default_factory=list)

    def event(self) -> Event:
        return Event(self)

    def way(self, name: str, seconds: list[float]):
        def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
            self.called.append(name)
            self.now += seconds[self.called.count(name) % len(seconds)] * len(grad_y)
            put(main_grad, grad_y.T @ x, write)

        return accumulate


@dataclass
class Event:
    device: Device
    at: float = 0.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return not self.device.busy

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture(autouse=True)
def _no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def product(measured: MeasuredChoice, tokens: int = 5, out: int = 3, write: bool = False) -> None:
    """One call, whose result must be right whoever serves it."""
    main_grad = torch.ones(out, 4, dtype=torch.float64)
    grad_y, x = torch.randn(tokens, out, dtype=torch.float64), torch.randn(tokens, 4, dtype=torch.float64)
    measured(main_grad, grad_y, x, write)
    assert torch.equal(main_grad, (0 if write else 1) + grad_y.T @ x)


def test_the_fastest_stays() -> None:
    device = Device()
    measured = MeasuredChoice(device.way("a", [3.0]), device.way("b", [9.0, 2.0]), event=device.event)
    for _ in range(2 * ROUNDS + 3):
        product(measured)
    assert device.called == ["a", "b"] * ROUNDS + ["b"] * 3
    product(measured, out=6)  # another shape is another race
    assert device.called[-1] == "a"
    product(measured, write=True)  # and so is writing
    assert device.called[-1] == "a"


def test_lengths_differ_a_little_and_times_count_per_token() -> None:
    device = Device()
    measured = MeasuredChoice(device.way("a", [1.0]), device.way("b", [1.1]), event=device.event)
    for tokens in [7, 4] * ROUNDS:
        product(measured, tokens)
    product(measured, 5)
    assert device.called[-1] == "a"
    product(measured, 0)
    assert device.called[-1] == "a"


def test_nobody_waits_for_the_device() -> None:
    device = Device(busy=True)
    measured = MeasuredChoice(device.way("a", [2.0]), device.way("b", [1.0]), event=device.event)
    for _ in range(2 * ROUNDS + 2):
        product(measured)
    assert device.called[-2:] == ["a", "a"]
    device.busy = False
    product(measured)
    assert device.called[-1] == "b"


def test_captures_and_deterministic_runs_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    measured = MeasuredChoice(device.way("a", [2.0]), device.way("b", [1.0]), event=device.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    product(measured)
    product(measured)
    assert device.called == ["a", "a"]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(2 * ROUNDS + 1):
        product(measured)
    assert device.called[-1] == "b"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    product(measured)
    assert device.called[-1] == "a"

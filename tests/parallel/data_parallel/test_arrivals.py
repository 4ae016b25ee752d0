"""Gradients from several CUDA streams: the stream of the reductions waits for each of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megalight.parallel.data_parallel.communication import SideStream
from megalight.parallel.data_parallel.grad_hooks import GradReadyCounter
from megalight.parallel.data_parallel.gradients import UnitGradients


class Stream:
    """Stands for a CUDA stream, and notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.device = torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Bucket:
    """What arrivals read of a bucket with one parameter, ``parameter``."""

    autograd_adds = False

    def __init__(self, name: str) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.infos = [SimpleNamespace(name=name, parameter=self.parameter)]
        self.grads = torch.zeros(2)
        self.main_grads = [(self.parameter, self.grads)]
        self.arrived, self.sent = 0, False
        self.layout = SimpleNamespace(kind=SimpleNamespace(unit=0))

    def gaps(self) -> list[Tensor]:
        return []


@pytest.fixture
def log() -> list[str]:
    return []


def at(stream: Stream) -> Any:
    """Inside, this is the current stream."""
    return patch.object(torch.cuda, "current_stream", lambda device=None: stream)


def test_a_gradient_from_beside_completes_what_the_main_stream_still_computes(log: list[str]) -> None:
    """It sends a bucket whose gradients are all from the main stream, too."""
    main, side, reductions = (Stream(name, log) for name in ("main", "side", "reductions"))
    first, second = Bucket("first"), Bucket("second")
    buckets: Any = [first, second]
    arrivals = GradReadyCounter(
        buckets, lambda bucket: log.append(f"send {bucket.infos[0].name}"), True, SideStream(reductions)
    )  # type: ignore[arg-type]
    for _ in range(2):  # the first step shows what arrives
        log.clear()
        with at(main):
            arrivals.begin(1, send=True)
            second.parameter.sum().backward()
        with at(side):
            first.parameter.sum().backward()
        with at(main):
            arrivals.stop()
            arrivals.learn()
    waits = log[: log.index("send first")]
    assert sorted(waits) == ["reductions waits for main", "reductions waits for side"]
    assert log[len(waits) :] == ["send first", "send second"]


def test_the_reduction_of_a_unit_waits_for_gradients_from_beside(log: list[str]) -> None:
    main, side, reductions = (Stream(name, log) for name in ("main", "side", "reductions"))
    buckets: Any = [Bucket("weight")]
    units = UnitGradients(buckets, None, SideStream(reductions))  # type: ignore[arg-type]
    with at(main):
        units.begin()
        units.open(0)
        buckets[0].parameter.sum().backward()
    assert not log  # it waits for the main stream when it begins
    with at(side):
        buckets[0].parameter.sum().backward()
    assert log == ["reductions waits for side", "reductions waits for main"]


def test_a_new_main_stream_does_not_hide_what_the_earlier_one_computes(log: list[str]) -> None:
    main, other, reductions = (Stream(name, log) for name in ("main", "other", "reductions"))
    stream = SideStream(reductions)  # type: ignore[arg-type]
    for now in (main, main, other):
        with at(now):
            stream.begin()
            stream.follow()
    assert log == ["reductions waits for main"]

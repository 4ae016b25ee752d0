"""Layers from graphs: when they are replayed, in which order, and what is left of a recording that fails."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.graphs.modules import ModuleGraphs, Named, Parts
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.stale import stale_gradients
from tests.parallel.graphs.tape import Tape


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scale: Tensor, *, power: int = 1) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)) * scale) ** power


class Model(nn.Module):
    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.between = between

    def forward(self, x: Tensor, scale: Tensor, power: int) -> Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = self.between(layer(hidden, scale, power=power))
        return hidden.square().sum()


class Steps:
    """A model's steps with and without graphs of its layers."""

    def __init__(self, chained: bool = True, between: Any = lambda hidden: hidden) -> None:
        torch.manual_seed(0)
        self.model = Model(between).double()
        infos = [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in self.model.named_parameters()]
        self.engine = DataParallelEngine(infos, ParallelMesh(), DataParallelOptions(level="no_shard", bucket_size=20))
        self.tape = Tape()
        self.tape.enter()
        self.reasons: list[str] = []
        self.graphs = ModuleGraphs(
            self.parts([(f"layers.{i}", layer) for i, layer in enumerate(self.model.layers)], chained)
        )

    def parts(self, lane: list[Named], chained: bool = True) -> Parts:
        return Parts(
            [lane],
            chained,
            self.engine,
            torch.device("cpu"),
            self.tape,
            lambda count: [],
            nullcontext,
            lambda: [],
            2,
            self.reasons.append,
        )

    def run(self, batches: list[tuple[Tensor, Tensor, int]], in_flight: int) -> tuple[list[Tensor], list[Tensor]]:
        """Losses and gradients of a step: so many forwards first, then by turns."""
        with stale_gradients():
            self.engine.zero_grad()
        losses: list[Tensor] = []
        with self.engine.micro_batches(len(batches)):
            waiting: list[Tensor] = []
            for batch in batches:
                waiting.append(self.model(*batch))
                losses.append(waiting[-1].detach().clone())
                if len(waiting) == in_flight:
                    waiting.pop(0).backward()
            for loss in waiting:
                loss.backward()
        self.engine.finish_grad_sync()
        return losses, [gradient.clone() for gradient in self.engine.main_gradients.values]

    def __call__(self, rows: int = 5, count: int = 4, in_flight: int = 1, power: int = 1) -> int:
        """One step, checked; how many forwards were replayed in it."""
        draw = [(torch.randn(rows, 3).double(), torch.rand(4).double(), power) for _ in range(count)]
        self.model.eval()  # eagerly
        expected = self.run(draw, in_flight)
        self.model.train()
        before = self.graphs.replays
        self.graphs.begin_step(len(draw))
        found = self.run(draw, in_flight)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        return self.graphs.replays - before


@pytest.mark.parametrize("chained", [True, False])
def test_layers_are_recorded_once_for_every_micro_batch_in_flight(chained: bool) -> None:
    steps = Steps(chained)
    assert [steps() for _ in range(4)] == [0, 0, 12, 12]
    assert steps.graphs.graphs == 2 * 3
    assert [steps(in_flight=3) for _ in range(2)] == [12, 12]
    assert steps.graphs.graphs == 3 * 2 * 3
    assert steps(in_flight=2, count=7) == 21
    assert not steps.reasons


@pytest.mark.parametrize(
    "between",
    [
        lambda hidden: hidden * 2,
        lambda hidden: hidden[:3] if len(hidden) > 3 else hidden,
        lambda hidden: hidden.clone(),
    ],
    ids=["other", "part", "copy"],
)
def test_what_lies_between_layers_counts(between: Any) -> None:
    steps = Steps(between=between)
    assert [steps(in_flight=2) for _ in range(4)] == [0, 0, 12, 12]
    assert not steps.reasons


class Skip:
    """Later layers read the first one's output too."""

    calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 1:
            self.first = hidden
            return hidden
        return hidden + self.first.tanh()


def test_an_output_that_several_read() -> None:
    steps = Steps(between=Skip())
    assert [steps(in_flight=2) for _ in range(4)] == [0, 0, 12, 12]
    assert not steps.reasons


def test_other_forms_run_eagerly_and_come_back() -> None:
    steps = Steps()
    assert [steps() for _ in range(3)] == [0, 0, 12]
    assert steps(rows=6) == 0
    assert steps(power=2) == 0
    assert steps() == 12
    assert steps.reasons == ["layers.0 is called with arguments of a different form than when it was recorded"]


def test_a_change_of_the_model_is_recorded_anew() -> None:
    steps = Steps()
    for _ in range(3):
        steps()
    made = steps.tape.made
    steps.model.layers[1].linear.bias.requires_grad_(False)
    assert steps() == 12
    assert steps.tape.made == 2 * made
    assert len(steps.tape.tapes) == made


@pytest.mark.parametrize("number", [1, 4])
def test_a_recording_that_fails_leaves_nothing_behind(number: int) -> None:
    steps = Steps()
    steps.tape.fail_at = number
    replays = [steps() for _ in range(4)]
    assert replays[3] == 0
    (reason,) = steps.reasons
    assert "recording layers." in reason
    assert "not permitted when stream is capturing" in reason
    assert not steps.tape.tapes


def test_a_backward_needs_its_forward() -> None:
    steps = Steps()
    for _ in range(3):
        steps()
    steps.graphs.begin_step(1)
    steps.engine.zero_grad()
    loss = steps.model(torch.ones(5, 3).double(), torch.ones(4).double(), 1)
    loss.backward(retain_graph=True)
    with pytest.raises(MegalightError, match="has one backward per forward"):
        loss.backward()


def test_forwards_are_given_back() -> None:
    steps = Steps()
    for _ in range(3):
        steps()
    steps.graphs.close()
    assert not any("forward" in layer.__dict__ for layer in steps.model.layers)
    assert not steps.tape.tapes
    steps.model.layers[1].forward = lambda *args: None
    with pytest.raises(ConfigurationError, match=r"layers\.1 \(Layer\) has a forward that was set on the instance"):
        ModuleGraphs(steps.parts([(f"layers.{i}", layer) for i, layer in enumerate(steps.model.layers)]))
    assert "forward" not in steps.model.layers[0].__dict__, "a refused run has changed the modules before"

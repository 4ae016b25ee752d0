"""When a step is replayed, when it is not, and what is left of a recording that fails."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import MegalightError
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, ParamInfo
from megalight.parallel.graphs.fingerprint import Fingerprint, Inspection, Operation
from megalight.parallel.graphs.iteration import REMEMBERED, IterationGraphs
from megalight.parallel.graphs.recorder import no_collection
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.peers.spin import Watch
from megalight.parallel.shard import ShardSpec
from tests.parallel.data_parallel.stale import stale_gradients
from tests.parallel.graphs.tape import Tape
from tests.parallel.peers.test_spin import Flags


class Steps:
    """A linear model's steps, by graphs and eagerly side by side."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2)).double()
        infos = [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in self.model.named_parameters()]
        self.engine = DataParallelEngine(infos, ParallelMesh(), DataParallelOptions(level="no_shard"))
        self.tape = Tape()
        self.tape.enter()
        self.reasons: list[str] = []
        self.told: list[bool] = []
        self.calls = 0
        self.graphs = IterationGraphs(
            self.tape,
            self.engine,
            torch.device("cpu"),
            lambda values: values,
            Fingerprint([("", self.model)]),
            lambda: [],
            refuse=self.reasons.append,
            tell=self.told.append,
            **{"warmup_steps": 2, "max_graphs": 2, **options},
        )

    def passes(self, micro_batches: Any) -> dict[str, Tensor]:
        self.calls += 1
        with self.engine.micro_batches(len(micro_batches)):
            losses = [self.model(batch["x"]).square().sum() * batch["weight"] for batch in micro_batches]
            torch.stack(losses).sum().backward()
        self.engine.finish_grad_sync()
        return {"loss": torch.stack(losses).sum().detach()}

    def __call__(self, *rows: int, weight: float = 1.0, key: Any = "train") -> bool:
        """One step; whether it was replayed. Its loss and gradients are checked."""
        batches = [{"x": torch.randn(size, 3).double(), "weight": weight} for size in rows]
        self.engine.zero_grad()
        expected = self.passes(batches)["loss"], [gradient.clone() for gradient in self.engine.main_gradients.values]
        self.engine.zero_grad()
        before = self.graphs.replays
        found = self.graphs(key, batches, self.passes)["loss"]
        torch.testing.assert_close(found, expected[0], rtol=1e-14, atol=0)
        for mine, other in zip(self.engine.main_gradients.values, expected[1], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15)
        return self.graphs.replays > before


@pytest.fixture
def steps() -> Iterator[Steps]:
    with stale_gradients():
        yield Steps()


def test_replays_run_no_python_of_the_step(steps: Steps) -> None:
    assert [steps(4, 4) for _ in range(5)] == [False, False, True, True, True]
    calls = steps.calls
    steps(4, 4)
    assert steps.calls == calls + 1, "the eager one alone"
    assert steps.graphs.graphs == 1


def test_a_missing_peer_ends_the_steps_after_the_replay(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Flags(1, 4, 0x7F00), limit=2.5)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    assert [steps(4) for _ in range(3)] == [False, False, True]
    watch.missing[2] = 1  # a kernel in the graph has noted it
    with pytest.raises(MegalightError, match=r"rank 5 waited 2.5 s for data of rank 6, in vain"):
        steps(4)
    assert steps(4), "a run that begins anew hears nothing of it"


def test_another_form_is_another_graph_and_has_its_own_warm_up(steps: Steps) -> None:
    forms = [(4, 4), (4, 3), (4, 4, 4)]
    for form in forms[:2]:
        assert [steps(*form) for _ in range(3)] == [False, False, True]
    assert [steps(*form) for form in forms] == [True, True, False]
    assert [steps(4, 4, weight=2.0), steps(4, 4, key="other")] == [False, False], "host values belong to the form"
    assert steps.reasons == ["batches have more than max_graphs=2 forms; only the first ones are recorded"]


def test_mode_and_storage_and_frozen_parameters_are_seen(steps: Steps) -> None:
    for _ in range(3):
        steps(4)
    steps.model[1].eval()
    assert not steps(4)
    steps.model[1].train()
    assert steps(4)
    steps.model[2].bias.data = steps.model[2].bias.detach().clone()
    assert not steps(4)
    steps.model[1].register_buffer("scale", torch.ones(()))
    assert not steps(4)


def test_a_result_outlives_the_next_replay(steps: Steps) -> None:
    for _ in range(3):
        steps(4)
    batch = [{"x": torch.ones(4, 3).double(), "weight": 1.0}]
    steps.engine.zero_grad()
    first = steps.graphs("train", batch, steps.passes)["loss"]
    kept = float(first)
    steps(4)
    assert float(first) == kept


def test_batches_that_never_repeat_are_told_of(steps: Steps) -> None:
    for size in range(1, REMEMBERED + 3):
        assert not steps(size)
    assert "had different forms" in steps.reasons[0]
    assert [steps(1) for _ in range(3)] == [False, False, True], "and one that does is recorded all the same"


class Opaque:
    pass


def test_what_cannot_be_seen_is_refused(steps: Steps) -> None:
    batches = [{"x": torch.ones(2, 3).double(), "weight": 1.0, "more": Opaque()}]
    steps.engine.zero_grad()
    steps.graphs.prepare()
    steps.graphs("train", batches, steps.passes)
    assert steps.told == [True, False], "layers must not work as in recorded steps for ever"
    assert "type dict holds objects whose contents cannot be inspected" in steps.reasons[0]
    assert not any(steps(4) for _ in range(4)), "once and for all"


def test_a_recording_that_fails_leaves_nothing_behind(steps: Steps) -> None:
    steps.tape.fail_at = 1
    steps.graphs.prepare()
    states = torch.get_rng_state()
    assert [steps(4) for _ in range(5)] == [False] * 5
    assert steps.told == [True, False]
    assert "recording failed: RuntimeError: operation not permitted" in steps.reasons[0]
    assert len(steps.reasons) == 1
    torch.set_rng_state(states)
    assert steps.graphs.graphs == 0


def test_ranks_go_one_way_together() -> None:
    steps = Steps()
    others: dict[str, Any] = {"way": 0, "refused": 0}

    def agree(values: list[int]) -> list[int]:
        if len(values) == 1:
            return values
        way, _, refused = values
        return [max(way, others["way"]), -min(way, others["way"]), max(refused, others["refused"])]

    steps.graphs.agree = agree
    assert not any(steps(4) for _ in range(4)), "another rank is not as far"
    others["way"] = 2
    assert steps(4)
    others["way"] = 0
    assert not steps(4), "another rank has a form that it does not know"
    others |= {"way": 1, "refused": 1}
    assert not steps(4)
    others["refused"] = 0
    assert not steps(4), "refused for good"


def inspected(function: Any) -> list[str]:
    with Inspection(torch.device("cpu")) as inspection:
        function(torch.ones(4))
    return inspection.reasons


def test_inspection_finds_what_waits_for_the_device_and_says_where() -> None:
    for function, what in [
        (lambda x: x.sum().item(), "reads a value"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "indexes with a mask"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (lambda x: x.unique(), "unique"),
        (lambda x: torch.equal(x, x), "torch.equal"),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1])), "repeat_interleave"),
    ]:
        (reason,) = inspected(function)
        assert what in reason
        assert "at test_iteration.py" in reason
    assert inspected(lambda x: torch.where(x > 0, x, 0).sum() + x[torch.tensor([0, 1])].sum()) == []


def test_inspection_finds_draws_on_the_host() -> None:
    for function in (lambda x: random.random(), lambda x: np.random.rand()):
        assert inspected(function) == ["the step draws random numbers on the host, which replays would repeat"]


@pytest.mark.parametrize(("numbers", "changed"), [((1.0, 1.0), False), ((1.0, 2.0), True), ((math.nan,) * 2, False)])
def test_inspection_finds_numbers_that_change(numbers: tuple[float, float], changed: bool) -> None:
    earlier: list[Operation] = []
    for number in numbers:
        with Inspection(torch.device("cpu"), earlier) as inspection:
            torch.ones(4).masked_fill(torch.ones(4, dtype=torch.bool), number)
        earlier = inspection.numbers
    assert any("Python number that changes" in reason for reason in inspection.reasons) == changed


@pytest.mark.parametrize(("numbers", "changed"), [((1.0, 1.0), False), ((1.0, 2.0), True)])
def test_inspection_compares_after_an_operation_of_one_step_only(numbers: tuple[float, float], changed: bool) -> None:
    earlier: list[Operation] = []
    for step, number in enumerate(numbers):
        with Inspection(torch.device("cpu"), earlier) as inspection:
            x = torch.ones(4) if step else torch.zeros(4).sin()
            x.masked_fill(torch.ones(4, dtype=torch.bool), number)
        earlier = inspection.numbers
    assert bool(inspection.reasons) == changed


def test_inspection_keeps_what_was_there_before() -> None:
    table = torch.ones(4)
    with Inspection(torch.device("cpu")) as inspection:
        made = torch.zeros(4) + table
        made.mul_(2)
    assert [tensor is table for tensor in inspection.external.values()] == [True]


def test_garbage_is_not_collected_while_recording() -> None:
    seen = []

    @no_collection()
    def fails() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [*seen, gc.isenabled()] == [False, True]
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()
    gc.enable()

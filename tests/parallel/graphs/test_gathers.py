"""Replayed steps wait for parameters bucket by bucket, inside the recording, while gathers are on their way.

A gather happens here only when somebody waits for it. Until then the parameters of other ranks are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.data_parallel import gather as gathers
from megalight.parallel.graphs.fingerprint import Fingerprint
from megalight.parallel.graphs.iteration import IterationGraphs
from tests.parallel.data_parallel.helpers import assert_close, infos, mesh
from tests.parallel.data_parallel.stale import stale_gradients
from tests.parallel.graphs.tape import Recorded, Tape
from tests.support.workers import run

FORGOTTEN = 3
"""The bucket that one run does not wait for, in the order of the forward pass: the second bias."""


class Side:
    """A stream with gathers that have not happened yet."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    @contextmanager
    def after_computation(self) -> Iterator[None]:
        yield

    def uses(self, tensors: Any) -> None: ...

    def gather(self, whole: Tensor, own: Tensor, group: ProcessGroup) -> None:
        kept = own.clone()
        whole.fill_(torch.nan)
        own.copy_(kept)
        self.queue.append(lambda: REAL(whole, own, group))

    def until(self, place: int) -> None:
        while self.done < place:
            self.queue[self.done]()
            self.done += 1


REAL = gathers.gather_on_current_stream


class Run:
    """Steps of this rank with an optimizer; and the same on one device, with the batches of all ranks."""

    def __init__(self, forget: bool = False) -> None:
        side, tape = Side(), Tape()

        class Mark:
            count = 0

            def __init__(self, external: bool) -> None:
                assert external, "a recording could not wait for what comes later"
                self.number = Mark.count
                Mark.count += 1

            def record(self) -> None:
                self.place = len(side.queue)

            def wait(self) -> None:
                if forget and self.number == FORGOTTEN and tape.entries is not None:
                    return
                if tape.entries is None:
                    side.until(self.place)
                else:  # at each replay, up to where the mark is then
                    tape.entries.append(lambda loans: side.until(self.place))

        self.side, self.tape = side, tape
        self.model, self.alone = self._build(), self._build()
        with (
            patch.object(gathers, "side_stream", lambda device, needed, urgent=False: side if needed else None),
            patch.object(torch.cuda, "Event", Mark),
        ):
            self.engine = DataParallelEngine(infos(self.model), mesh(), DataParallelOptions(bucket_size=1))
        self.engine.parameters.attach_gather_hooks(self.model)
        self.optimizer = torch.optim.AdamW([shard.master for shard in self.engine.shards], lr=0.05)
        self.expected = torch.optim.AdamW(self.alone.parameters(), lr=0.05)
        tape.enter()
        self.graphs = IterationGraphs(
            tape,
            self.engine,
            torch.device("cpu"),
            _largest,
            Fingerprint([("", self.model)]),
            lambda: [],
            warmup_steps=2,
            max_graphs=2,
            refuse=pytest.fail,
        )
        self.draws = torch.Generator().manual_seed(5)
        self.engine.zero_grad()

    @staticmethod
    def _build() -> nn.Sequential:
        torch.manual_seed(7)
        # Blocks, because a module also waits for children that have none.
        return nn.Sequential(*(nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in [(5, 7), (7, 9), (9, 3)])).double()

    def passes(self, micro_batches: Any, last: bool) -> Any:
        total = torch.zeros((), dtype=torch.float64)
        with self.engine.micro_batches(len(micro_batches), last):
            for x in micro_batches:
                loss = self.model(x).square().sum()
                loss.backward()
                total += loss.detach()
        if last:
            self.engine.finish_grad_sync()
        return {"loss": total}

    def __call__(self, rows: int, last: bool = True) -> bool:
        """Run a step, and an update after the last one of a window; return whether it was replayed."""
        world, rank, before = dist.get_world_size(), dist.get_rank(), self.graphs.replays
        inputs = torch.randn(world, 2, rows, 5, generator=self.draws, dtype=torch.float64)
        pending = len(self.side.queue) - self.side.done
        seen: list[int] = []
        replay = Recorded.replay

        def watched(recorded: Recorded) -> None:
            seen.append(len(self.side.queue) - self.side.done)
            replay(recorded)

        with (
            patch.object(gathers, "gather_on_current_stream", self.side.gather),
            patch.object(Recorded, "replay", watched),
        ):
            found = self.graphs(last, list(inputs[rank]), lambda batches: self.passes(batches, last))["loss"]
            replayed = self.graphs.replays > before
            assert not replayed or seen == [pending], "nothing waited for all parameters before the replay"
            assert self.side.done == len(self.side.queue), "what follows the replay may read them"
            assert_close(found, torch.stack([self.alone(x).square().sum() for x in inputs[rank]]).sum().detach())
            self.alone(inputs).square().sum().backward()
            if last:
                self.optimizer.step()
                self.engine.publish()
                self.expected.step()
                self.expected.zero_grad()
                with stale_gradients():
                    self.engine.zero_grad()
        return replayed

    def end(self) -> None:
        self.engine.sync_parameters()
        for mine, other in zip(self.model.parameters(), self.alone.parameters(), strict=True):
            assert_close(mine.detach(), other.detach())
        self.graphs.close()


def _largest(values: list[int]) -> list[int]:
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return list(map(int, found))


def _waits_inside() -> None:
    steps = Run()
    ways = [steps(4) for _ in range(5)]
    assert ways == [False, False, True, True, True], ways
    entries = steps.tape.tapes[0].entries
    waits = [place for place, entry in enumerate(entries) if callable(entry)]
    products = [place for place, entry in enumerate(entries) if not callable(entry) and "addmm" in str(entry[0])]
    assert len(waits) == len(steps.engine.buckets) == 6
    first, second, third = products[:3]
    # Weight and bias of each layer before its product, and no earlier than behind the product before it.
    assert waits[1] < first < waits[2] < waits[3] < second < waits[4] < waits[5] < third, (waits, products)
    assert not steps(3), "another form, eagerly, with parameters on their way"
    assert steps(4), "and with those that an eager step has left on their way"
    steps.end()


def _waits_without_a_reduction() -> None:
    steps = Run()
    ways = [(steps(4, last=False), steps(4)) for _ in range(5)]
    assert ways == [(False, False)] * 2 + [(True, True)] * 3, ways
    steps.end()


def _reads_too_early() -> bool:
    steps = Run(forget=True)
    steps(4)
    steps(4)
    try:
        steps(4)
    except AssertionError:
        return True
    return False


def test_a_replay_waits_for_each_bucket_where_the_forward_pass_needs_it() -> None:
    run(_waits_inside, 2)


def test_steps_that_reduce_nothing_wait_as_well() -> None:
    run(_waits_without_a_reduction, 2)


def test_a_wait_that_is_left_out_shows() -> None:
    _, second = run(_reads_too_early, 2)
    assert second, "the first rank has all of so small a bucket itself"

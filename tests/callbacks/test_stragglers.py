import logging
import statistics

import pytest
import torch.distributed as dist

from megalight.callbacks import Throughput
from megalight.callbacks.throughput import RankWork, slowest
from megalight.errors import ConfigurationError
from megalight.strategies import MegatronStrategy
from tests.callbacks.clock import by_hand
from tests.callbacks.rows import Rows
from tests.callbacks.tiny import Tiny, tiny_trainer
from tests.strategies.training import ADAM, BASE, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run


def workers(*seconds, stages=None):
    return [RankWork(rank, each, (stages or [0] * len(seconds))[rank], "host/0") for rank, each in enumerate(seconds)]


def test_ranks_are_held_to_the_median_of_their_like():
    found = slowest(workers(1.0, 1.2, 1.0, 1.1, 0.9))
    assert [slow.worker.rank for slow in found] == [1, 3, 0, 2, 4]
    assert found[0].ratio == pytest.approx(1.2)
    assert found[0].median == 1.0
    staged = slowest(workers(1.0, 1.0, 1.3, 5.0, 5.0, 5.1, stages=[0, 0, 0, 1, 1, 1]))
    assert [slow.worker.rank for slow in staged[:2]] == [2, 5]
    assert slowest(workers(0.0, 0.0)) == []


@pytest.mark.parametrize(
    ("seconds", "ratio"),
    [((1.0, 1.3), 1.3), ((1.0, 1.0, 1.3), 1.3), ((1.0, 1.0, 1.3, 1.3), 1.3), ((2.0, 1.0, 1.4, 1.6), 2 / 1.4)],
)
def test_the_slow_rank_is_not_in_what_it_is_held_to(seconds, ratio):
    found = slowest(workers(*seconds))
    assert found[0].worker.seconds == max(seconds)
    assert found[0].ratio == pytest.approx(ratio)
    for slow in found:
        others = [each for rank, each in enumerate(seconds) if rank != slow.worker.rank]
        assert slow.median == statistics.median(others)
        assert slow.ratio == slow.worker.seconds / slow.median


def test_many_ranks():
    found = slowest([RankWork(rank, 1 + rank % 7, rank % 16, "host/0") for rank in range(16_384)])
    assert found[0].worker.seconds == 7


def test_alone_nobody_is_slow():
    logger, stragglers = Rows(), Throughput(stragglers=1.15, every_n_steps=3)
    tiny_trainer(callbacks=[stragglers], logger=logger).fit(Tiny())
    rows = logger.starting("straggler/")
    assert [step for step, _ in rows] == [3, 6, 9]
    assert all(row["straggler/ratio"] == 1 and row["straggler/rank"] == 0 for _, row in rows)
    assert 0 < rows[-1][1]["straggler/seconds"] == rows[-1][1]["straggler/median_s"]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_slow_rank_is_named(pipeline):
    (rows, ranks, words), *others = run(_slow, 4, pipeline)
    assert others == [(None, [], [])] * 3
    (row,) = rows
    assert row["straggler/rank"] == 2
    assert row["straggler/ratio"] == 4
    assert row["straggler/seconds"] == 4
    assert ranks[0] == 2
    (line,) = words
    assert line.startswith("slow ranks in steps 1 to 2: rank 2 on ")


def _slow(pipeline):
    class Slow(WithData):
        def forward_step(self, chunk, batch, carry=None):
            now.time += 4 if dist.get_rank() == 2 else 1
            return super().forward_step(chunk, batch, carry)

    words = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    log = logging.getLogger("megalight.callbacks.throughput")
    log.addHandler(handler)
    logger, stragglers = Rows(), Throughput(stragglers=1.15, every_n_steps=2)
    module = Slow(BASE, optimizer=ADAM, seed=SEED)
    runner = trainer(
        MegatronStrategy(pipeline_parallel=pipeline), callbacks=[stragglers], max_steps=3, limit_val_batches=0,
        use_distributed_sampler=False, logger=logger,
    )  # fmt: skip
    try:
        with by_hand() as now:
            runner.fit(module)
    finally:
        log.removeHandler(handler)
    rows = [row for _, row in logger.starting("straggler/")]
    return rows or None, [slow.worker.rank for slow in stragglers.slowest], words


def test_impossible_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="above 1"):
        Throughput(stragglers=1.0)

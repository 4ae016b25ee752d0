"""The gradients of a chunk are reduced as soon as its last micro-batch is through, while other chunks still work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest

from megalight.parallel.pipeline import executor
from megalight.strategies import DataParallelOptions, MegatronStrategy, PipelineOptions
from tests.strategies.training import ADAM, CONFIGS, SEED, WithData
from tests.support.environment import trainer
from tests.support.workers import run


def _log(config: str, schedule: str, bucket_size: int | None) -> list[tuple[str, int]]:
    """What a rank did in its second step: ("done", chunk) after each of its gradients, ("sent", chunk) per bucket."""
    log: list[tuple[str, int]] = []
    strategy = MegatronStrategy(
        pipeline_parallel=2,
        virtual_pipeline=2,
        micro_batch_size=1,
        data_parallel=DataParallelOptions(bucket_size=bucket_size),
        pipeline=PipelineOptions(schedule=schedule),  # type: ignore[arg-type]
    )
    run_type: Any = executor._Run
    originals = {name: getattr(run_type, name) for name in ("_backward", "_weight_gradient")}

    def noting(name: str) -> Any:
        def note(self: Any, chunk: int, index: int) -> None:
            originals[name](self, chunk, index)
            log.append(("done", chunk))

        return note

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            engine = strategy.engine
            assert engine is not None
            log.clear()
            send = engine.main_gradients._send

            def sent(bucket: Any) -> None:
                (chunk,) = {info.chunk for info in bucket.infos}
                log.append(("sent", chunk))
                send(bucket)

            engine.main_gradients._arrivals._send = sent

        def on_before_optimizer_step(self, *_: Any) -> None:
            log.append(("end", 0))

    with mock.patch.multiple(run_type, **{name: noting(name) for name in originals}):
        trainer(strategy, callbacks=[Watch()], max_steps=2, limit_val_batches=0, use_distributed_sampler=False).fit(
            WithData(replace(CONFIGS[config], num_layers=4), optimizer=ADAM, seed=SEED)
        )
    return log


@pytest.mark.parametrize(
    ("config", "schedule", "bucket_size"),
    [
        pytest.param("gqa", "interleaved", None, marks=pytest.mark.full),
        ("gqa", "interleaved", 500),
        ("tied", "zero_bubble", None),
    ],
)
def test_a_chunk_does_not_wait_for_the_others(config: str, schedule: str, bucket_size: int | None) -> None:
    for log in run(_log, 4, config, schedule, bucket_size):
        assert {chunk for what, chunk in log if what == "sent"} == {0, 1}
        through = max(place for place, entry in enumerate(log) if entry == ("done", 1))
        over = max(place for place, entry in enumerate(log) if entry == ("done", 0))
        assert through < over, "the other chunk has no work left to hide under"
        for place, (what, chunk) in enumerate(log):
            if (what, chunk) == ("sent", 1):
                assert place <= through, f"a bucket of chunk 1 waits: {log}"
            if (what, chunk) == ("sent", 0):
                assert place <= over, f"a bucket of chunk 0 waits: {log}"

"""Pipelines and context parallelism over NCCL: rows of the table on two and four GPUs, and no step that waits."""

from __future__ import annotations

import datetime
import functools
import os
import queue
import time
import traceback
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.strategies.test_layouts import MODELS, ZERO_BUBBLE, Row, options_of
from tests.strategies.training import assert_same_run, by_hand, fit
from tests.workers import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

ROWS = [
    Row("gqa", pp=2),
    Row("tied", pp=2, vpp=2, pipeline=ZERO_BUBBLE, packed=True),
    Row("gqa", 2, cp=2, kind="ring"),
    Row("tied", 2, cp=2, kind="all_to_all", packed=True),
    Row("gqa", 8, pp=4, vpp=2),
    Row("tied", 4, pp=2, tp=2, sp=True),
    Row("gqa", 4, pp=2, cp=2, kind="ring", pipeline=ZERO_BUBBLE),
    Row("mha", 2, cp=4, kind="all_to_all_ring", inner=2),
    Row("gqa", 2, cp=4, kind="all_gather"),
]
STRICT = [Row("gqa", 4, pp=2, vpp=2), Row("gqa", 2, cp=2, kind="ring")]
"""Rows that also run in bf16 with every wait for the device an error in the middle of the run."""
PATIENCE = 90.0
"""Seconds for one row."""


class Strict(pl.Callback):
    """Any wait of the host for the device is an error in some steps."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= batch_idx < 7 else "default")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _train(row: Row, strict: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"accelerator": "cuda"}
    if strict:
        options |= {"precision": "bf16-mixed", "log_every_n_steps": 1000}
    return fit(
        replace(MODELS[row.config], num_layers=row.layers),
        9 if strict else 3,
        options={"level": row.level},
        trainer_options=options,
        extra_callbacks=[Strict()] if strict else [],
        packed=row.packed,
        **options_of(row),
    )


def _rank(rank: int, world: int, port: int, work: list[tuple[Row, bool]], results: Any) -> None:
    """All rows of one world size in turn; the first rank tells how each ended."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("nccl", rank=rank, world_size=world, timeout=patience)
    for row, strict in work:
        try:
            found: Any = _train(row, strict)
        except Exception:
            results.put((rank, row, strict, traceback.format_exc()))
            raise
        if rank == 0:
            results.put((rank, row, strict, found))
    dist.destroy_process_group()


class Runs:
    """Every row that takes so many GPUs, one after another in processes of their own, each told of when it is done."""

    def __init__(self, world: int) -> None:
        work = [(row, False) for row in ROWS if row.world == world] + [
            (row, True) for row in STRICT if row.world == world
        ]
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.found: dict[tuple[str, bool], Any] = {}
        self.broken: str | None = None
        port = free_port()
        self.workers = [
            context.Process(target=_rank, args=(rank, world, port, work, self.results), daemon=True)
            for rank in range(world)
        ]
        for worker in self.workers:
            worker.start()

    def outcome(self, row: Row, strict: bool) -> Any:
        """A run, or the text of an error; after the first error there is nothing more."""
        last = time.monotonic()
        while (str(row), strict) not in self.found and self.broken is None:
            try:
                rank, done, how, outcome = self.results.get(timeout=1)
            except queue.Empty:
                if time.monotonic() > last + PATIENCE or not any(worker.is_alive() for worker in self.workers):
                    self.broken = f"nothing came of {row} or a row before it in {time.monotonic() - last:.0f} s"
                continue
            last = time.monotonic()
            self.found[str(done), how] = outcome
            if isinstance(outcome, str):
                self.broken = f"rank {rank}, {done}: {outcome}"
        if self.broken is not None:
            for worker in self.workers:
                worker.kill()
        return self.found.get((str(row), strict), self.broken)


runs = functools.cache(Runs)


def outcome(row: Row, strict: bool) -> dict[str, Any]:
    if torch.cuda.device_count() < row.world:
        pytest.skip(f"needs {row.world} GPUs")
    found = runs(row.world).outcome(row, strict)
    assert not isinstance(found, str), found
    return dict(found)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_layout_over_nccl_trains_the_same_model(row: Row) -> None:
    found = outcome(row, strict=False)
    model = replace(MODELS[row.config], num_layers=row.layers)
    assert_same_run(found, by_hand(model, device="cuda", packed=row.packed))


@pytest.mark.parametrize("row", STRICT, ids=str)
def test_no_step_waits_for_the_device(row: Row) -> None:
    assert len(outcome(row, strict=True)["losses"]) == 9

"""A run in which one rank fails in the midst of a step: ``python -m tests.strategies.failing ...``.

The ranks are the stages of a pipeline or, with ``--sharded``, hold shards of all parameters or of their stage's.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor, nn

from megalight.models.module import Carry
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy, launchers
from megalight.types import Loss
from tests.strategies.toy import ToyModule

MICRO_BATCH = 3
"""Which one it happens in, of the second step."""


class Failing(ToyModule):
    """Fails on one rank: in ``forward``, ``backward`` or ``loss``; or there is ``memory``: its backward runs out of
    memory; or ``kill``: it is killed in its forward; or ``stuck``: it raises there, and then whatever may wait for
    other ranks does so for ever; or ``orphans``: it is killed there, and the other ranks hear nothing of it.

    Args:
        file: where the time of the failure is written.
    """

    def __init__(self, where: str, rank: int, file: Path, rows: int) -> None:
        super().__init__(num_layers=4, rows=rows)
        self.where, self.at, self.file = where, rank, file
        self.seen = 0
        self.asleep = file.with_suffix(".asleep")

    def forward_step(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry | None = None) -> Carry:
        output = super().forward_step(model, batch, carry)
        due = self.trainer.global_rank == self.at
        self.seen += self.trainer.global_step == 1
        if self.where == "orphans" and not due and self.seen == MICRO_BATCH:
            self.asleep.touch()
            time.sleep(600)  # before it waits for the message that never comes
        if due and self.seen == MICRO_BATCH + 1:
            if self.where in ("backward", "memory"):
                output["hidden"].register_hook(lambda gradient: self.fail())
            elif self.where != "loss":
                self.fail()
        return output

    def loss_step(self, carry: Carry, batch: dict[str, Tensor]) -> Loss:
        if self.where == "loss" and self.seen == MICRO_BATCH + 1:
            self.fail()
        return super().loss_step(carry, batch)

    def fail(self) -> None:
        while self.where == "orphans" and not self.asleep.exists():
            time.sleep(0.1)
        self.file.write_text(str(time.time()))
        if self.where in ("kill", "orphans"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.where == "stuck":
            dist.destroy_process_group = CPUAccelerator.teardown = lambda *_: time.sleep(600)
        if self.where == "memory":
            raise torch.OutOfMemoryError(f"rank {self.at} has no memory left")
        raise ArithmeticError(f"pipeline rank {self.at} has had enough")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("where")
    parser.add_argument("pp", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--stages", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.where == "kill":
        # A rank of tests is behind a small program, which ends after it: on a busy machine more than half a second.
        launchers.SETTLE_SECONDS = 60.0
    pipeline = MegatronStrategy(pipeline_parallel=1 if a.sharded else a.pp, micro_batch_size=1)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(
        accelerator=a.accelerator,
        devices=a.pp,
        strategy=MegatronFSDPStrategy(micro_batch_size=1, pipeline_parallel=a.stages) if a.sharded else pipeline,
        max_steps=3,
        precision="64-true",
        limit_val_batches=0,
        use_distributed_sampler=False,
        enable_model_summary=False,
        default_root_dir=a.file.parent,
        **options,
    ).fit(Failing(a.where, a.rank, a.file, rows=6 * a.pp // a.stages if a.sharded else 6))


if __name__ == "__main__":
    main()

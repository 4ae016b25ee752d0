"""One short run, for tests of how it is started: ``python -m tests.strategies.launched FOLDER START [--again]``.

Rank 0 of the run writes its losses and the gathered weights to FOLDER; the process that called ``fit`` writes what it
has afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy, MegatronTowersStrategy
from tests.models.test_vlm_strategy import WithData as WithImages
from tests.models.vlm_samples import CONFIG
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, Losses, WithData, gathered, whole

STEPS = 3


class Witness(Losses):
    """Writes from rank 0 what the run itself saw."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = gathered(trainer.strategy, pl_module)
        if trainer.is_global_zero:
            np.savez(self.folder / "weights.npz", **weights)
            facts = {"losses": self.losses, "world_size": trainer.world_size, "pid": os.getpid()}
            (self.folder / "run.json").write_text(json.dumps(facts))


class Fails(pl.Callback):
    """Raises on one rank in the middle of a run, and writes down when."""

    def __init__(self, rank: int, file: str) -> None:
        self.rank = rank
        self.file = file

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, at: int) -> None:
        if at == 1 and trainer.global_rank == self.rank:
            Path(self.file).write_text(str(time.time()))
            raise ArithmeticError(f"rank {self.rank} has had enough")


class Noted(WithData):
    def checkpoint_files(self) -> dict[str, bytes]:
        return {"pid.txt": str(os.getpid()).encode()}


def new_trainer(folder: Path, start: str, max_steps: int, devices: int = 2, sharded: bool = False) -> pl.Trainer:
    kind = MegatronFSDPStrategy if sharded else MegatronStrategy
    layout = {} if sharded else {"tensor_parallel": devices, "sequence_parallel": devices > 1}
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=kind(**layout, micro_batch_size=2, start_method=start),
        precision="64-true",
        max_steps=max_steps,
        limit_val_batches=1,
        val_check_interval=STEPS,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
        plugins=[SLURMEnvironment(auto_requeue=False)] if "SLURM_NTASKS" in os.environ else None,
        callbacks=[
            Witness(folder),
            ModelCheckpoint(dirpath=folder / "checkpoints", filename="{step}", monitor="val_loss", save_last=True),
        ],
    )


def facts(trainer: pl.Trainer, module: WithData) -> dict[str, Any]:
    """What the process that called ``fit`` knows."""
    return {
        "pid": os.getpid(),
        "global_step": trainer.global_step,
        "state": str(trainer.state.status),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": trainer.checkpoint_callback.best_model_path,
        "best_score": float(trainer.checkpoint_callback.best_model_score or 0),
        "last": trainer.checkpoint_callback.last_model_path,
    }


def main(folder: Path, start: str, again: bool) -> None:
    torch.set_num_threads(1)
    module = Noted(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    trainer = new_trainer(folder, start, STEPS)
    trainer.fit(module)
    if trainer.is_global_zero:
        (folder / "after.json").write_text(json.dumps(facts(trainer, module)))
    if start in ("fork", "spawn"):
        np.savez(folder / "whole.npz", **whole(module.model))
        trainer.save_checkpoint(folder / "saved.ckpt")
    if again:
        (folder / "again").mkdir()
        second = new_trainer(folder / "again", start, STEPS)
        second.fit(module)
        np.savez(folder / "again" / "whole.npz", **whole(module.model))
        found = second.validate(module, verbose=False)
        found = {"validated": found, **facts(second, module)}
        (folder / "again" / "after.json").write_text(json.dumps(found))
        # On one device, in this process, and on two again.
        for name, devices in (("alone", 1), ("grown", 2)):
            (folder / name).mkdir()
            runner = new_trainer(folder / name, start, STEPS, devices)
            runner.fit(module)
            (folder / name / "after.json").write_text(json.dumps(facts(runner, module)))
        (folder / "sharded").mkdir()
        runner = new_trainer(folder / "sharded", start, STEPS, sharded=True)
        runner.fit(module)
        np.savez(folder / "sharded" / "whole.npz", **whole(module.model))
        runner.save_checkpoint(folder / "sharded" / "saved.ckpt")
        save_towers(folder / "towers", start)


def save_towers(folder: Path, start: str) -> None:
    """Train a vision tower on a rank of its own, and save in this process."""
    runner = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronTowersStrategy(placement="disjoint", micro_batch_size=1, start_method=start),
        max_steps=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    module = WithImages(CONFIG, optimizer=ADAM, seed=SEED)
    runner.fit(module)
    folder.mkdir()
    np.savez(folder / "whole.npz", **whole(module.model))
    runner.save_checkpoint(folder / "saved.ckpt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--again" in sys.argv)

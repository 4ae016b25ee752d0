"""A Trainer for ranks of the worker pool."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment

from megalight.strategies import MegatronStrategy


class PoolEnvironment(ClusterEnvironment):
    """A cluster environment with the ranks of the worker pool, which has made the process group already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        assert size == self.world_size()

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.global_rank()

    def local_rank(self) -> int:
        return self.global_rank()

    def node_rank(self) -> int:
        return 0


def trainer(strategy: MegatronStrategy, root: str = "/nonexistent", **options: Any) -> pl.Trainer:
    """Make a quiet CPU Trainer with as many devices as the job has ranks."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "precision": "64-true",
        "max_steps": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
        "num_sanity_val_steps": 0,
    }
    torch.manual_seed(0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # otherwise Lightning sets it for the first job's number of ranks
    return pl.Trainer(strategy=strategy, **{"plugins": [PoolEnvironment()], **defaults, **options})

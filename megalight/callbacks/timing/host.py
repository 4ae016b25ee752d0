"""Gathering Python values from all ranks through host memory, while the device goes on working."""

from __future__ import annotations

from typing import TypeVar

import lightning.pytorch as pl
import torch.distributed as dist

from megalight.strategies.collectives import Collectives

T = TypeVar("T")


class HostGather:
    """Gathers plain Python values from every rank to every rank. All ranks must create and call it together."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.world_size = trainer.world_size
        self.group: dist.ProcessGroup | None = None
        if self.world_size == 1:
            return
        # Our strategies have such a group already, and share it.
        if isinstance(trainer.strategy, Collectives):
            self.group = trainer.strategy.host_group()
        elif dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")

    def __call__(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

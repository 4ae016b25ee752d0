"""Checkpoints of a plain torch loop: all of a run in one folder, which any layout can load."""

from __future__ import annotations

import os
from typing import Any

from torch.optim import Optimizer

from megalight.checkpoint import loading, saving
from megalight.checkpoint.disk.manifest import FULLY_RESHARDABLE
from megalight.checkpoint.run import Run
from megalight.checkpoint.scheme import SCHEMES
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams


class PlainRun:
    """A run in a plain torch loop that can be saved and resumed.

    Attributes:
        model: the model that is trained.
        engine: its data-parallel engine.
        optimizer: steps on this rank's shards.
    """

    model: ParallelModel
    engine: DataParallelEngine
    optimizer: Optimizer

    def save(self, path: str | os.PathLike[str], **values: Any) -> None:
        """Write weights, optimizer state and random states as one folder, from all ranks; any layout can load it.

        Args:
            values: plain values to keep along (``step=100``); :meth:`load` returns them.
        """
        # Weights may still be gathered, and would be read half-way.
        self.engine.sync_parameters()
        run = self._run
        common = {"values": values, "optimizer": run.group_options()}
        views = SCHEMES[FULLY_RESHARDABLE](run.contents(optimizer=True))
        saving.save(path, views, common=common, rank_state=run.rank_state(), scheme=FULLY_RESHARDABLE)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a folder that :meth:`save` wrote under any layout; return the values that were kept along.

        Raises:
            CheckpointError: missing, torn, of another model or another optimizer.
        """
        self.engine.sync_parameters()
        saved, run = loading.open(path), self._run
        self.model.clear_padding()
        saved.fill(run.weight_targets(), prefix=self.model.prefix)
        # Before optimizer state is read: masters from the checkpoint then replace these.
        self.engine.refresh_masters()
        run.resume(saved)
        # Codes are cast from the masters, which are final now.
        self.engine.recast()
        return dict(saved.common.get("values", {}))

    @property
    def _run(self) -> Run:
        return Run(self.model, RandomStreams(self.model.mesh), self.engine, self.optimizer)

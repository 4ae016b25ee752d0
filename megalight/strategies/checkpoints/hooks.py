"""What Lightning asks of a strategy about checkpoints, answered with sharded folders that any layout can load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from megalight.checkpoint import remove
from megalight.errors import ConfigurationError
from megalight.parallel.trace import spanned
from megalight.strategies.checkpoints.hyperparameters import keep_plain
from megalight.strategies.checkpoints.resuming import Resumed, open_folder
from megalight.strategies.checkpoints.saving import save
from megalight.strategies.mesh_strategy import MeshStrategy


class FolderCheckpoints(MeshStrategy):
    """A strategy that saves canonical tensors, and reads them once there are places for them.

    Attributes:
        _setup_of: the module whose model is split and in its place; None: no model is yet.
        _resumed: the checkpoint that is being read.
        _left_out: hyperparameters that were left out and spoken of.
    """

    _setup_of: pl.LightningModule | None
    _resumed: Resumed | None
    _left_out: set[str]

    def sync_parameters(self) -> None:
        """Wait until every parameter holds the values of the last optimizer step."""
        if self.engine is not None:
            self.engine.sync_parameters()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part, by reference: :meth:`save_checkpoint` writes the canonical views instead."""
        self.sync_parameters()
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing to collect: the shards are written by canonical name."""
        return {}

    @spanned("checkpoint")
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded folder, from all ranks, that any layout can load."""
        if storage_options is not None:
            raise ConfigurationError("storage_options are not supported: checkpoints are local folders.")
        self.sync_parameters()
        save(self, keep_plain(checkpoint, self._left_out), self.broadcast(str(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a folder; tensors are read later, where they belong."""
        self._resumed = Resumed(open_folder(str(checkpoint_path)))
        return self._resumed.for_lightning()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read weights, once there is a split model to read them into: :meth:`setup` does so where there is none."""
        assert self._resumed is not None
        self._resumed.strict = strict
        if self._setup_of is not None:
            self.read_weights()

    def read_weights(self) -> None:
        """Read the weights of the checkpoint that is open; masters begin from them."""
        assert self._resumed is not None and self.parallel_model is not None
        self.sync_parameters()
        self._resumed.read_model(self)
        self.parallel_model.origin = None
        if self.engine is not None:
            self.engine.refresh_masters()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read masters, moments and random states."""
        assert self._resumed is not None
        self._resumed.read_optimizer(self)
        if self.engine is not None:
            self.engine.recast()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a folder, atomically."""
        if self.is_global_zero:
            remove(str(filepath))

"""The methods of a strategy that Lightning calls for checkpoints, which are sharded folders for any layout."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

from megalight.checkpoint import remove
from megalight.errors import ConfigurationError
from megalight.optim.sharded import shard_optimizer, sharding_of
from megalight.parallel.trace import spanned
from megalight.strategies.checkpoints.edits import Edits, edits_of
from megalight.strategies.checkpoints.hyperparameters import keep_plain
from megalight.strategies.checkpoints.resuming import Resumed, open_folder
from megalight.strategies.checkpoints.saving import save
from megalight.strategies.mesh_strategy import MeshStrategy

log = logging.getLogger(__name__)


class FolderCheckpoints(MeshStrategy):
    """A strategy that saves canonical tensors, and reads them as soon as the split model exists.

    Attributes:
        _setup_of: the module whose model is set up. None before that.
        _resumed: the checkpoint from which the run resumes, or None.
        _left_out: names of hyperparameters that are not saved, after a warning.
        _given: the ``state_dict`` that hooks of a save were given. None after the save.
    """

    _setup_of: pl.LightningModule | None
    _resumed: Resumed | None
    _left_out: set[str]
    _given: dict[str, Any] | None = None

    def sync_parameters(self) -> None:
        """Wait until every parameter has the values of the last optimizer step."""
        if self.engine is not None:
            self.engine.sync_parameters()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's part, not copied. :meth:`save_checkpoint` does not use it: it writes canonical tensors."""
        self.sync_parameters()
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict()
        self._given = dict(state)
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer on whole parameters, else nothing: shards are saved by canonical name."""
        return {} if self.engine is not None else dict(optimizer.state_dict())

    @spanned("checkpoint")
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a sharded folder from all ranks, which any layout can load."""
        if storage_options is not None:
            raise ConfigurationError("storage_options are not supported: checkpoints are local folders.")
        self.sync_parameters()
        path, given, self._given = self.broadcast(str(filepath)), self._given, None
        edits = Edits() if given is None else edits_of(given, checkpoint.get("state_dict", given))
        edits.check(self)
        with self._sharded():
            save(self, keep_plain(checkpoint, self._left_out), path, edits)
        self._tell("on_checkpoint_written", path)

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        """Put the optimizer on the engine's shards again, if the end of ``fit`` gave it its own parameters back."""
        if self.engine is None or sharding_of(self.optimizers[0]) is not None:
            yield
            return
        shard_optimizer(self.optimizers[0], self.engine)
        try:
            yield
        finally:
            sharding = sharding_of(self.optimizers[0])
            assert sharding is not None
            sharding.end()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a folder. Tensors are read later, directly into the parameters."""
        self._resumed = Resumed(open_folder(str(checkpoint_path)))
        return self._resumed.for_lightning(self)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Read weights if the split model exists. If not, :meth:`setup` reads them later."""
        assert self._resumed is not None
        self._resumed.strict = strict
        self._resumed.take(checkpoint.get("state_dict", {}))
        if self._setup_of is not None:
            self.read_weights()

    def read_weights(self) -> None:
        """Read the weights of the open checkpoint, and copy them to the master weights."""
        assert self._resumed is not None and self.parallel_model is not None
        self.sync_parameters()
        if self.engine is not None:
            self.engine.release_parameters()  # values are read into the shards
        self._resumed.read_model(self)
        self.parallel_model.origin = None
        if self.engine is not None:
            self.engine.refresh_masters()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read masters, moments and random states."""
        assert self._resumed is not None
        if self.engine is None:
            self._resumed.read_ordinary(self, self.optimizers)
            return
        self._resumed.read_optimizer(self)
        self._resumed.saved.release()
        self.engine.recast()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a folder atomically, unless another process reads it, or a file."""
        if not self.is_global_zero:
            return
        if os.path.isfile(filepath):
            os.remove(filepath)
        elif not remove(str(filepath)):
            log.warning("%s is being read, so it is not removed", filepath)
            return
        self._tell("on_checkpoint_removed", str(filepath))

    def _tell(self, event: str, path: str) -> None:
        """Call a method of the callbacks that have it, on all ranks."""
        if self.lightning_module is None:  # no callbacks are connected yet
            return
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            getattr(callback, event, _ignored)(trainer, self.lightning_module, path)


def _ignored(*_: Any) -> None:
    """Stand in for a method that a callback does not have."""

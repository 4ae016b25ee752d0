"""The methods of a strategy that Lightning calls for checkpoints, which are sharded folders for any layout."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import ProcessGroup

from megalight import checkpoint
from megalight import checkpoint as folders
from megalight.checkpoint import AsyncSaver
from megalight.checkpoint.async_save.saves import Kind, PendingSave
from megalight.checkpoint.disk.publish import forget_listings, place
from megalight.checkpoint.json_values import encode
from megalight.checkpoint.ranks import Ranks
from megalight.checkpoint.run import STATE
from megalight.checkpoint.saving import size_of
from megalight.errors import CheckpointError, ConfigurationError
from megalight.first_rank import only_first
from megalight.optim.configured import Configured
from megalight.optim.sharded import shard_optimizer, sharding_of
from megalight.parallel.trace import spanned
from megalight.strategies import _lightning
from megalight.strategies.checkpoints.resuming import Resumed, newer_than_last, open_saved
from megalight.strategies.checkpoints.saving import Edits, edits_of, save, views
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.validation import check_checkpoint_io

log = logging.getLogger(__name__)


class AsyncSaves:
    """The asynchronous saves of a run.

    Args:
        kind: see :data:`megalight.checkpoint.async_save.saves.Kind`.
        skip: skip a save while another is in progress. False: wait for the other.
        group: a group of all ranks that works on the host.
        zero: whether this is rank 0, which publishes, links and removes.
        remove: removes a checkpoint now.
        written: tells callbacks of a checkpoint, on all ranks.

    Attributes:
        saver: writes them.
    """

    def __init__(
        self,
        kind: Kind,
        skip: bool,
        group: ProcessGroup | None,
        zero: bool,
        remove: Callable[[str], None],
        written: Callable[[str], None],
    ) -> None:
        self.saver = AsyncSaver(kind, group)
        self._ranks = Ranks(group)
        self._skip = skip
        self._zero = zero
        self._remove = remove
        self._written = written
        self._links: list[tuple[str, str]] = []
        self._removals: dict[str, int] = {}  # path -> the save that must be published before
        self._asked = 0
        self._published = 0
        self._number = 0
        self._in_progress = 0
        self._late = ""

    def begin(self, path: str, views: Any, **values: Any) -> bool:
        """Start a save, on all ranks. False: it was skipped, because another is in progress.

        Raises:
            CheckpointError: on all ranks, if this one cannot start, or the previous one failed.
        """
        # An error of the save before comes up now, on all ranks, and not in the middle of the next one.
        self.check()
        asked, before = time.time(), self.saver.pending
        if before is not None and not self._skip:
            self.finish()  # before this save counts as asked for, or removals would no longer wait for it
        self._number += 1
        self._asked = self._number
        if self.saver.pending is not None:
            log.warning("%s is not saved: %s is still being written", path, self.saver.pending.path)
            return False
        late = "" if before is None else f"; it began {time.time() - asked:.2f} s late, after {before.path}"
        self.saver.save(path, views, **values)
        # The path is written again, so what was to be removed there must stay.
        self._removals.pop(path, None)
        self._in_progress, self._late = self._number, late
        return True

    def check(self) -> None:
        """At a step boundary, on all ranks: complete a save that has ended.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self.saver.ready():
            self._settled(self.saver.settle())

    def finish(self) -> None:
        """Wait for the save in progress, on all ranks.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self.saver.pending is not None:
            self._settled(self.saver.settle())

    def finish_alone(self) -> None:
        """Wait for the save in progress after training has failed, when other ranks may be gone."""
        pending = self.saver.settle_alone()
        if pending is not None:
            self._follow(pending)

    def abort(self) -> None:
        """Drop the save in progress, at once and on this rank alone. What it was to replace stays."""
        self.saver.abort()
        self._links.clear()
        self._removals.clear()

    def remove(self, path: str) -> None:
        """Remove a checkpoint, after the latest one is published."""
        if self._published >= self._asked:
            self._remove(path)
        else:
            self._removals[path] = self._asked

    def link(self, path: str, link: str) -> None:
        """Link to the checkpoint ``path`` as soon as that is published."""
        pending = self.saver.pending
        if pending is not None and str(pending.path) == os.path.abspath(path):
            self._links.append((path, link))
        elif os.path.exists(path):
            relink(path, link)

    def _settled(self, pending: PendingSave) -> None:
        # Rank 0 alone has links and removals, and must not leave the others when one fails.
        self._ranks.together(f"linking to {pending.path}", lambda: self._follow(pending))
        self._written(str(pending.path))

    def _follow(self, pending: PendingSave) -> None:
        """Do what follows a publication on this rank alone."""
        # Up to the save that was published. A save that was skipped since then has not replaced anything.
        self._published = self._asked = self._in_progress
        for path, link in self._links:
            relink(path, link)
        due = [path for path, number in self._removals.items() if number <= self._published]
        for path in due:
            del self._removals[path]
            self._remove(path)
        self._links.clear()
        # Rank 0 tells, after links and removals are done.
        if self._zero:
            message = "saved %s in %.2f s; training waited %.2f s for it%s"
            rank_zero_info(message, pending.path, pending.seconds, pending.waited, self._late)


def relink(path: str, link: str) -> None:
    """Make a link to a checkpoint in the same folder. It exists at every moment, if it did before."""
    place = Path(link)
    # Named by the process, so that two runs in one folder do not take each other's link.
    temporary = place.with_name(f"{place.name}.link-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    # Relative, so that the folder of checkpoints can be moved as a whole.
    temporary.symlink_to(os.path.relpath(path, place.parent))
    if place.is_dir() and not place.is_symlink():
        checkpoint.remove(place)
    # One rename: at no moment is there no link.
    os.replace(temporary, place)


log.addFilter(only_first)

ENTRIES = ("hyper_parameters", "datamodule_hyper_parameters")
"""Lightning's entries with hyperparameters."""


STATES_OF_WORKERS = ("optimizer_states", "lr_schedulers")
"""Lightning's entries that the process which called ``fit`` cannot fill if other processes trained."""


class FolderCheckpoints(MeshStrategy):
    """A strategy that saves canonical tensors, and reads them as soon as the split model exists.

    Attributes:
        _setup_of: the module whose model is set up. None before that.
        _resumed: the checkpoint from which the run resumes, or None.
        _left_out: names of hyperparameters that are not saved, after a warning.
        _given: the ``state_dict`` that hooks of a save were given. None after the save.
        _in_fit: whether saves may be asynchronous, and :meth:`end_saving` will follow.
        _async_saves: the asynchronous saves. None before the second step and the first save, and outside of ``fit``.
        _only_updates_write: whether nothing but the optimizer's update writes masters and states during ``fit``.
    """

    _setup_of: pl.LightningModule | None
    _resumed: Resumed | None
    _left_out: set[str]
    _given: dict[str, Any] | None = None
    _in_fit: bool = False
    _async_saves: AsyncSaves | None = None
    _only_updates_write: bool = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Lightning's plugin for single files, which is not used."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO | None) -> None:
        # The Trainer sets what it finds among its plugins.
        check_checkpoint_io(plugin)

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
            raise ConfigurationError(
                "storage_options are not supported: all ranks and their worker processes write a checkpoint. Leave "
                "them out, and set what remote storage needs in the environment."
            )
        back = self.handed_back
        if self._setup_of is None and (back is None or back.module is not self.lightning_module):
            raise ConfigurationError(
                f"cannot save {filepath}: the strategy is not set up, so there is no model to save yet. Save from the "
                "hook on_fit_start on, or after fit, validate, test or predict. (Ranks that are forked or spawned hand "
                "back a model after fit only.)"
            )
        if back is not None and "optimizer_states" in checkpoint:
            checkpoint = {name: value for name, value in checkpoint.items() if name not in STATES_OF_WORKERS}
            log.warning(
                "%s gets the weights and no optimizer state, which has ended with the processes that trained. No run "
                "resumes from it; a ModelCheckpoint saves both while they run.",
                filepath,
            )
        module = self._setup_of
        if module is not None and self._is_training and getattr(module.trainer, "fast_dev_run", False):
            return  # ModelCheckpoint(save_last=True) would save at the end, and later runs would take it
        # Weights may still be gathered, and edits are compared with what is there.
        self.sync_parameters()
        # The path of rank 0: a name with a time in it would differ between ranks.
        path, given, self._given = self.broadcast(str(filepath)), self._given, None
        edits = Edits() if given is None else edits_of(given, checkpoint.get("state_dict", given))
        edits.check(self)
        saves = self._make_async_saves()
        # The next step reads masters and states no earlier than it writes them, so these are copied during its passes.
        deferred: dict[str, Any] = {"later": _is_state} if self._only_updates_write and self._is_training else {}
        write = folders.save if saves is None else partial(saves.begin, **deferred)
        # States of the optimizer are saved by shard, so it must step on shards while it is read.
        with self._sharded():
            save(self, keep_plain(checkpoint, self._left_out), path, edits, write)
        if saves is None:
            self._notify("on_checkpoint_written", path)
        # After training no step follows that could take note of the end.
        elif not self._is_training:
            saves.finish()

    def begin_saving(self, trainer: pl.Trainer) -> None:
        """Note the hyperparameters, which are saved, and check the callbacks that save.

        Links wait for the checkpoints that they lead to.
        """
        self.configured = Configured.of(self.optimizers, self.lr_scheduler_configs)
        for callback in trainer.checkpoint_callbacks:
            # Refuses addresses that could only fail at the first save.
            place(getattr(callback, "dirpath", None) or "")
        self._in_fit = True
        if self.checkpoints.async_save is None:
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                warning = self.checkpoints.check_callback(callback.save_last, callback.save_top_k)
                if warning and self.is_global_zero:
                    log.warning(warning)
                _lightning.link_by(callback, self._link)

    def check_saves(self) -> None:
        """At a step boundary: complete an asynchronous save that has ended.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self._async_saves is not None:
            self._async_saves.check()
        elif self.checkpoints.async_save is not None and self.engine is not None and self._has_stepped:
            # States exist now, so the size of a save is known.
            saves = self._make_async_saves()
            assert saves is not None
            saves.saver.prepare(size_of(views(self, self._saves_states, Edits())))

    def fence_saves(self) -> None:
        """Let the next update wait for the copies of the save in progress. The host does not wait."""
        if self._async_saves is not None:
            self._async_saves.saver.fence()

    def finish_saves(self) -> None:
        """Wait until the asynchronous save is published. All ranks call it together.

        Raises:
            CheckpointError: on all ranks, if it failed.
        """
        if self._async_saves is not None:
            self._async_saves.finish()

    @property
    def save_under_way(self) -> PendingSave | None:
        """The asynchronous save that is not published yet, if there is one."""
        return None if self._async_saves is None else self._async_saves.saver.pending

    def abort_saves(self) -> None:
        """Kill the worker process of this rank at once and drop its save; published checkpoints stay.

        No collective: an in-process restarter calls it on each rank, in any thread. The next save starts a new worker.
        """
        if self._async_saves is not None:
            self._async_saves.abort()

    def end_saving(self, failed: bool) -> None:
        """Wait for the save in progress, stop the worker process and free its memory.

        Args:
            failed: training has failed, so other ranks may be gone: wait for what this rank's worker does.
        """
        self._in_fit = False
        # none where fit was refused before the module met its trainer
        trainer = _lightning.trainer_of(self.lightning_module)
        for callback in () if trainer is None else trainer.checkpoint_callbacks:
            _lightning.link_by(callback, None)
        saves, self._async_saves = self._async_saves, None
        if saves is None:
            return
        try:
            saves.finish_alone() if failed else saves.finish()
        finally:
            saves.saver.close()

    @property
    def _is_training(self) -> bool:
        """Whether ``fit`` is running, so that a save may end later."""
        assert self.lightning_module is not None
        state = self.lightning_module.trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    @property
    def _saves_states(self) -> bool:
        """Whether any callback will save states of the optimizer, as far as this is known before."""
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        return not callbacks or not all(getattr(callback, "save_weights_only", False) for callback in callbacks)

    @property
    def _has_stepped(self) -> bool:
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.global_step > 0)

    def _make_async_saves(self) -> AsyncSaves | None:
        kind = self.checkpoints.async_save
        # Lightning calls `on_fit_end` after the teardown: nobody would finish that save, or end its worker.
        if self._async_saves is None and kind is not None and self._in_fit:
            group = self.host_group() if self.world_size > 1 else None
            written = partial(self._notify, "on_checkpoint_written")
            skip = self.checkpoints.when_busy == "skip"
            self._async_saves = AsyncSaves(kind, skip, group, self.is_global_zero, self._remove, written)
        return self._async_saves

    def _link(self, trainer: pl.Trainer, path: str, link: str) -> None:
        """In place of ModelCheckpoint's own: link when the checkpoint is published."""
        saves = self._make_async_saves()
        assert saves is not None
        mine = self.is_global_zero and os.path.abspath(path) != os.path.abspath(link)
        # Together: callbacks read the link next, on all ranks.
        Ranks().together(f"linking {link}", lambda: saves.link(path, link) if mine else None)

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
        """Open a folder or a file. Tensors are read later, directly into the parameters."""
        # The save in progress may be the one that is loaded.
        self.finish_saves()
        # Names of files may hold metrics that differ between ranks. Those of rank 0 were written.
        checkpoint_path = self.broadcast(checkpoint_path)
        read: list[tuple[Resumed, dict[str, Any]]] = []

        def open_it() -> None:
            resumed = Resumed(open_saved(str(checkpoint_path), self.lightning_module))
            read.append((resumed, resumed.for_lightning(self)))

        # Storage may fail one rank alone, and the others would wait for it at the next collective.
        Ranks().together(f"opening {checkpoint_path}", open_it)
        ((self._resumed, entries),) = read
        if self.is_global_zero and (newer := newer_than_last(str(checkpoint_path))) is not None:
            log.warning(
                "%s is older than %s, which is finished too; give its path to resume from it", checkpoint_path, newer
            )
        return entries

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
        # The values are no longer those of the origin. Wider masters would be filled from it.
        self.parallel_model.origin = None
        if self.engine is not None:
            self.engine.refresh_masters()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Read masters, moments and random states."""
        assert self._resumed is not None
        if self.engine is None:
            self._resumed.read_unsharded(self, self.optimizers)
        else:
            self._resumed.read_optimizer(self)
            # Master weights have changed, and quantized weights are cast from them.
            self.engine.parameters.recast()
        assert self.configured is not None and isinstance(checkpoint, dict)
        self.configured = self._resumed.settle(self, self.configured, checkpoint)
        if self.micro_batches is not None:
            self.micro_batches.resumed()
        # All is read: the checkpoint may be removed from now on.
        self._resumed.saved.release()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a folder atomically, unless another process reads it, or a file.

        During an asynchronous save of a newer checkpoint, it stays until that one is published.
        """
        if not self.is_global_zero:
            return
        if self._async_saves is not None:
            self._async_saves.remove(str(filepath))
        else:
            self._remove(str(filepath))

    def _remove(self, filepath: str) -> None:
        try:
            if os.path.isfile(filepath):
                os.remove(filepath)
            elif not folders.remove(filepath):
                log.warning("%s is being read, so it is not removed", filepath)
                return
        except Exception as error:  # packages of stores have errors of their own
            # On rank 0 alone, which must not leave the others. What stays costs room only.
            log.warning("%s could not be removed; remove it yourself: %r", filepath, error)
            return
        self._notify("on_checkpoint_removed", filepath)

    def _notify(self, event: str, path: str) -> None:
        """Call a method of the callbacks that have it, on all ranks."""
        forget_listings(place(path))
        trainer = _lightning.trainer_of(self.lightning_module)
        for callback in () if trainer is None else trainer.callbacks:  # type: ignore[attr-defined]
            getattr(callback, event, _ignored)(trainer, self.lightning_module, path)


def keep_plain(checkpoint: dict[str, Any], warned: set[str]) -> dict[str, Any]:
    """Return the checkpoint dictionary without hyperparameters that cannot be stored.

    Objects (a loss function, a tokenizer, a config class) cannot be stored: a file must not run code when it is loaded.

    Args:
        warned: names with a warning already. New names are added.
    """
    kept = dict(checkpoint)
    for entry in ENTRIES:
        if entry in kept:
            values = {name: value for name, value in kept[entry].items() if _is_plain(value)}
            _warn_left_out(sorted(kept[entry].keys() - values.keys() - warned), warned)
            kept[entry] = values
    return kept


def _is_plain(value: Any) -> bool:
    try:
        encode(value, [])
    except CheckpointError:
        return False
    return True


def _warn_left_out(names: list[str], warned: set[str]) -> None:
    if names:
        warned.update(names)
        log.warning(
            "checkpoints leave out the hyperparameters %s: they are not plain values (numbers, strings, lists, dicts). "
            "Exclude them with save_hyperparameters(ignore=%s) to silence this.",
            ", ".join(names),
            names,
        )


def _is_state(name: str) -> bool:
    """Whether a view holds masters or optimizer state."""
    return name.startswith(STATE)


def _ignored(*_: Any) -> None:
    """Stand in for a method that a callback does not have."""

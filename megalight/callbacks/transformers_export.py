"""Folders of ``transformers`` beside the checkpoints of a run, or one when training ends."""

from __future__ import annotations

import logging
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from megalight import checkpoint
from megalight.callbacks.ema import EMA
from megalight.callbacks.stopping import Preemption
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.publish import check_new, delete, place
from megalight.checkpoint.ranks import Ranks
from megalight.errors import ConfigurationError
from megalight.models.family import family
from megalight.models.family.module import FamilyModule
from megalight.models.hugging_face.export import export
from megalight.models.stored import AVERAGE, averages_begun, open_model
from megalight.strategies.checkpoints.hooks import FolderCheckpoints

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersExport(pl.Callback):
    """Writes each checkpoint, or the last one, as a folder that ``from_pretrained`` of ``transformers`` loads.

    The folder of ``last.ckpt`` is ``last-hf``. All ranks write it: each reads whole tensors back from the checkpoint,
    one after another, so that no rank gathers the model. If a checkpoint is removed, its folder is removed too.

    A run that ``Preemption`` stopped writes no folder at its end: it has little time, and goes on later.

    Args:
        when: ``checkpoint``: after every checkpoint. ``end``: once, at the end of ``fit``, from the newest checkpoint.
        dtype: ``float32``, ``bfloat16`` or ``float16``. None: as the weights are stored.
        ema: write the moving averages of the weights, which the callback ``EMA`` keeps.
        folder: where the folder is written at the end, in place of beside the newest checkpoint. It must be new. It
            gets the weights of the last step: if no checkpoint has them, one is saved beside it and removed again.

    Raises:
        ConfigurationError: an argument is not one of these, the strategy or the model cannot be exported, or the run
            keeps no averages for ``ema``, or ends before they begin (in ``fit``, before training).
        CheckpointError: ``folder`` is there already, or cannot be written (in ``fit``, before training).
    """

    def __init__(
        self,
        when: Literal["checkpoint", "end"] = "end",
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        ema: bool = False,
        folder: str | None = None,
    ) -> None:
        if when not in ("checkpoint", "end"):
            raise ConfigurationError(f"when is {when!r}; it must be checkpoint or end.")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigurationError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}, or null.")
        if folder is not None and when == "checkpoint":
            raise ConfigurationError(
                f"folder is {folder!r} and when is 'checkpoint': the folders of checkpoints lie beside them. Leave "
                "folder out, or set when to end."
            )
        self.when = when
        self.dtype = dtype
        self.ema = ema
        self.folder = folder
        self._newest: str | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what could only fail after the first checkpoint is written."""
        # Evaluation writes no checkpoints.
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, FolderCheckpoints) or not isinstance(pl_module, FamilyModule):
            raise ConfigurationError(
                "TransformersExport reads the checkpoints of MegatronStrategy, of a module of a model family (such as "
                f"GPTModule); this run has {type(trainer.strategy).__name__} and {type(pl_module).__name__}."
            )
        if any(transform.training_only is None for transform in pl_module.transforms):
            raise ConfigurationError(
                "TransformersExport cannot write a model with adapters. Train first, then merge them (megalight merge) "
                "and convert the result (megalight convert)."
            )
        weights = family(pl_module.family).weights
        if weights is None:
            raise ConfigurationError(f"transformers has no models like those of the family {pl_module.family}.")
        # Raises if `transformers` cannot express the model.
        weights.write_config(pl_module.config, None)
        if self.folder is None and not trainer.checkpoint_callbacks:
            raise ConfigurationError(
                "TransformersExport writes beside checkpoints, and this run saves none. Add a ModelCheckpoint, or name "
                "a folder (--export_hf=FOLDER, or the argument folder)."
            )
        if self.ema:
            self._check_averages(trainer)
        self._check_places(trainer)

    def _check_averages(self, trainer: pl.Trainer) -> None:
        """Check that the checkpoints to export will have averages."""
        if not any(isinstance(each, EMA) for each in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigurationError(
                "TransformersExport(ema=True) writes moving averages of the weights, and this run keeps none. Add the "
                "callback EMA, or leave ema out."
            )
        # One with averages is saved for the folder, if need be.
        if self.folder is not None:
            return
        if any(getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks):
            raise ConfigurationError(
                "TransformersExport(ema=True) reads moving averages from checkpoints, and a ModelCheckpoint of this "
                "run saves weights alone. Leave save_weights_only out, or name a folder for the end (folder=...)."
            )

    def _check_places(self, trainer: pl.Trainer) -> None:
        """Check that all ranks can write where the folders will be."""
        dirpaths = [str(getattr(each, "dirpath", None) or "") for each in trainer.checkpoint_callbacks]
        for path in filter(None, [self.folder, *dirpaths]):
            if path.startswith("memory://") and trainer.world_size > 1:
                raise ConfigurationError(
                    f"{path} is memory of one process, and the {trainer.world_size} ranks write a folder together. "
                    "Give a folder, or remote storage that all of them reach."
                )
        if self.folder is not None:
            target = place(self.folder)
            Ranks().first(f"checking {target}", lambda: check_new(target))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse averages that begin after the last step.

        Only here the number of steps is known, and whether a checkpoint held averages that had begun.
        """
        averages = next((each for each in trainer.callbacks if isinstance(each, EMA)), None)  # type: ignore[attr-defined]
        if not self.ema or averages is None or averages.updates:
            return
        steps = trainer.estimated_stepping_batches
        if averages.start_step > steps:
            raise ConfigurationError(
                f"TransformersExport(ema=True) writes moving averages of the weights, which EMA begins at step "
                f"{averages.start_step} (start_step), and this run ends at step {steps}. Lower start_step, train more "
                "steps (max_steps, max_epochs), or leave ema out."
            )

    def on_checkpoint_written(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: str) -> None:
        """Write the folder of a finished checkpoint. The strategy calls this on all ranks."""
        self._newest = path
        if self.when != "checkpoint":
            return
        if self.ema and not averages_begun(checkpoint.open(path)):
            # Training goes on: a later checkpoint has them.
            rank_zero_info("%s has no folder of transformers: its moving averages have not begun", path)
            return
        self._export(path, folder_of(path))

    def on_checkpoint_removed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: str) -> None:
        """Remove the folder of a checkpoint that was removed."""
        if self.when != "checkpoint" or not trainer.is_global_zero:
            return
        try:
            delete(folder_of(path))
        except Exception as error:  # packages of stores have errors of their own
            # On rank 0 alone, which must not leave the others. What stays costs room only.
            log.warning("%s could not be removed; remove it yourself: %r", folder_of(path), error)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the folder of the newest checkpoint, or the one that was asked for."""
        if self.when != "end" or getattr(trainer, "fast_dev_run", False):
            return
        if any(isinstance(each, Preemption) and each.preempted for each in trainer.callbacks):  # type: ignore[attr-defined]
            log.info("no folder of transformers is written: the run was stopped, and goes on later")
            return
        if self.folder is not None:
            self._export_last_step(trainer, place(self.folder))
        elif self._newest is None:
            rank_zero_info("no folder of transformers is written: no checkpoint was saved in these steps")
        else:
            self._export(self._newest, folder_of(self._newest))

    def _export_last_step(self, trainer: pl.Trainer, folder: PathLike) -> None:
        """Write the weights of the last step, from a checkpoint that goes again if none has them."""
        newest, saved = self._newest, None
        if newest is None or not self._serves(checkpoint.open(newest), trainer.global_step):
            # Retention counts no checkpoints whose names begin with "last".
            newest = saved = str(folder.parent / f"last-for-{folder.name}.ckpt")
            # Averages are the state of a callback, which a checkpoint of weights lacks.
            trainer.save_checkpoint(saved, not self.ema)
            assert isinstance(trainer.strategy, FolderCheckpoints)
            trainer.strategy.finish_saves()
        self._export(newest, folder, overwrite=False)
        # Only now: if the folder cannot be written, the weights are still there.
        if saved is not None:
            # A rank reads it until its export returns, and rank 0 removes nothing that is being read.
            trainer.strategy.barrier()
            trainer.strategy.remove_checkpoint(saved)

    def _serves(self, saved: checkpoint.Checkpoint, step: int) -> bool:
        """Return whether a checkpoint has what is written of a step."""
        has_it = not self.ema or any(name.startswith(AVERAGE) for name in saved.tensors)
        return has_it and saved.common.get("global_step") == step

    def _export(self, path: str, folder: PathLike, overwrite: bool = True) -> None:
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        # All ranks together. Each reads the checkpoint back, so no rank gathers the model.
        export(open_model(path, ema=self.ema), folder, dtype=dtype, overwrite=overwrite)
        log.info("exported %s to %s", path, folder)


def folder_of(path: str) -> PathLike:
    """Return the folder of a checkpoint's export: ``last-hf`` for ``last.ckpt``."""
    return place(path.removesuffix(".ckpt") + "-hf")

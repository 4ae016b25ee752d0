"""Folders of ``transformers`` beside the checkpoints of a run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch

from megalight.errors import ConfigurationError
from megalight.models.export import export
from megalight.models.family import family
from megalight.models.family.module import FamilyModule
from megalight.models.stored import open_model
from megalight.strategies.mesh_strategy import MeshStrategy

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersExport(pl.Callback):
    """Writes each checkpoint, or the last one, as a folder that ``from_pretrained`` of ``transformers`` loads.

    The folder of ``last.ckpt`` is ``last-hf``. All ranks write it: each reads whole tensors back from the checkpoint,
    one after another, so that no rank gathers the model. If a checkpoint is removed, its folder is removed too.

    Args:
        when: ``checkpoint``: after every checkpoint. ``end``: once, at the end of ``fit``, from the newest checkpoint.
        dtype: ``float32``, ``bfloat16`` or ``float16``. None: as the weights are stored.
        ema: write the moving averages of the weights, which the callback ``EMA`` keeps.

    Raises:
        ConfigurationError: an argument is not one of these, or the strategy or the model cannot be exported (in
            ``fit``).
    """

    def __init__(self, when: Literal["checkpoint", "end"] = "end", dtype: str | None = None, ema: bool = False) -> None:
        if when not in ("checkpoint", "end"):
            raise ConfigurationError(f"when is {when!r}; it must be checkpoint or end.")
        if dtype is not None and dtype not in DTYPES:
            raise ConfigurationError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}, or null.")
        self.when = when
        self.dtype = dtype
        self.ema = ema
        self._newest: str | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what could only fail after the first checkpoint is written."""
        # Evaluation writes no checkpoints.
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, MeshStrategy) or not isinstance(pl_module, FamilyModule):
            raise ConfigurationError(
                "TransformersExport reads the checkpoints of MegatronStrategy, of a module of a model family (such as "
                f"GPTModule); this run has {type(trainer.strategy).__name__} and {type(pl_module).__name__}."
            )
        remote = [path for path in map(_dirpath, trainer.checkpoint_callbacks) if "://" in path]
        if remote:
            raise ConfigurationError(
                f"TransformersExport writes beside checkpoints on this machine, and {remote[0]} is remote storage. "
                "Keep checkpoints in a folder, or copy one to a folder and convert it (megalight convert)."
            )
        if pl_module.transforms:
            raise ConfigurationError(
                "TransformersExport cannot write a model with adapters. Train first, then merge them (megalight merge) "
                "and convert the result (megalight convert)."
            )
        weights = family(pl_module.family).weights
        if weights is None:
            raise ConfigurationError(f"transformers has no models like those of the family {pl_module.family}.")
        # Raises if `transformers` cannot express the model.
        weights.write_config(pl_module.config, None)

    def on_checkpoint_written(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: str) -> None:
        """Write the folder of a finished checkpoint. The strategy calls this on all ranks."""
        self._newest = path
        if self.when == "checkpoint":
            self._export(path)

    def on_checkpoint_removed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, path: str) -> None:
        """Remove the folder of a checkpoint that was removed."""
        if self.when == "checkpoint" and trainer.is_global_zero:
            shutil.rmtree(folder_of(path), ignore_errors=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the folder of the newest checkpoint."""
        if self.when == "end" and self._newest is not None:
            self._export(self._newest)

    def _export(self, path: str) -> None:
        dtype = None if self.dtype is None else DTYPES[self.dtype]
        # All ranks together. Each reads the checkpoint back, so no rank gathers the model.
        export(open_model(path, ema=self.ema), folder_of(path), dtype=dtype, overwrite=True)
        log.info("exported %s to %s", path, folder_of(path))


def _dirpath(callback: pl.Callback) -> str:
    return str(getattr(callback, "dirpath", None) or "")


def folder_of(path: str) -> Path:
    """Return the folder of a checkpoint's export: ``last-hf`` for ``last.ckpt``."""
    return Path(path.removesuffix(".ckpt") + "-hf")

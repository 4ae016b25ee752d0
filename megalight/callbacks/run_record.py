"""What a run is: a record beside its logs, and a summary of the whole model."""

from __future__ import annotations

import datetime
import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

from megalight import __version__
from megalight.imports import version
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.whole_model import whole_model

PACKAGES = ("torch", "lightning", "torchmetrics", "jsonargparse", "numpy", "safetensors", "tokenizers", "triton",
            "transformers", "transformer-engine", "flash-attn", "nvidia-modelopt")  # fmt: skip


FIRST = b"started:"
"""What a record begins with."""

log = logging.getLogger(__name__)


class RunRecord(pl.Callback):
    """Writes ``run.yaml`` into the log folder when a stage starts, so that you know what produced the logs.

    A file of this name that is no such record is left as it is.

    Args:
        filename: name of the file in the log folder.
    """

    def __init__(self, filename: str = "run.yaml") -> None:
        self.filename = filename
        self._path: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the record on rank 0, unless there is no log folder or ``fast_dev_run`` is on."""
        folder = log_folder(trainer)  # a broadcast inside: every rank must call it
        if folder is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = Path(folder) / self.filename
        if path.exists() and not path.read_bytes().startswith(FIRST):
            # Without a logger the folder is that of all runs, or the current one, where recipes lie.
            log.warning("%s is no record of a run, so none is written there; give RunRecord another filename", path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(describe(trainer), sort_keys=False))
        self._path = path

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the checkpoint from which the run resumes, which Lightning knows only now."""
        if self._path is not None and trainer.ckpt_path:
            with self._path.open("a") as file:
                file.write(yaml.safe_dump({"resumed_from": os.fspath(trainer.ckpt_path)}))


def log_folder(trainer: pl.Trainer) -> str | None:
    """Return the folder of this run's logs. All ranks call it together.

    Lightning gives the root folder of all runs for loggers that it does not know, where runs would overwrite each
    other's files. Here those runs have the folders in which ModelCheckpoint puts their checkpoints.
    """
    logger = trainer.loggers[0] if trainer.loggers else None
    # These have folders of their own, which Lightning knows.
    if logger is None or logger.save_dir is None or isinstance(logger, CSVLogger | TensorBoardLogger):
        folder: str | None = pl.Trainer.log_dir.fget(trainer)  # type: ignore[attr-defined]
        return folder
    # Loggers name versions by number or by text.
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return trainer.strategy.broadcast(os.path.join(logger.save_dir, str(logger.name), version))


def describe(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the record as plain strings and numbers."""
    device = trainer.strategy.root_device
    mesh = getattr(trainer.strategy, "mesh", None)
    record: dict[str, Any] = {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "strategy": type(trainer.strategy).__name__,
        "layout": mesh.describe() if mesh is not None else f"{trainer.world_size} ranks",
        "precision": str(trainer.precision),
        "nodes": trainer.num_nodes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}: {cpu_name()}",
        "versions": {"python": platform.python_version(), "megalight": __version__},
    }
    record["versions"] |= {name: found for name in PACKAGES if (found := version(name)) is not None}
    if torch.version.cuda:
        record["versions"]["cuda"] = torch.version.cuda
    return record


def cpu_name() -> str:
    """Return the model of the processor, as far as the system knows it."""
    # `platform` knows the architecture, and on Linux not the model.
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class WholeModelSummary(ModelSummary):
    """Prints the parameters of the whole model when a stage starts, by the model's largest parts.

    Lightning's own summary counts what one rank holds, and layers only. This one counts the one-device model, and says
    which part of it rank 0 holds.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary on rank 0."""
        if trainer.is_global_zero and self._max_depth:
            print(render(pl_module, trainer, self._max_depth), flush=True)


def render(module: pl.LightningModule, trainer: pl.Trainer, max_depth: int = 1) -> str:
    """Return the summary as text, with so many levels of parts; -1: all."""
    strategy = trainer.strategy
    whole = whole_model(module, strategy.parallel_model if isinstance(strategy, MeshStrategy) else None)
    rows = [
        (name, type(part).__name__, _count(part.parameters()))
        for name, part in whole.named_modules()
        if name and (max_depth < 0 or name.count(".") < max_depth)
    ]
    total, trainable = _count(whole.parameters()), _count(p for p in whole.parameters() if p.requires_grad)
    held = _count(module.parameters())
    width = max((len(name) for name, *_ in rows), default=0)
    kind = max((len(kind) for _, kind, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {cls:<{kind}}  {_short(count):>8}" for name, cls, count in rows if count]
    frozen = "all trainable" if trainable == total else f"{_short(trainable)} trainable"
    layout = f" ({strategy.mesh.describe()})" if isinstance(strategy, MeshStrategy) else ""
    part = f"; rank 0 holds {_short(held)}{layout}" if held != total else ""
    return "\n".join([f"{type(module).__name__}: {_short(total)} parameters, {frozen}{part}", *lines])


def _count(parameters: Iterable[nn.Parameter]) -> int:
    # By identity: a tied parameter counts once.
    return sum(parameter.numel() for parameter in {id(parameter): parameter for parameter in parameters}.values())


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)

"""Checkpoints of a strategy: one sharded folder with Lightning's entries and canonical tensors.

:mod:`saving` writes a checkpoint, :mod:`resuming` reads it into a run or into a module of one process. :mod:`hooks` has
the methods of a strategy that Lightning calls for checkpoints. :class:`CheckpointOptions` says how a strategy writes
checkpoints, and resumes from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalight.checkpoint import SCHEMES
from megalight.checkpoint.async_save.saves import KINDS, Kind
from megalight.checkpoint.disk.manifest import DP_RESHARDABLE, FULLY_RESHARDABLE
from megalight.errors import ConfigurationError, nearest

RETIRED = {
    "fully_sharded_model_space": FULLY_RESHARDABLE,
    "fully_sharded_bucket_space": DP_RESHARDABLE,
    "dp_zero_gather_scatter": FULLY_RESHARDABLE,
    "torch_dist": FULLY_RESHARDABLE,
    "zarr": FULLY_RESHARDABLE,
}
"""Names of formats of Megatron-core -> ours that serves in their place."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How checkpoints are written, and what a run that resumes takes from one.

    Attributes:
        format: ``fully_reshardable``: any layout resumes from any other. ``dp_reshardable``: optimizer state as in the
            flat shards; the split of the weights (tensor and expert parallelism) must stay the same.
            ``fsdp_dtensor``: as the first, in files that ``torch.distributed.checkpoint.load`` reads. A run resumes
            from each, whatever it writes.
        async_save: a step waits for the copy to host memory only. ``persistent``: one worker process per rank serves
            the whole run. ``per_save``: one for each save. None: training waits for the disk.
        when_busy: with ``async_save``, what a save does while another is in progress: ``wait`` for it, or ``skip`` this
            one. Saves at the end of training, before a load and by ``Preemption`` always wait.
        resume_optimizer: which hyperparameters a resumed run uses, if those of the checkpoint differ from those that
            ``configure_optimizers`` sets. ``configured``: changed ones (learning rate, weight decay, betas, ...) are
            the configured ones, the learning rate follows the configured schedule at the current step, and the log
            shows old and new. ``saved``: all are those of the checkpoint, also the schedule, if it is one of
            Megalight's. None: as under Lightning's own strategies those of the checkpoint, with the configured
            functions of schedules; a warning names the difference. The ``megalight`` command means ``configured``.

    Raises:
        ConfigurationError: there is no such format, way to save, or choice.
    """

    format: str = FULLY_RESHARDABLE
    async_save: Kind | None = None
    when_busy: Literal["wait", "skip"] = "wait"
    resume_optimizer: Literal["configured", "saved"] | None = None

    def __post_init__(self) -> None:
        if self.format in RETIRED:
            raise ConfigurationError(
                f"checkpoints.format is {self.format!r}, a format of Megatron-core; use {RETIRED[self.format]!r}."
            )
        for name, choices in (
            ("format", tuple(SCHEMES)),
            ("async_save", (None, *KINDS)),
            ("when_busy", ("wait", "skip")),
            ("resume_optimizer", (None, "configured", "saved")),
        ):
            if (value := getattr(self, name)) not in choices:
                words = [each or "null" for each in choices]
                raise ConfigurationError(
                    f"checkpoints.{name}={value!r}; it must be one of {', '.join(words)}." + nearest(str(value), words)
                )
        if self.when_busy == "skip" and self.async_save is None:
            raise ConfigurationError(
                "checkpoints.when_busy='skip' does nothing without async_save: no save is ever in progress; choose "
                "async_save='persistent', or leave it out."
            )

    def check_callback(self, save_last: object, save_top_k: int) -> str:
        """Return a warning for users of a ModelCheckpoint with these options, or nothing.

        Raises:
            ConfigurationError: ``last.ckpt`` would never be saved.
        """
        if self.async_save is None or save_last is not True or save_top_k == 0:
            return ""
        if self.when_busy == "skip":
            raise ConfigurationError(
                "ModelCheckpoint(save_last=True) saves each checkpoint twice, and checkpoints.when_busy='skip' always "
                "skips the second. Set save_last='link': last.ckpt then links to the latest checkpoint."
            )
        return (
            "ModelCheckpoint(save_last=True) saves each checkpoint twice, and with checkpoints.async_save the second "
            "waits for the first. With save_last='link', last.ckpt links to the latest checkpoint instead."
        )

"""All private attributes of Lightning that Megalight uses. A test checks that each one still exists."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
)
from lightning.pytorch.loops.progress import _OptimizationProgress
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput as WorkerOutput
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_summary.model_summary import _format_summary_table as format_summary
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import SyncBatchNorm

from megalight.attachments import overridden, restore

logger = logging.getLogger(__name__)

__all__ = [
    "IS_INTERACTIVE",
    "USED",
    "MultiProcessingLauncher",
    "SIGTERMException",
    "SigtermAgreement",
    "SubprocessScriptLauncher",
    "WorkerOutput",
    "attribute_for_batch",
    "attributes_for_rate",
    "fire",
    "format_summary",
    "log",
    "skip_backward",
    "sync_layers",
    "trainer_of",
    "zero_grad",
]

USED = {
    "trainer.fit_loop._skip_backward": "training_step runs the backward itself",
    "trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor": "a device sync per step, replaced by an agreement",
    "trainer.fit_loop.epoch_loop.automatic_optimization._on_before_zero_grad": "hooks and counters before zeroing",
    "trainer.fit_loop.epoch_loop.automatic_optimization._optimizer_zero_grad": "the module's hook, and a counter",
    "trainer._signal_connector._sigterm_notifier_fn": "issues a collective inside a signal handler",
    "trainer._signal_connector._slurm_sigusr_handler_fn": "saves and requeues the job, inside a signal handler",
    "trainer._accelerator_connector.use_distributed_sampler": "turned off where all ranks read the same loader",
    "trainer.received_sigterm": "read and set at step boundaries",
    "trainer._signal_connector.received_sigterm": "the field behind trainer.received_sigterm",
    "lightning.fabric.utilities.imports._IS_INTERACTIVE": "whether this is a notebook",
    "strategies.launchers._MultiProcessingLauncher": "handing a sharded model back from workers",
    "strategies.launchers._SubprocessScriptLauncher": "checking the number of processes that a launcher started",
    "strategies.launchers.multiprocessing._WorkerOutput": "what workers hand back",
    "strategy._layer_sync": "what Trainer(sync_batchnorm=True) asks for",
    "strategy._launcher": "set by _configure_launcher, as Lightning's strategies do",
    "strategy._precision_plugin": "the field behind strategy.precision_plugin",
    "strategy._configure_launcher": "called by the Trainer to make the launcher",
    "call._call_callback_hooks": "fires the hooks around the backward that Lightning skips",
    "call._call_lightning_module_hook": "the same for the module's own hooks",
    "lightning.pytorch.loops.progress._OptimizationProgress": "the count of steps in checkpoints of other libraries",
    "trainer._results": "where LightningModule.log puts values",
    "trainer._logger_connector.should_reset_tensors": "whether they are those of an earlier epoch",
    "trainer._logger_connector._current_fx": "the hook that logged last, noted by LightningModule.log",
    "lightning.pytorch.callbacks.ModelCheckpoint._link_checkpoint": "makes last.ckpt a link to the newest checkpoint",
    "lightning.pytorch.callbacks.ModelCheckpoint._save_topk_checkpoint": "saves the last step of a run",
    "lightning.pytorch.callbacks.ModelCheckpoint._save_last_checkpoint": "the same as last.ckpt",
    "lightning.pytorch.callbacks.ModelCheckpoint._save_checkpoint": "the same where metrics decide what is kept",
    "lightning.pytorch.callbacks.ModelCheckpoint._get_metric_interpolated_filepath_name": "the name of that one",
    "lightning.pytorch.callbacks.ModelCheckpoint._monitor_candidates": "metrics in names of checkpoints",
    "model_checkpoint._last_global_step_saved": "whether the last step is saved already",
    "model_checkpoint._last_checkpoint_saved": "the path of the last step",
    "lightning.pytorch.callbacks.ModelCheckpoint._find_last_checkpoints": "what ckpt_path='last' chooses from",
    "lightning.pytorch.callbacks.RichProgressBar._get_train_description": "counts Epoch 0/-2 where steps end the run",
    "lightning.pytorch.callbacks.ModelSummary._summary": "counts what one rank holds",
    "lightning.pytorch.utilities.model_summary.model_summary._format_summary_table": "the table of ModelSummary",
    "learning_rate_finder._update_attr": "whether it changes the module",
    "learning_rate_finder._attr_name": "the attribute that it changes",
    "batch_size_finder._batch_arg_name": "the attribute that it changes",
    "strategy._lightning_module": "set by the Trainer before it looks at the module",
    "module._compiler_ctx": "whether its steps are compiled",
    "module._trainer": "the field behind module.trainer, which may be None",
    "module._current_fx_name": "the hook that is running; part of the name under which a value is kept",
}


def fire(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a hook on callbacks, then on the LightningModule, as Lightning's loops do."""
    call._call_callback_hooks(trainer, hook, *args)
    call._call_lightning_module_hook(trainer, hook, *args)


def log(module: pl.LightningModule, name: str, value: Tensor, prog_bar: bool = False) -> None:
    """Do ``module.log(name, value, prog_bar, batch_size=1)`` for a 0-dim tensor without a graph.

    Only the first call in a hook uses ``module.log``. Later calls write to the same place directly, because
    ``module.log`` repeats its checks and copies its records, which takes a millisecond.
    """
    results, fx, connector = module.trainer._results, module._current_fx_name, module.trainer._logger_connector
    key, own = f"{fx}.{name}", type(module).log is not pl.LightningModule.log
    # The first value under a key makes the record, and at the beginning of an epoch Lightning empties old ones.
    if own or fx is None or results is None or key not in results or connector.should_reset_tensors(fx):
        module.log(name, value, prog_bar=prog_bar, batch_size=1)
    else:
        results.update_metrics(key, value, 1)
        connector._current_fx = fx


def trainer_of(module: pl.LightningModule | None) -> pl.Trainer | None:
    """Return the module's trainer, or None where there is no module or trainer. ``module.trainer`` would raise."""
    return None if module is None else module._trainer


def is_compiled(module: pl.LightningModule) -> bool:
    """Return whether the Trainer was given what ``torch.compile(module)`` returns."""
    return module._compiler_ctx is not None


def attributes_for_rate(finder: LearningRateFinder) -> tuple[str, ...]:
    """Return the attributes of a module, any of which takes the rate that is found; none if it is only reported."""
    if not finder._update_attr:
        return ()
    return (finder._attr_name,) if finder._attr_name else ("lr", "learning_rate")


def attribute_for_batch(finder: BatchSizeFinder) -> str:
    """Return the attribute of a module, or of its data, that takes the size of a batch."""
    return finder._batch_arg_name


def sync_layers(strategy: ParallelStrategy, module: pl.LightningModule, group: ProcessGroup | None) -> None:
    """Replace batch norms by synchronized ones, for ``Trainer(sync_batchnorm=True)``.

    Args:
        group: the ranks that see different samples; None: there is one.
    """
    if strategy._layer_sync is None or (group is None and strategy.world_size > 1):
        return
    strategy._layer_sync.apply(module)
    for layer in module.modules():
        # A group cannot be copied with its module, and all ranks are what None means.
        if isinstance(layer, SyncBatchNorm) and group is not dist.group.WORLD:
            layer.process_group = group


def keep_loaders(trainer: pl.Trainer) -> None:
    """Leave loaders as they are: Lightning would shuffle each whose ranks share losses, also if all read the same."""
    trainer._accelerator_connector.use_distributed_sampler = False


def resume_accumulation(trainer: pl.Trainer) -> None:
    """Set the number of batches per step, which the callback for it sets only where an epoch starts."""
    trainer.accumulate_grad_batches = _window(trainer, trainer.current_epoch)


def begin_window(trainer: pl.Trainer, loops: dict[str, Any]) -> dict[str, Any]:
    """Return the state of loops without the batches of a step that was not complete: no checkpoint has their gradients.

    Lightning counts them as done, and would make the step from the gradients of the others.
    """
    fit = loops["fit_loop"]
    batches = fit["epoch_loop.batch_progress"]
    window = _window(trainer, fit["epoch_progress"]["current"]["processed"])
    lost = 0 if batches["is_last_batch"] else batches["current"]["processed"] % window
    if not lost:
        return loops
    counts = {
        kind: dict.fromkeys(batches[kind], batches[kind]["processed"] - lost) for kind in ("total", "current")
    }  # all as after a batch that has ended
    return {**loops, "fit_loop": {**fit, "epoch_loop.batch_progress": {**batches, **counts}}}


def _window(trainer: pl.Trainer, epoch: int) -> int:
    """Return how many batches make a step in an epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches


def zero_grad(trainer: pl.Trainer, optimizer: Any) -> None:
    """Call and count what Lightning does to zero gradients. It skips this when it skips the backward."""
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    optimization._on_before_zero_grad(optimizer)
    optimization._optimizer_zero_grad(trainer.fit_loop.batch_idx, optimizer)


def skip_backward(trainer: pl.Trainer, skip: bool) -> None:
    """Let Lightning's automatic optimization run only ``training_step``, without ``zero_grad`` and ``backward``."""
    trainer.fit_loop._skip_backward = skip


def link_by(callback: Any, link: Callable[[pl.Trainer, str, str], None] | None) -> None:
    """Let a ModelCheckpoint make its links with ``link``; None: with its own method again."""
    restore(callback, "_link_checkpoint")
    if link is not None:
        callback._link_checkpoint = link


@contextmanager
def finding_last_by(callback: Any, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Let a ModelCheckpoint replace each path that it finds for ``ckpt_path="last"``, and then find as before."""
    # As this instance finds them: somebody may have given it a way of its own. No lambda: spawned ranks get their
    # callbacks by pickle.
    with overridden(callback, _find_last_checkpoints=partial(_replaced, callback._find_last_checkpoints, replace)):
        yield


def _replaced(find: Callable[[pl.Trainer], set[str]], replace: Callable[[Any], Any], trainer: pl.Trainer) -> set[Any]:
    return {replace(path) for path in find(trainer)}


def summarize(
    trainer: pl.Trainer,
    counted: Callable[[pl.LightningModule], pl.LightningModule] | None,
    shown: Callable[[ModelSummary], Callable[..., None]],
) -> None:
    """Let Lightning's summaries show figures by ``shown(callback)``, and count what ``counted`` makes of the module.

    Args:
        counted: None: the module itself is counted.
    """
    for callback in _summaries(trainer):
        if counted is not None:
            callback._summary = partial(_summary, callback, counted)  # type: ignore[method-assign]
        callback.summarize = shown(callback)  # type: ignore[method-assign]


def summarize_as_before(trainer: pl.Trainer) -> None:
    """Take back :func:`summarize`."""
    for callback in _summaries(trainer):
        restore(callback, "_summary", "summarize")


def _summaries(trainer: pl.Trainer) -> list[ModelSummary]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, ModelSummary)]


def _summary(callback: Any, counted: Callable[[Any], Any], trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    return type(callback)._summary(callback, trainer, counted(module))


def count_no_epochs(trainer: pl.Trainer, on: bool) -> None:
    """Let Lightning's bar for rich terminals say ``Epoch 0`` where steps end the run; it says ``Epoch 0/-2``."""
    bar, name = trainer.progress_bar_callback, "_get_train_description"
    if isinstance(bar, RichProgressBar):
        restore(bar, name)
        own = type(bar)._get_train_description is not RichProgressBar._get_train_description
        if on and trainer.max_epochs == -1 and not own:
            setattr(bar, name, partial(_epoch, bar))


def _epoch(bar: RichProgressBar, current_epoch: int) -> str:
    # As wide as the bar of validation, or the lines flicker.
    return f"Epoch {current_epoch}".ljust(len(bar.validation_description))


def entries_at(step: int) -> dict[str, Any]:
    """Return what Lightning asks of a checkpoint after ``step`` optimizer steps that it did not count itself."""
    progress = _OptimizationProgress()
    progress.optimizer.step.total.ready = progress.optimizer.step.total.completed = step
    loops = {
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.automatic_optimization.optim_progress": progress.state_dict(),
    }
    # No schedules: they are set to the step when they exist.
    return {"pytorch-lightning_version": pl.__version__, "loops": {"fit_loop": loops}, "lr_schedulers": []}


FIRST_STEPS = 10
"""At so many steps of a run, ranks ask each other at each: runs as short as these end at SIGTERM, too."""


def end_after_step(trainer: pl.Trainer) -> None:
    """Let the run end after the step that is running, as by SIGTERM. Safe in a signal handler."""
    agreement = getattr(trainer.strategy, "_sigterm", None)
    if isinstance(agreement, SigtermAgreement):
        agreement.told = True
    # Several ranks of ours agree first.
    if trainer.world_size == 1 or agreement is None:
        trainer._signal_connector.received_sigterm = True


def has_saved(callback: ModelCheckpoint, trainer: pl.Trainer) -> bool:
    """Return whether a ModelCheckpoint has saved the newest step."""
    return callback._last_global_step_saved == trainer.global_step


def save_last_step(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Let a ModelCheckpoint save the newest step in its way, and return the path.

    What it keeps by a metric stays: the metric it knows is of an earlier step. An epoch that the end of the run has cut
    is saved as one that goes on: Lightning counts it as done.
    """
    loop = trainer.fit_loop
    counts: list[Any] = [loop.epoch_progress.total, loop.epoch_progress.current]
    cut = counts[0].completed == counts[0].ready and not loop.epoch_loop.batch_progress.is_last_batch
    for count in counts if cut else ():
        count.processed, count.completed = count.processed - 1, count.completed - 1
    try:
        return _save_by(callback, trainer)
    finally:
        for count in counts if cut else ():
            count.processed, count.completed = count.processed + 1, count.completed + 1


def _save_by(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    candidates = callback._monitor_candidates(trainer)
    if callback.monitor in (None, "step"):
        callback._save_topk_checkpoint(trainer, candidates)
    if callback.save_last is not True and not has_saved(callback, trainer):
        callback._save_checkpoint(trainer, callback._get_metric_interpolated_filepath_name(candidates, trainer))
    callback._save_last_checkpoint(trainer, candidates)
    return callback._last_checkpoint_saved


class SigtermAgreement:
    """Handles SIGTERM and SLURM's requeueing without a device sync per step and without work in the signal handler.

    The handlers only set flags. Every ``every_n_steps`` steps, all ranks combine their flags. If SIGTERM has reached
    any rank, all ranks stop at the same step boundary with Lightning's own ``SIGTERMException``; for this, they also
    ask at each of the first steps. If SLURM has announced the end of the job to any rank, all ranks save there, and
    Lightning requeues the job. Training goes on until it ends.

    Args:
        agree: combines a flag over all ranks on the host: True if any is True.
        finish_saves: waits for a save beside training.
    """

    def __init__(
        self, trainer: pl.Trainer, agree: Callable[[bool], bool], finish_saves: Callable[[], None], every_n_steps: int
    ) -> None:
        self.trainer = trainer
        self.agree = agree
        self.finish_saves = finish_saves
        self.every_n_steps = every_n_steps
        self.told = False
        self._calls = 0
        self._steps = 0
        self._requeue: Callable[..., None] | None = None
        self._announced = 0

    def install(self) -> None:
        """Replace Lightning's per-step broadcast and its signal handlers, on this trainer only."""
        connector = self.trainer._signal_connector
        connector._sigterm_notifier_fn = self._handle  # type: ignore[method-assign,assignment]
        self.trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._check  # type: ignore[method-assign]
        environment = self.trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue = connector._slurm_sigusr_handler_fn
            connector._slurm_sigusr_handler_fn = self._announce  # type: ignore[method-assign,assignment]

    def tell(self, exception: BaseException) -> None:
        """Say that SIGTERM ended the run. Its exit code is 0, as under Lightning's own strategies."""
        if isinstance(exception, SIGTERMException) and self.trainer.is_global_zero:
            logger.warning(
                "a signal ended the run after step %d. It resumes from its last checkpoint (ckpt_path='last'); the "
                "callbacks FinalCheckpoint and Preemption save one then.",
                self.trainer.global_step,
            )

    def uninstall(self) -> None:
        """Restore Lightning's own methods."""
        for owner in (self.trainer._signal_connector, self.trainer.fit_loop.epoch_loop):
            restore(owner, "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn", "_broadcast_sigterm_tensor")

    def at_step(self) -> None:
        """Before the first batch of an optimizer step: save and requeue the job if SLURM has announced its end."""
        if self._requeue is None:
            return
        self._steps += 1
        # Alone, nobody is asked; else all ranks ask at the same steps.
        if (self.trainer.world_size == 1 or self._steps % self.every_n_steps == 0) and self.agree(self._announced > 0):
            number, self._announced = self._announced or signal.SIGUSR1, 0
            self.finish_saves()  # or this save might be left out, because another is under way
            self._requeue(number, None)
            self.finish_saves()  # the job may be ended at any time from here on

    def _announce(self, signum: int, frame: Any) -> None:
        self._announced = signum

    def _handle(self, signum: int, frame: Any) -> None:
        # pass the signal on once to the processes that this one started
        launcher = self.trainer.strategy.launcher
        if not self.told and launcher is not None:
            launcher.kill(signal.Signals(signum))
        self.told = True
        # a single process needs no agreement with other ranks
        if self.trainer.world_size == 1:
            self.trainer._signal_connector.received_sigterm = True

    def _check(self) -> None:
        self._calls += 1
        due = self._calls <= FIRST_STEPS or self._calls % self.every_n_steps == 0
        if due and self.agree(self.told):
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException


UNWANTED = ("Tip: For seamless", "Trainer already configured with model summary")
"""What marks Lightning's advertisements, and its notice that a callback of ours stands where one of its own would."""


def silence() -> None:
    """Drop advertisements and notices of Lightning, and warnings about its own code. Doing it twice is harmless."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_wanted)
    # Lightning 2.6 uses a class that torch 2.13 deprecates
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    # every run has its own folder, so a resumed one always has another than the checkpoint names
    warnings.filterwarnings("ignore", r"The dirpath has changed from", UserWarning)


def _wanted(record: logging.LogRecord) -> bool:
    return not any(mark in record.getMessage() for mark in UNWANTED)

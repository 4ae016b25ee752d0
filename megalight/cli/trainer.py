"""Lightning's Trainer with the defaults of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerStatus

from megalight.callbacks import CUDAGraph
from megalight.callbacks.run_record import log_folder
from megalight.cli.checks.lightning_rules import check_strategy
from megalight.cli.checks.trainer_rules import check_loggers, check_trainer, half_on_cpu
from megalight.cli.classes import subclasses
from megalight.cli.run_folder import claim
from megalight.errors import ConfigurationError, nearest
from megalight.imports import has
from megalight.loggers import JSONLogger
from megalight.strategies.mesh_strategy import MeshStrategy

GPUS = {"gpu": (CUDAAccelerator, MPSAccelerator), "cuda": (CUDAAccelerator,), "mps": (MPSAccelerator,)}
"""Name of an accelerator -> Lightning's kinds that it means."""

DEFAULT_LOG_INTERVAL = 50
"""Lightning's ``log_every_n_steps``, if none is given."""


class MegalightTrainer(pl.Trainer):
    """The Trainer of ``megalight fit``, ``validate``, ``test`` and ``predict``. All other arguments are Lightning's.

    Args:
        strategy: a strategy, or the name of a registered one.
        precision: Lightning's; 16 bits without a GPU are refused instead of being replaced by bfloat16.
        logger: a logger, or names of loggers with commas between them (``json,csv``). They write into one folder,
            ``<default_root_dir>/lightning_logs/version_N``. None and True mean ``csv,tensorboard``.
        limit_train_batches: number of training batches per epoch (``1``), or a share of them (``1.0``: all).
        limit_val_batches: the same for validation.
        limit_test_batches: the same for ``test``.
        limit_predict_batches: the same for ``predict``.
        cuda_graphs: ``auto``: replay steps from CUDA graphs if the first steps show that this is faster
            (``CUDAGraph(scope="auto")``); the log says which. ``off``: do not try.

    Attributes:
        shortened: lines for the log of ``fit``: intervals that were longer than the run, and what became of them.

    Raises:
        ConfigurationError: no strategy or logger has this name, or an argument has a value that Lightning would accept
            silently or refuse with another cause.
    """

    def __init__(
        self,
        *,
        strategy: Strategy | str = "auto",  # `Strategy` comes first, so that jsonargparse reads a bare name as a class
        logger: Logger | list[Logger] | bool | str | None = None,
        # `int` first: Lightning writes the same, but `typing` may return an equal union that was written as float | int
        # elsewhere. The command then reads 1 (one batch) as 1.0 (all batches).
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        cuda_graphs: Literal["auto", "off"] = "auto",
        **kwargs: Any,
    ) -> None:
        kwargs |= {
            "limit_train_batches": limit_train_batches,
            "limit_val_batches": limit_val_batches,
            "limit_test_batches": limit_test_batches,
            "limit_predict_batches": limit_predict_batches,
        }
        if isinstance(strategy, str):
            check_strategy_name(strategy)
        # Before Lightning sees the values, because it accepts some of them silently.
        check_values(kwargs)
        # After the checks: what is changed here is no mistake.
        within, self.shortened = within_run(kwargs)
        kwargs |= within
        if logger is None or logger is True:
            logger = "csv,tensorboard" if has("tensorboard") else "csv"
        self._named: str | None = None
        if isinstance(logger, str):
            self._named = logger
            logger = named_loggers(logger, kwargs.get("default_root_dir") or ".")
        # One way to be requeued: our scripts do it when `Preemption` has stopped the run.
        if isinstance(strategy, MeshStrategy) and SLURMEnvironment.detect():
            kwargs["plugins"] = with_slurm(kwargs.get("plugins"))
        super().__init__(strategy=strategy, logger=logger, **kwargs)
        if cuda_graphs == "auto" and not any(isinstance(callback, CUDAGraph) for callback in self.callbacks):  # type: ignore[attr-defined]
            # In front: ModelCheckpoint must stay last.
            self.callbacks.insert(0, CUDAGraph("auto"))  # type: ignore[attr-defined]

    @property
    def log_dir(self) -> str | None:
        """The folder of this run's logs; also with loggers for which Lightning gives one folder for all runs.

        Lightning asks for it on all ranks when a run begins. Named loggers take a folder of their own then.
        """
        if self.state.status == TrainerStatus.RUNNING:
            self._claim()
        return log_folder(self)

    def _claim(self) -> None:
        """Make the folder of named loggers on rank 0, once, and use its number on all ranks."""
        names, self._named = self._named, None
        root, logger = self.default_root_dir, self.logger
        # `fast_dev_run` has replaced them; storage behind a URL has no folders that only one run can make.
        if names is None or not isinstance(logger, CSVLogger | TensorBoardLogger) or "://" in root:
            return
        version = logger.version
        if self.is_global_zero:
            version = claim(logger.root_dir, int(version))
        version = self.strategy.broadcast(version)
        if version != logger.version:
            self.loggers = named_loggers(names, root, version)


LOGGERS: dict[str, Callable[[str, Any], Logger]] = {
    "csv": lambda root, version: CSVLogger(root, version=version),
    "json": lambda root, version: JSONLogger(root, version=version, flush_logs_every_n_steps=1),
    "tensorboard": lambda root, version: TensorBoardLogger(root, version=version),
}
"""Loggers by the names that ``--trainer.logger`` takes."""


def named_loggers(names: str, root: str, version: int | str | None = None) -> list[Logger]:
    """Make loggers by name, with commas between the names. They share one version folder.

    Args:
        names: the names.
        root: folder for logs.
        version: number of the version folder. None: one above those that are there.

    Raises:
        ConfigurationError: a name is unknown.
    """
    loggers: list[Logger] = []
    for name in check_loggers(names):
        # One version folder for all: the first logger has found a free one.
        loggers.append(LOGGERS[name](root, loggers[0].version if loggers else version))
    return loggers


def check_strategy_name(name: str) -> None:
    """Check that ``name`` is ``auto`` or the name of a registered strategy.

    Raises:
        ConfigurationError: it is not; the message has the nearest name.
    """
    registered = StrategyRegistry.available_strategies()
    classes = [cls.__name__ for cls in subclasses(Strategy)]
    if "." in name:  # the parser has made an object of every import path that leads to a strategy
        raise ConfigurationError(
            f"trainer.strategy = {name!r} is no import path of a strategy.{nearest(name.rpartition('.')[2], classes)}"
        )
    check_strategy(name, ("auto", *registered), classes)


def with_slurm(plugins: Any) -> list[Any]:
    """Return the plugins with SLURM's environment, without Lightning's requeueing, unless an environment is given.

    The scripts of ``megalight launch`` requeue the job when :class:`~megalight.callbacks.Preemption` has saved and
    stopped the run.
    """
    # The user's own environment decides, whatever it is.
    given = list(plugins) if isinstance(plugins, list | tuple) else [] if plugins is None else [plugins]
    if any(isinstance(plugin, ClusterEnvironment) for plugin in given):
        return given
    return [*given, SLURMEnvironment(auto_requeue=False)]


def check_values(arguments: Mapping[str, Any]) -> None:
    """Refuse values of Trainer arguments that Lightning would accept silently, or refuse with another cause.

    Raises:
        ConfigurationError: with the value, the rule and the next step.
    """
    check_trainer(arguments)
    if (named := arguments.get("accelerator")) in GPUS and not any(kind.is_available() for kind in GPUS[named]):
        built = "for CPUs only" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise ConfigurationError(
            f"trainer.accelerator is {named}, and torch finds none on this machine (torch {torch.__version__} is built "
            f"{built}). Leave it out, or set cpu; megalight doctor shows what there is."
        )
    if str(arguments.get("precision") or "").startswith("16") and _without_gpu(arguments.get("accelerator", "auto")):
        raise half_on_cpu(arguments["precision"])


def within_run(arguments: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Shorten intervals that are longer than a run of ``max_steps`` to it.

    A recipe that is tried for a few steps then validates and logs at its end.

    Returns:
        the intervals, and a line for the log about each.
    """
    steps = arguments.get("max_steps") or -1
    within: dict[str, int] = {}
    lines: list[str] = []
    if steps < 1:
        return within, lines
    run = f"the run (max_steps={steps})"
    batches = steps * (arguments.get("accumulate_grad_batches") or 1)
    every = arguments.get("val_check_interval")
    # `True` is an int in Python, and a fraction is a part of an epoch.
    if isinstance(every, int) and not isinstance(every, bool) and every > batches:
        lines.append(f"val_check_interval={every} is longer than {run}, which is validated at its end")
        within["val_check_interval"] = batches
    logged = arguments.get("log_every_n_steps")
    logged = DEFAULT_LOG_INTERVAL if logged is None else logged
    if logged > steps:
        lines.append(f"log_every_n_steps={logged} is longer than {run}, whose last step is logged")
        within["log_every_n_steps"] = steps
    return within, lines


def _without_gpu(accelerator: Any) -> bool:
    """Return whether Lightning would choose the CPU."""
    return accelerator == "auto" and not (CUDAAccelerator.is_available() or MPSAccelerator.is_available())

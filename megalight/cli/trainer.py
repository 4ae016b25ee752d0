"""Lightning's Trainer with the defaults of the command line."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from megalight.cli.explain import subclasses
from megalight.errors import ConfigurationError, nearest
from megalight.imports import has


class MegalightTrainer(pl.Trainer):
    """The Trainer of ``megalight fit``, ``validate``, ``test`` and ``predict``. All other arguments are Lightning's.

    Args:
        strategy: a strategy, or the name of a registered one.
        logger: None and True mean CSV and TensorBoard files in one folder,
            ``<default_root_dir>/lightning_logs/version_N``.

    Raises:
        ConfigurationError: no strategy has this name.
    """

    def __init__(
        self,
        *,
        strategy: Strategy | str = "auto",  # `Strategy` comes first, so that jsonargparse reads a bare name as a class
        logger: Logger | list[Logger] | bool | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(strategy, str):
            check_strategy_name(strategy)
        if logger is None or logger is True:
            logger = default_loggers(kwargs.get("default_root_dir") or ".")
        super().__init__(strategy=strategy, logger=logger, **kwargs)


def default_loggers(root: str) -> list[Logger]:
    """Return a CSV logger and, if TensorBoard is installed, its logger. They share one new version folder."""
    csv = CSVLogger(root)
    loggers: list[Logger] = [csv]
    if has("tensorboard"):
        loggers.append(TensorBoardLogger(root, version=csv.version))
    return loggers


def check_strategy_name(name: str) -> None:
    """Check that ``name`` is ``auto`` or the name of a registered strategy.

    Raises:
        ConfigurationError: it is not; the message has the nearest name.
    """
    registered = StrategyRegistry.available_strategies()
    if name.lower() in ("auto", *registered):
        return
    classes = {cls.__name__ for cls in subclasses(Strategy)}
    raise ConfigurationError(
        f"trainer.strategy = {name!r} is not a known strategy.{nearest(name, [*classes, *registered])} "
        "Give a strategy class (such as MegatronStrategy, with its arguments under trainer.strategy), or a registered "
        "name such as auto, ddp, megatron."
    )

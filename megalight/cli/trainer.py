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
    """The Trainer of ``megalight fit`` and its sister commands.

    Args:
        strategy: a strategy, or the name of a registered one. (``Strategy`` comes first in the annotation: so a bare
            class name on the command line is that class, not an unknown string.)
        logger: None and True mean CSV and TensorBoard files in one folder,
            ``<default_root_dir>/lightning_logs/version_N``.

    Everything else is Lightning's.
    """

    def __init__(
        self,
        *,
        strategy: Strategy | str = "auto",
        logger: Logger | list[Logger] | bool | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(strategy, str):
            check_strategy_name(strategy)
        if logger is None or logger is True:
            logger = default_loggers(kwargs.get("default_root_dir") or ".")
        super().__init__(strategy=strategy, logger=logger, **kwargs)


def default_loggers(root: str) -> list[Logger]:
    """CSV and (where installed) TensorBoard loggers that share one new version folder."""
    csv = CSVLogger(root)
    loggers: list[Logger] = [csv]
    if has("tensorboard"):
        loggers.append(TensorBoardLogger(root, version=csv.version))
    return loggers


def check_strategy_name(name: str) -> None:
    """Refuse a name that is neither ``auto`` nor registered.

    Raises:
        ConfigurationError: with the nearest registered name or strategy class.
    """
    registered = StrategyRegistry.available_strategies()
    if name.lower() in ("auto", *registered):
        return
    classes = {cls.__name__ for cls in subclasses(Strategy)}
    raise ConfigurationError(
        f"trainer.strategy = {name!r} is no known strategy.{nearest(name, [*classes, *registered])} "
        "Give the name of a strategy class (MegatronStrategy, with its arguments under trainer.strategy), "
        "or a registered name such as auto, ddp, megatron."
    )

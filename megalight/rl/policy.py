"""The trained model as one that draws answers, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from megalight.errors import ConfigurationError, MegalightError
from megalight.inference import ParallelGPT
from megalight.models.gpt import GPT
from megalight.strategies import MegatronStrategy

T = TypeVar("T")


class Policy:
    """A module's model as one that generates, in the layout in which it trains.

    Args:
        model: the whole model on this rank; None: the strategy has divided it.
        strategy: the strategy of the trainer; None: there is no trainer.

    Raises:
        ConfigurationError: a strategy of Lightning's has sharded the weights.
    """

    def __init__(self, model: nn.Module | None, strategy: Any = None) -> None:
        if isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
            raise ConfigurationError(
                f"answers cannot be drawn under {type(strategy).__name__}, which shards weights in its own way. Use "
                "MegatronStrategy or MegatronFSDPStrategy."
            )
        self._strategy = strategy
        parts = strategy.parallel_model if isinstance(strategy, MegatronStrategy) else None
        found = model if parts is None else ParallelGPT(parts)
        assert isinstance(found, GPT | ParallelGPT)
        self.model = found

    @contextmanager
    def drawing(self, whole: bool) -> Iterator[None]:
        """Surround the passes that draw: with the weights of the last step, computed with as in a step.

        Args:
            whole: gather sharded weights once, and not in every pass. All ranks enter it together.
        """
        with ExitStack() as contexts:
            strategy = self._strategy
            if isinstance(strategy, MegatronStrategy):
                strategy.sync_parameters()
                if whole and strategy.parallel_model is not None:
                    contexts.enter_context(strategy.parallel_model.full_parameters())
            if strategy is not None:
                precision = strategy.precision_plugin
                contexts.enter_context(getattr(precision, "step_context", precision.forward_context)())
            yield

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of log-probabilities."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def once(self, compute: Callable[[], T]) -> T:
        """Compute on the first rank of the replica, and return the result on all of them.

        Raises:
            Exception: what the first rank raises.
            MegalightError: on the others, if it raises.
        """
        model = self.model
        if not isinstance(model, ParallelGPT):
            return compute()
        value: T | None = None
        failed: Exception | None = None
        if model.first:
            try:
                value = compute()
            except Exception as error:
                failed = error
        # Others wait for it, also if it has failed.
        value, why = model.agree((value, failed and f"{type(failed).__name__}: {failed}"))
        if failed is not None:
            raise failed
        if why is not None:
            raise MegalightError(f"the first rank of this replica failed: {why}")
        return value  # type: ignore[return-value]  # it has not failed

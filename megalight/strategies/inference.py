"""Inference between training steps, by the model as the strategy has divided it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from megalight.errors import ConfigurationError
from megalight.inference import ParallelGPT
from megalight.inference.parallel import GenerativeModel, generative
from megalight.strategies.megatron import MegatronStrategy


def model_of(module: pl.LightningModule) -> nn.Module | None:
    """Return the model of a module: its ``model``, or itself if another attribute holds one. None: it is not built."""
    found: nn.Module | None = getattr(module, "model", module)
    return found


class InferenceModel:
    """A module's model as one that generates, in the layout in which it trains.

    Args:
        model: the whole model on this rank; None: the strategy has divided it.
        strategy: the strategy of the trainer; None: there is no trainer.

    Attributes:
        model: the model to generate with.

    Raises:
        ConfigurationError: a strategy of Lightning's has sharded the weights, or the model does not generate text.
    """

    def __init__(self, model: nn.Module | None, strategy: Any = None) -> None:
        if isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
            raise ConfigurationError(
                f"answers cannot be sampled under {type(strategy).__name__}, which shards weights in its own way. Use "
                "MegatronStrategy or MegatronFSDPStrategy."
            )
        self._strategy = strategy
        self._whole, self._parts = model, _parts(strategy)
        parts = self._parts
        if model is None and parts is None:
            raise ConfigurationError("the model is not built; call configure_model() of the module first.")
        self.model: GenerativeModel = generative(model) if parts is None else ParallelGPT(parts)  # type: ignore[arg-type]

    def serves(self, model: nn.Module | None, strategy: Any) -> bool:
        """Whether it would be made of the same model now."""
        return self._strategy is strategy and self._whole is model and self._parts is _parts(strategy)

    @contextmanager
    def with_weights(self, whole: bool) -> Iterator[None]:
        """Surround passes: they read the weights of the last step, in the precision of a step.

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


def _parts(strategy: Any) -> Any:
    return strategy.parallel_model if isinstance(strategy, MegatronStrategy) else None

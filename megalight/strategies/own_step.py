"""A ``training_step`` that the user wrote, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.parallel.coupling import contents, is_empty
from megalight.parallel.trace import span
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.batch_size import weights


class OwnTrainingStep:
    """Forward and backward of a user's step. Its loss is a mean over its samples, and so is the gradient, over all.

    Args:
        before_backward: called with each scalar that is about to be differentiated.
    """

    def __init__(
        self, module: pl.LightningModule, precision: MegatronPrecision, before_backward: Callable[[Tensor], None]
    ) -> None:
        self.module = module
        self.precision = precision
        self.before_backward = before_backward

    def __call__(
        self, micro_batches: Sequence[Any], others: Sequence[Any], scale: float, data_ranks: int
    ) -> tuple[Any, Tensor]:
        """Run all micro-batches; empty ones count for nothing.

        Args:
            others: what else Lightning hands to ``training_step``.
            scale: multiplies the objective.
            data_ranks: ranks over which gradients are summed.

        Returns:
            the last real micro-batch's output, and the mean loss of this rank's samples.

        Raises:
            ConfigurationError: the step returned no loss that can be differentiated.
        """
        output: Any = None
        losses = []
        real = weights([micro_batch for micro_batch in micro_batches if not is_empty(micro_batch)])
        for index, micro_batch in enumerate(micro_batches):
            weight = 0.0 if is_empty(micro_batch) else real[index]  # empty ones come last
            with self.precision.step_context(), span("forward", chunk=0, micro_batch=index):
                made = self.module.training_step(contents(micro_batch), *others)
            output = output if is_empty(micro_batch) else made
            loss = made.get("loss") if isinstance(made, Mapping) else made
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise ConfigurationError(
                    f"{type(self.module).__name__}.training_step returned {type(made).__name__} without a "
                    "differentiable loss; return the loss tensor or a dict with the key 'loss'."
                )
            share = loss * (scale * weight / data_ranks)
            self.before_backward(share)
            with span("backward", chunk=0, micro_batch=index):
                self.module.backward(share)
            losses.append(loss.detach() * weight)
        return output, torch.stack(losses).sum()

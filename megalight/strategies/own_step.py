"""The user's own ``training_step``: it runs on each micro-batch, and its gradients, outputs and logs are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from megalight.errors import ConfigurationError
from megalight.models.batch_size import weights
from megalight.parallel.coupling import contents, is_empty
from megalight.parallel.trace import span
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.user_module import intercepted_log


class StepError(ConfigurationError, MisconfigurationException):
    """A user's step returned something that cannot be trained on."""


SUMS = ("sum", torch.sum, sum)
"""What Lightning takes as ``reduce_fx`` for a sum."""


@dataclass(frozen=True)
class OwnOutcome:
    """The result of a user's step.

    Attributes:
        output: joined output of the micro-batches, without graphs. None: the batch was skipped.
        loss: mean over all ranks, 0-dim. None with ``output``.
        logs: what the step logs, if it is logged afterwards: name, value, further arguments of ``log``.
    """

    output: Any
    loss: Tensor | None
    logs: list[tuple[str, Any, dict[str, Any]]]


def logs_of_empty(module: pl.LightningModule) -> AbstractContextManager[None]:
    """Let calls of ``module.log`` inside, in an empty micro-batch, add nothing to means and sums over an epoch.

    They are still made: with ``sync_dist``, other ranks wait for them. The micro-batch is a real one again, so largest
    and smallest values stay, and so does the value of a step.
    """
    log = module.log

    def keep(name: str, value: Any, kwargs: dict[str, Any]) -> None:
        by, epoch = kwargs.get("reduce_fx", "mean"), kwargs.get("on_epoch")
        # Lightning's default.
        epoch = not module.training if epoch is None else epoch
        if by in SUMS and epoch and not isinstance(value, Metric):
            value = value * 0
        log(name, value, **{**kwargs, "batch_size": 0})  # the weight in a mean

    return intercepted_log(module, keep)


class OwnTrainingStep:
    """Forward and backward of a user's step. The step returns a mean over its samples; gradients average all samples.

    Args:
        before_backward: called with each scalar before its backward.
        distributed: whether other ranks wait for this one's gradients. If not, a step may return None.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        precision: MegatronPrecision,
        before_backward: Callable[[Tensor], None],
        distributed: bool,
    ) -> None:
        self.module = module
        self.distributed = distributed
        self.precision = precision
        self.before_backward = before_backward

    def __call__(
        self, micro_batches: Sequence[Any], sizes: Sequence[int], others: Sequence[Any], scale: float, data_ranks: int
    ) -> tuple[Any, Tensor | None]:
        """Run all micro-batches. Empty ones have weight 0.

        Args:
            micro_batches: this rank's micro-batches. Empty ones come last.
            sizes: the number of samples of each that is not empty.
            others: further arguments of ``training_step`` from Lightning.
            scale: factor of the objective.
            data_ranks: number of ranks over which gradients are summed.

        Returns:
            the joined output of the micro-batches, and the mean loss of this rank's samples. Both are None if the step
            returned None for all of them. A micro-batch without a loss adds nothing, and others weigh the same.

        Raises:
            StepError: the step returned no differentiable loss, or None although there are several ranks.
        """
        outputs: list[Any] = []
        losses = []
        # By samples: a last micro-batch may be smaller, and its mean must count less.
        real = weights(sizes)
        for index, micro_batch in enumerate(micro_batches):
            weight = 0.0 if is_empty(micro_batch) else real[index]
            logs = logs_of_empty(self.module) if is_empty(micro_batch) else nullcontext()
            with self.precision.step_context(), logs, span("forward", chunk=0, micro_batch=index):
                made = self.module.training_step(contents(micro_batch), *others)
            if made is None and not self.distributed:
                continue
            loss = made.get("loss") if isinstance(made, Mapping) else made
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise StepError(f"{type(self.module).__name__}.training_step returned {_problem(made, loss)}.")
            if not is_empty(micro_batch):
                outputs.append((made, weight))
            # gradients are summed over micro-batches and data ranks, so these weights turn the sum into a mean
            share = loss * (scale * weight / data_ranks)
            self.before_backward(share)
            with span("backward", chunk=0, micro_batch=index):
                # Lightning's `backward`, as the user's module may override it.
                self.module.backward(share)
            # Detached, or the graphs of all micro-batches would stay in memory.
            losses.append(loss.detach() * weight)
        if not losses:
            return None, None
        return _detached(_joined(outputs)), torch.stack(losses).sum()


def _problem(made: Any, loss: Any) -> str:
    """Describe an output that cannot be trained on, and say what to return."""
    kind = type(made).__name__
    if made is None:
        return "None, which skips a batch only in a single process: return a loss on every rank"
    if isinstance(made, Mapping) and loss is None:
        return f"a {kind} without a loss: the 'loss' key needs to be present"
    if not isinstance(loss, Tensor):
        return f"{kind}; it must return a Tensor, a dict, or None (which skips the batch)"
    return "a loss that does not require gradients: compute it from the module's parameters, and do not detach it"


def _detached(output: Any) -> Any:
    """Cut the graphs, which the backward has freed already. Lightning does the same with extra outputs."""
    if isinstance(output, Tensor):
        return output.detach()
    return {key: _detached(value) for key, value in output.items()} if isinstance(output, Mapping) else output


def _joined(outputs: Sequence[tuple[Any, float]]) -> Any:
    """Join the outputs of micro-batches with their weights, as if the step had run on the whole batch."""
    made = [output for output, _ in outputs]
    if len(made) < 2 or not isinstance(made[0], Mapping):
        return made[-1] if made else None
    weights = [weight / sum(weight for _, weight in outputs) for _, weight in outputs]
    return {name: _entry([output.get(name) for output in made], weights) for name in made[0]}


def _entry(values: list[Any], weights: Sequence[float]) -> Any:
    """Join one entry: tensors along dim 0, numbers as 0-dim tensors by their mean. Others become a list."""
    if not all(isinstance(value, Tensor) for value in values):
        return values
    if all(value.ndim for value in values):
        return torch.cat(values)
    if all(value.ndim == 0 and value.is_floating_point() for value in values):
        return torch.stack([value * weight for value, weight in zip(values, weights, strict=True)]).sum()
    return values

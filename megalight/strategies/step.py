"""One optimizer step's worth of work: micro-batches, the global token count, the schedule, the reported loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule, Totals, split_batch
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline import sequential
from megalight.plugins.precision import MegatronPrecision
from megalight.types import Loss

DATA_AXES = ("dp", "cp")
"""Mesh axes over which ranks see different tokens."""


@dataclass(frozen=True)
class StepReport:
    """What the last training step did. Device tensors are for asynchronous reading: do not ``.item()`` them in a hurry.

    Attributes:
        loss: mean over all tokens of the global batch, 0-dim.
        num_tokens: tokens that counted in it, over all ranks, 0-dim.
        num_samples: samples of the global batch, on the host.
        metrics: further global means, 0-dim each; auxiliary losses among them.
    """

    loss: Tensor
    num_tokens: Tensor
    num_samples: int
    metrics: dict[str, Tensor]


def own_steps(module: pl.LightningModule, method: str) -> bool:
    """Whether the user wrote ``method`` (a Lightning step) himself, instead of Megalight's contract."""
    return not isinstance(module, MegalightModule) or (
        getattr(type(module), method) is not getattr(MegalightModule, method)
    )


class Stepper:
    """Runs training and evaluation steps of one LightningModule on this rank.

    Args:
        chunks: the parts of the model on this rank.
        micro_batch_size: samples per micro-batch; None: the whole batch at once.
        before_backward: called with each scalar that is about to be differentiated.
        micro_batch: the data-parallel engine's context around each micro-batch (told whether it is the last).
    """

    def __init__(
        self,
        module: pl.LightningModule,
        chunks: Sequence[nn.Module],
        mesh: ParallelMesh,
        precision: MegatronPrecision,
        micro_batch_size: int | None,
        before_backward: Callable[[Tensor], None],
        micro_batch: Callable[[bool], AbstractContextManager[None]],
    ) -> None:
        self.module = module
        self.chunks = list(chunks)
        self.mesh = mesh
        self.precision = precision
        self.micro_batch_size = micro_batch_size
        self.before_backward = before_backward
        self.micro_batch = micro_batch

    def train(self, args: tuple[Any, ...], scale: float, sync: bool) -> tuple[Any, StepReport]:
        """Forward and backward of this rank's share of a global batch.

        Args:
            args: the batch, and what else Lightning hands to ``training_step``.
            scale: multiplies the objective (``1 / accumulate_grad_batches``).
            sync: gradients may be reduced after the last micro-batch.

        Returns:
            the step's output for Lightning, and the report.
        """
        if own_steps(self.module, "training_step"):
            return self._train_own(args, scale, sync)
        micro_batches = self._split(args[0])
        tokens = self.all_reduce(self._sum_tokens(micro_batches).double())
        inverse = scale / tokens.clamp(min=1)
        auxiliary_scale = scale / (len(micro_batches) * self.data_ranks)

        def objective(loss: Loss) -> Tensor:
            total = loss.sum * inverse.to(loss.sum.dtype)
            for value in loss.auxiliary.values():
                total = total + value * auxiliary_scale
            self.before_backward(total)
            return total

        losses = sequential.forward_backward(
            self.chunks,
            micro_batches,
            self._forward_step,
            self._loss_step,
            objective,
            lambda last: self.micro_batch(last and sync),
        )
        one = torch.ones_like(tokens)
        rows = [
            {
                "loss": (loss.sum, tokens),
                **{name: (value, one) for name, value in loss.auxiliary.items()},
                **loss.metrics,
            }
            for loss in losses
        ]
        totals = self._reduce_totals(rows, known=("loss",))
        report = self._report(totals, tokens, micro_batches)
        return report.loss, report

    def own(self, method: str, args: tuple[Any, ...]) -> Any:
        """A step that the user wrote, on the whole batch."""
        with self.precision.step_context():
            return getattr(self.module, method)(*args)

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the totals of one evaluation batch over all ranks, the same on every rank; returns its mean loss."""
        rows = []
        for micro_batch in self._split(batch):
            carry = sequential.forward(self.chunks, micro_batch, self._forward_step)
            loss = self._loss_step(carry, micro_batch)
            rows.append({"loss": (loss.sum, self._module.loss_tokens(micro_batch)), **loss.metrics})
        totals = self._reduce_totals(rows)
        self._module.log_totals(stage, totals, dataloader_idx)
        total, count = totals["loss"]
        return total / count.clamp(min=1)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over the ranks that see different data."""
        group = self.mesh.group(*DATA_AXES)
        if group is not None:
            value = value.contiguous()
            dist.all_reduce(value, group=group)
        return value

    @property
    def _module(self) -> MegalightModule:
        assert isinstance(self.module, MegalightModule)
        return self.module

    def _split(self, batch: Any) -> Sequence[Any]:
        if self.micro_batch_size is None:
            return [batch]
        split = self.module.split_batch if isinstance(self.module, MegalightModule) else split_batch
        return split(batch, self.micro_batch_size)

    def _sum_tokens(self, micro_batches: Sequence[Any]) -> Tensor:
        counts = [self._module.loss_tokens(micro_batch).detach() for micro_batch in micro_batches]
        return torch.stack(counts).sum()

    def _forward_step(self, chunk: nn.Module, batch: Any, carry: dict[str, Tensor] | None) -> dict[str, Tensor]:
        with self.precision.step_context():
            return self._module.forward_step(chunk, batch, carry)

    def _loss_step(self, carry: dict[str, Tensor], batch: Any) -> Loss:
        with self.precision.step_context():
            loss = self._module.loss_step(carry, batch)
        if not isinstance(loss, Loss):
            raise ConfigurationError(
                f"{type(self.module).__name__}.loss_step returned {type(loss).__name__}; return "
                "megalight.types.Loss(sum=...), the sum of the losses of the micro-batch's tokens."
            )
        return loss

    def _reduce_totals(
        self, rows: Sequence[dict[str, tuple[Tensor, Tensor]]], known: tuple[str, ...] = ()
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Sum rows over micro-batches and ranks in one reduction; counts of ``known`` names are global already."""
        names = list(rows[0])
        sums = torch.stack([torch.stack([row[name][0].detach() for row in rows]).sum().double() for name in names])
        counts = torch.stack([torch.stack([row[name][1] for row in rows]).sum().double() for name in names])
        reduced = self.all_reduce(torch.cat([sums, counts]))
        totals = {name: (reduced[i], reduced[len(names) + i]) for i, name in enumerate(names)}
        return {name: (total, rows[0][name][1] if name in known else count) for name, (total, count) in totals.items()}

    def _report(self, totals: Totals, tokens: Tensor, micro_batches: Sequence[Any]) -> StepReport:
        means = {name: total / count.clamp(min=1) for name, (total, count) in totals.items()}
        samples = sum(count_samples(micro_batch) for micro_batch in micro_batches) * self.mesh.size("dp")
        return StepReport(means.pop("loss"), tokens, samples, means)

    def _train_own(self, args: tuple[Any, ...], scale: float, sync: bool) -> tuple[Any, StepReport]:
        """A user's own ``training_step``: its loss is a mean over its samples, and so is the gradient, over all."""
        micro_batches = self._split(args[0])
        weights = self._weights(micro_batches)
        output: Any = None
        losses = []
        for index, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
            with self.micro_batch(sync and index == len(micro_batches) - 1):
                with self.precision.step_context():
                    output = self.module.training_step(micro_batch, *args[1:])
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    raise ConfigurationError(
                        f"{type(self.module).__name__}.training_step returned {type(output).__name__} without a "
                        "differentiable loss; return the loss tensor or a dict with the key 'loss'."
                    )
                share = loss * (scale * weight / self.data_ranks)
                self.before_backward(share)
                self.module.backward(share)
            losses.append(loss.detach() * weight)
        mean = self.all_reduce(torch.stack(losses).sum()) / self.data_ranks
        samples = sum(count_samples(micro_batch) for micro_batch in micro_batches) * self.mesh.size("dp")
        report = StepReport(mean, torch.zeros_like(mean), samples, {})
        return ({**output, "loss": mean} if isinstance(output, Mapping) else mean), report

    @staticmethod
    def _weights(micro_batches: Sequence[Any]) -> list[float]:
        """Each micro-batch's part of this rank's samples; equal parts where samples cannot be counted."""
        sizes = [count_samples(micro_batch) for micro_batch in micro_batches]
        if not all(sizes):
            return [1 / len(sizes)] * len(sizes)
        return [size / sum(sizes) for size in sizes]


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor, or of an object that has one. 0 where neither is there."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        return next((samples for value in batch if (samples := count_samples(value))), 0)
    return len(batch) if hasattr(batch, "__len__") and not isinstance(batch, str | bytes) else 0

"""One optimizer step's worth of work: micro-batches, the global token count, the schedule, the reported loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule, split_batch
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.agenda import Agenda
from megalight.parallel.pipeline.executor import Executor
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.contract import own_steps
from megalight.strategies.own_step import OwnTrainingStep
from megalight.strategies.passes import Outcome, StepReport, StepRunner, run_passes
from megalight.strategies.same_data import check_same
from megalight.strategies.samples import count_samples
from megalight.strategies.totals import GlobalTotals
from megalight.types import Loss


class Stepper:
    """Runs training and evaluation steps of one LightningModule on this rank.

    Attributes:
        runner: runs the passes of each training step of a ``MegalightModule``; another one may record and replay them.

    Args:
        executor: runs micro-batches through the parts of the model on this rank.
        schedule: this rank's work, by the schedule's name and the number of micro-batches.
        micro_batch_size: samples per micro-batch; None: the whole batch at once.
        before_backward: called with each scalar that is about to be differentiated.
        micro_batches: the data-parallel engine's context around so many micro-batches (and whether gradients may be
            reduced after them).
        finish: reduces what is left of the gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        executor: Executor,
        schedule: Callable[[str, int], Agenda],
        mesh: ParallelMesh,
        precision: MegatronPrecision,
        micro_batch_size: int | None,
        before_backward: Callable[[Tensor], None],
        micro_batches: Callable[[int, bool], AbstractContextManager[None]],
        finish: Callable[[], None],
    ) -> None:
        self.module = module
        self.executor = executor
        self.schedule = schedule
        self.mesh = mesh
        self.precision = precision
        self.micro_batch_size = micro_batch_size
        self.before_backward = before_backward
        self.micro_batches = micro_batches
        self.finish = finish
        self.runner: StepRunner = run_passes
        self.totals = GlobalTotals(mesh, executor.device)
        self._compared = False

    def train(self, args: tuple[Any, ...], number: int, scale: float, sync: bool) -> tuple[Any, StepReport]:
        """Forward and backward of this rank's share of a global batch.

        Args:
            args: the batch, and what else Lightning hands to ``training_step``.
            number: of the optimizer step.
            scale: multiplies the objective (``1 / accumulate_grad_batches``).
            sync: gradients are reduced: no more batches follow before the optimizer's step.

        Returns:
            the step's output for Lightning, and the report.
        """
        self.precision.begin(number)
        samples, micro_batches = self._split(args[0])
        if own_steps(self.module, "training_step"):
            return self._train_own(samples, micro_batches, args[1:], scale, sync)
        passes = partial(self._passes, scale=scale, sync=sync)
        done = self.runner((scale, sync), micro_batches, passes)
        report = StepReport(done.loss, done.num_tokens, samples * self.mesh.size("dp"), done.metrics)
        return report.loss, report

    def _passes(self, micro_batches: Sequence[Any], scale: float, sync: bool) -> Outcome:
        with self.precision.step():
            tokens = self.totals.sum(self._sum_tokens(micro_batches).double())
            losses = self._differentiate(micro_batches, tokens, scale, sync)
            one = torch.ones_like(tokens)
            rows = [
                {
                    "loss": (loss.sum, tokens),
                    **{name: (value, one) for name, value in loss.auxiliary.items()},
                    **loss.metrics,
                }
                for loss in losses
            ]
            totals = self.totals.of("train", rows)
            totals["loss"] = totals["loss"][0], tokens  # tokens are global already
            means = {name: total / count.clamp(min=1) for name, (total, count) in totals.items()}
        if sync:
            self.finish()
        return Outcome(means.pop("loss"), tokens, means)

    def _differentiate(self, micro_batches: Sequence[Any], tokens: Tensor, scale: float, sync: bool) -> list[Loss]:
        inverse = scale / tokens.clamp(min=1)
        auxiliary_scale = scale / (len(micro_batches) * self.totals.data_ranks)

        def objective(loss: Loss) -> Tensor:
            total = loss.sum * inverse.to(loss.sum.dtype)
            for value in loss.auxiliary.values():
                total = total + value * auxiliary_scale
            self.before_backward(total)
            return total

        with self.micro_batches(len(micro_batches), sync):
            return self.executor.train(
                self.schedule("train", len(micro_batches)),
                micro_batches,
                self._forward_step,
                self._loss_step,
                objective,
            )

    def _train_own(
        self, samples: int, micro_batches: Sequence[Any], others: Sequence[Any], scale: float, sync: bool
    ) -> tuple[Any, StepReport]:
        step = OwnTrainingStep(self.module, self.precision, self.before_backward)
        with self.precision.step(), self.micro_batches(len(micro_batches), sync):
            output, loss = step(micro_batches, others, scale, self.totals.data_ranks)
        if sync:
            self.finish()
        mean = self.totals.sum(loss) / self.totals.data_ranks
        report = StepReport(mean, torch.zeros_like(mean), samples * self.mesh.size("dp"), {})
        return ({**output, "loss": mean} if isinstance(output, Mapping) else mean), report

    def own(self, method: str, args: tuple[Any, ...]) -> Any:
        """A step that the user wrote, on the whole batch."""
        with self.precision.step_context():
            return getattr(self.module, method)(*args)

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the totals of one evaluation batch over all ranks, the same on every rank; returns its mean loss."""
        _, micro_batches = self._split(batch)
        rows = []
        for micro_batch, carry in zip(micro_batches, self._forward(micro_batches), strict=False):
            loss = self._loss_step(carry, micro_batch)
            rows.append({"loss": (loss.sum, self._module.loss_tokens(micro_batch)), **loss.metrics})
        totals = self.totals.of(stage, rows)
        self._module.log_totals(stage, totals, dataloader_idx)
        total, count = totals["loss"]
        return total / count.clamp(min=1)

    def predict(self, batch: Any) -> Any:
        """What the module makes of the last chunk's outputs for a whole batch, on every rank of the replica."""
        outputs = [self._module.output_step(carry, batch) for carry in self._forward([batch])]
        return self.totals.from_last_stage(outputs)[0]

    @property
    def _module(self) -> MegalightModule:
        assert isinstance(self.module, MegalightModule)
        return self.module

    def _split(self, batch: Any) -> tuple[int, Sequence[Any]]:
        """How many samples there are, and this rank's micro-batches: all of their tokens, or its share of them."""
        if not self._compared:
            self._compared = True
            check_same(batch, self.mesh, self.executor.device)
        parts: Sequence[Any] = [batch]
        if self.micro_batch_size is not None:
            split = self.module.split_batch if isinstance(self.module, MegalightModule) else split_batch
            parts = split(batch, self.micro_batch_size)
        samples = sum(count_samples(part) for part in parts)
        if self.mesh.cp > 1:
            parts = [self._module.context_share(part, self.mesh.rank("cp"), self.mesh.cp) for part in parts]
        return samples, parts

    def _forward(self, micro_batches: Sequence[Any]) -> list[dict[str, Tensor]]:
        """On the last stage what the last chunk returns for each micro-batch, elsewhere nothing."""
        agenda = self.schedule("forward_only", len(micro_batches))
        return self.executor.forward(agenda, micro_batches, self._forward_step)

    def _sum_tokens(self, micro_batches: Sequence[Any]) -> Tensor:
        counts = [self._module.loss_tokens(micro_batch).detach() for micro_batch in micro_batches]
        return torch.stack(counts).sum().to(self.executor.device, non_blocking=True)

    def _forward_step(self, chunk: nn.Module, batch: Any, carry: dict[str, Tensor] | None) -> dict[str, Tensor]:
        chunk.training = self._module.training  # a chunk is not among the module's children
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

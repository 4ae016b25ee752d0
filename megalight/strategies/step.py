"""One optimizer step's worth of work: micro-batches, the global token count, the schedule, the reported loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule, Totals, split_batch
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.actions import Actions
from megalight.parallel.pipeline.executor import Executor
from megalight.parallel.trace import span
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.contract import own_steps
from megalight.strategies.same_data import check_same
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


@dataclass(frozen=True)
class Outcome:
    """What the passes of all micro-batches of a step give, all of it on the device.

    Attributes:
        loss: mean over all tokens of the global batch, 0-dim.
        num_tokens: tokens that counted in it, over all ranks, 0-dim.
        metrics: further global means, 0-dim each.
    """

    loss: Tensor
    num_tokens: Tensor
    metrics: dict[str, Tensor]


Passes: TypeAlias = Callable[[Sequence[Any]], Outcome]
"""From micro-batches on the device to reduced gradients: forward, backward and reductions of one training step."""
StepRunner: TypeAlias = Callable[[Hashable, Sequence[Any], Passes], Outcome]
"""Runs the passes of a step in a way of its own: ``(what else they depend on, micro_batches, passes)``."""


def run_passes(key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Outcome:
    """The usual way: as they are written."""
    return passes(micro_batches)


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
        schedule: Callable[[str, int], Actions],
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
        self._names: dict[str, list[str]] = {}
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
        if own_steps(self.module, "training_step"):
            return self._train_own(args, scale, sync)
        samples, micro_batches = self._split(args[0])
        passes = partial(self._passes, scale=scale, sync=sync)
        done = self.runner((scale, sync), micro_batches, passes)
        report = StepReport(done.loss, done.num_tokens, samples * self.mesh.size("dp"), done.metrics)
        return report.loss, report

    def _passes(self, micro_batches: Sequence[Any], scale: float, sync: bool) -> Outcome:
        with self.precision.step():
            tokens = self.all_reduce(self._sum_tokens(micro_batches).double())
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
            totals = {**self._reduce_totals("train", rows)}
            totals["loss"] = totals["loss"][0], tokens  # tokens are global already
            means = {name: total / count.clamp(min=1) for name, (total, count) in totals.items()}
        if sync:
            self.finish()
        return Outcome(means.pop("loss"), tokens, means)

    def _differentiate(self, micro_batches: Sequence[Any], tokens: Tensor, scale: float, sync: bool) -> list[Loss]:
        inverse = scale / tokens.clamp(min=1)
        auxiliary_scale = scale / (len(micro_batches) * self.data_ranks)

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
        totals = self._reduce_totals(stage, rows)
        self._module.log_totals(stage, totals, dataloader_idx)
        total, count = totals["loss"]
        return total / count.clamp(min=1)

    def predict(self, batch: Any) -> Any:
        """What the module makes of the last chunk's outputs for a whole batch, on every rank of the replica."""
        outputs = [self._module.output_step(carry, batch) for carry in self._forward([batch])]
        return self._from_last_stage(outputs)[0]

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum over the ranks that see different data."""
        return self._sum(value, DATA_AXES)

    def _sum(self, value: Tensor, axes: Sequence[str]) -> Tensor:
        group = self.mesh.group(*axes)
        if group is not None:
            value = value.contiguous()
            dist.all_reduce(value, group=group)
        return value

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
        actions = self.schedule("forward_only", len(micro_batches))
        return self.executor.forward(actions, micro_batches, self._forward_step)

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

    def _reduce_totals(self, stage: str, rows: Sequence[dict[str, tuple[Tensor, Tensor]]]) -> Totals:
        """Sum rows over micro-batches and ranks in one reduction. Stages other than the last have no rows."""
        names = self._names_of(stage, list(rows[0]) if rows else [])
        local = torch.zeros(2 * len(names), dtype=torch.float64, device=self.executor.device)
        if rows:
            columns = [[row[name][place].detach() for row in rows] for place in (0, 1) for name in names]
            sums = [torch.stack(column).sum() for column in columns]
            local = torch.stack([value.to(local.device, torch.float64, non_blocking=True) for value in sums])
        reduced = self._sum(local, ("pp", *DATA_AXES))
        return {name: (reduced[i], reduced[len(names) + i]) for i, name in enumerate(names)}

    def _names_of(self, stage: str, names: list[str]) -> list[str]:
        """The names of all totals. Other stages learn them from the last one, once."""
        if self.mesh.pp == 1:
            return names
        if stage not in self._names:
            self._names[stage] = self._from_last_stage([names] if names else [])[0]
        known = self._names[stage]
        if names and set(names) != set(known):
            raise ConfigurationError(
                f"loss_step returned {sorted(names)} and earlier {sorted(known)}: every micro-batch must bring the "
                "same metrics and auxiliary losses: other pipeline stages wait for them. Return a count of 0 instead."
            )
        return known

    def _from_last_stage(self, values: list[Any]) -> list[Any]:
        """The value that the last pipeline stage has, on all of them."""
        group = self.mesh.group("pp")
        if group is None:
            return values
        shared = values or [None]
        dist.broadcast_object_list(shared, src=self.mesh.ranks("pp")[-1], group=group, device=self.executor.device)
        return shared

    def _train_own(self, args: tuple[Any, ...], scale: float, sync: bool) -> tuple[Any, StepReport]:
        """A user's own ``training_step``: its loss is a mean over its samples, and so is the gradient, over all."""
        samples, micro_batches = self._split(args[0])
        output: Any = None
        losses = []
        with self.precision.step(), self.micro_batches(len(micro_batches), sync):
            for index, (micro_batch, weight) in enumerate(
                zip(micro_batches, self._weights(micro_batches), strict=True)
            ):
                with self.precision.step_context(), span("forward", chunk=0, micro_batch=index):
                    output = self.module.training_step(micro_batch, *args[1:])
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    raise ConfigurationError(
                        f"{type(self.module).__name__}.training_step returned {type(output).__name__} without a "
                        "differentiable loss; return the loss tensor or a dict with the key 'loss'."
                    )
                share = loss * (scale * weight / self.data_ranks)
                self.before_backward(share)
                with span("backward", chunk=0, micro_batch=index):
                    self.module.backward(share)
                losses.append(loss.detach() * weight)
        if sync:
            self.finish()
        mean = self.all_reduce(torch.stack(losses).sum()) / self.data_ranks
        report = StepReport(mean, torch.zeros_like(mean), samples * self.mesh.size("dp"), {})
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

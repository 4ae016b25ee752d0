"""Training and evaluation steps of a LightningModule: the Lightning part around :mod:`megalight.parallel.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.batch_size import Loaded, count_samples, loaded, split_batch
from megalight.models.module import MegalightModule
from megalight.parallel.coupling import contents, emptied, is_empty
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.model import ParallelModel
from megalight.parallel.step import StepDriver, run_passes
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies.micro_batches import MicroBatchSize
from megalight.strategies.own_step import OwnOutcome, OwnTrainingStep, logs_of_empty
from megalight.strategies.stage_logs import StageLogs
from megalight.strategies.user_module import intercepted_log, overridden, own_steps
from megalight.types import mean


@dataclass(frozen=True)
class StepReport:
    """Report of the last training step. Tensors are on the device; ``.item()`` waits until the step is done.

    Attributes:
        loss: mean over all tokens of the global batch, 0-dim.
        num_tokens: number of tokens in this mean, over all ranks, 0-dim.
        num_samples: number of samples of the global batch, on the host.
        metrics: further global means, each 0-dim, including auxiliary losses.
    """

    loss: Tensor
    num_tokens: Tensor
    num_samples: int
    metrics: dict[str, Tensor]


class Stepper:
    """Runs the steps of one LightningModule on this rank.

    Args:
        model: the module's model after splitting.
        micro_batches: the number of samples per micro-batch.
        before_backward: called with each scalar before its backward.

    Attributes:
        step: the step of a ``MegalightModule``, without Lightning.
        zero_hooks: calls Lightning's hooks around zeroing.
        logs: shares what a step logs with ranks that have other parts of the model.
        has_gradients: whether a batch of this accumulation window had a loss.
    """

    zero_hooks: Callable[[], None]

    def __init__(
        self,
        module: pl.LightningModule,
        model: ParallelModel,
        precision: MegatronPrecision,
        micro_batches: MicroBatchSize,
        before_backward: Callable[[Tensor], None],
    ) -> None:
        self.module = module
        self.model = model
        self.precision = precision
        self.micro_batches = micro_batches
        self.before_backward = before_backward
        self.step = StepDriver(
            model,
            module,  # type: ignore[arg-type]  # for a plain module, its own steps run and this one is not called
            varying_carry=isinstance(module, MegalightModule) and module.varying_carry,
            context=precision.step_context,
            around=precision.step,
            around_empty=partial(logs_of_empty, module),
            before_backward=before_backward,
        )
        self.logs = StageLogs.of(model.mesh, model.device, self.step)
        self.has_gradients = False
        self._zero_due = False

    def begin_window(self) -> None:
        """Begin an accumulation window: discard the gradients of the last one, before the first backward.

        As in Lightning, the user's own ``training_step`` runs before that. Other steps are one call with all of their
        passes, so their gradients are discarded at once. So are those of steps that are replayed, and those of a model
        with released weights: hooks could not read them in the middle of a step.
        """
        assert self.engine is not None
        self._zero_due = True
        own = own_steps(self.module, "training_step") and self.step.runner is run_passes
        if not own or self.engine.level.parameters:
            self._zero_grad()

    def _zero_grad(self) -> None:
        """Discard all gradients, if that is due."""
        if not self._zero_due:
            return
        assert self.engine is not None
        self._zero_due = False
        self.zero_hooks()
        self.has_gradients = False
        self.engine.zero_grad()

    def _before_own_backward(self, loss: Tensor) -> None:
        self._zero_grad()
        self.before_backward(loss)

    def begin(self, engine: DataParallelEngine | None) -> None:
        """Begin a run of Lightning's loops. ``engine`` is None outside ``fit``."""
        self.step.begin(engine)
        self.logs.forget()

    @property
    def engine(self) -> DataParallelEngine | None:
        """The engine that reduces gradients. Training needs it."""
        return self.step.engine

    def train(self, args: tuple[Any, ...], number: int, scale: float, sync: bool) -> tuple[Any, StepReport | None]:
        """Run forward and backward of this rank's share of a global batch.

        Args:
            args: the batch, and further arguments of ``training_step`` from Lightning.
            number: number of the optimizer step.
            scale: factor of the objective (``1 / accumulate_grad_batches``).
            sync: whether to reduce gradients, as this is the last batch before the optimizer's step.

        Returns:
            the step's output for Lightning, and the report. Both are None if the user's step skipped the batch.
        """
        self.precision.begin(number)
        sizes, micro_batches = self._split(args[0])
        samples = sum(sizes)
        if own_steps(self.module, "training_step"):
            _check_own(self.module, "training_step", args[0])
            with self.micro_batches.step(samples):
                return self._train_own(sizes, micro_batches, args[1:], scale, sync)
        self.has_gradients = True
        with self.micro_batches.step(samples), self.logs.shared(self.module, "train", self._recording):
            done = self.step.train(micro_batches, scale, sync)
        report = StepReport(done.loss, done.num_tokens, samples * self.model.mesh.size("dp"), done.metrics)
        return report.loss, report

    def _train_own(
        self, sizes: list[int], micro_batches: Sequence[Any], others: Sequence[Any], scale: float, sync: bool
    ) -> tuple[Any, StepReport | None]:
        engine, totals = self.engine, self.step.totals
        assert engine is not None
        step = OwnTrainingStep(self.module, self.precision, self._before_own_backward, self.model.mesh.world_size > 1)

        def passes(micro_batches: Sequence[Any]) -> OwnOutcome:
            logs: list[tuple[str, Any, dict[str, Any]]] = []
            with (
                self.precision.step(sync),
                engine.micro_batches(len(micro_batches), sync),
                intercepted_log(self.module, lambda *call: logs.append(call)) if self._recording else nullcontext(),
                self._whole_side_losses(),
            ):
                output, loss = step(micro_batches, sizes, others, scale, totals.data_ranks)
                self._zero_grad()  # the step has skipped the whole batch
            # Without gradients, the optimizer must find None and not zeros.
            if sync and (self.has_gradients or loss is not None):
                engine.finish_grad_sync()
            if sync and isinstance(self.module, MegalightModule):
                self.step.end()
            # The mean over ranks, as in the gradients, where this factor is part of each share.
            return OwnOutcome(output, None if loss is None else totals.sum(loss) / totals.data_ranks, logs)

        key = scale, sync, self.has_gradients
        done: OwnOutcome = self.step.runner(key, self.step.joined(micro_batches), passes)
        for name, value, kwargs in done.logs:
            self.module.log(name, value, **kwargs)
        self.has_gradients |= done.loss is not None
        if done.loss is None:
            return None, None
        report = StepReport(done.loss, torch.zeros_like(done.loss), sum(sizes) * self.model.mesh.size("dp"), {})
        output = done.output
        return ({**output, "loss": done.loss} if isinstance(output, Mapping) else done.loss), report

    @property
    def _recording(self) -> bool:
        """Whether a runner may replay steps, which then log nothing by themselves."""
        return self.step.runner is not run_passes

    @contextmanager
    def _whole_side_losses(self) -> Iterator[None]:
        """Let a step of one's own that calls ours add losses of all tokens, where each rank's layers see a share."""
        if self.step.token_shares == 1:
            yield
            return
        with overridden(self.module, whole_side_losses=self.step.whole_side_losses):
            yield

    def own(self, method: str, args: tuple[Any, ...]) -> Any:
        """Run the user's own step on the whole batch. The result of an empty batch is None.

        Raises:
            ConfigurationError: the batch is empty, but the step would log it.
        """
        batch, *others = args
        if method != "predict_step":
            _check_own(self.module, method, batch)
        with self.precision.step_context():
            output = getattr(self.module, method)(contents(batch), *others)
        return None if is_empty(batch) else output

    def evaluate(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log the totals of one evaluation batch over all ranks, equal on every rank, and return its mean loss."""
        with self.logs.shared(self.module, stage):
            totals = self.totals(stage, batch)
        self._module.log_totals(stage, totals, dataloader_idx, reduced=True)
        return mean(*totals["loss"])

    def totals(self, stage: str, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Run an evaluation batch forward only; return ``name -> (sum, count)`` over all ranks."""
        return self.step.evaluate(stage, self._split(batch)[1])

    def replay(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Run an evaluation batch forward only, and log nothing; return sum and count of its losses over all ranks."""
        return self.totals("val", batch)["loss"]

    def probe(self, batch: Any) -> None:
        """Run an evaluation batch forward and backward, and reduce nothing."""
        self.step.probe(self._split(batch)[1])

    def predict(self, batch: Any) -> Any:
        """Return the module's ``output_step`` for a whole batch, on every rank of the replica."""
        outputs = [self._module.output_step(carry, contents(batch)) for carry in self.step.outputs([batch])]
        # Only the last stage has outputs, and Lightning wants them from every rank.
        output = self.step.totals.from_last_stage(outputs)[0]
        return None if is_empty(batch) else output

    @property
    def _module(self) -> MegalightModule:
        assert isinstance(self.module, MegalightModule)
        return self.module

    def _split(self, batch: Any) -> tuple[list[int], Sequence[Any]]:
        """Return the sizes of this rank's micro-batches in samples, and these.

        An empty batch has one empty micro-batch and no size, so that this rank still takes part in communication.
        """
        if is_empty(batch):
            # One micro-batch is enough: `joined` adds as many empty ones as others run.
            return [], [emptied(part) for part in self._split(contents(batch))[1][:1]]
        self.step.check(batch)  # before the cut, which may fail on one rank alone
        told = loaded(self.module._trainer)
        samples, size = count_samples(batch, told), self.micro_batches.size
        if size is None:
            return [samples], [batch]
        split = getattr(self.module, "split_batch", None)  # a plain module may define it
        parts = split_batch(batch, size, told) if split is None else split(batch, size)
        of_part = Loaded(frozenset([size]), frozenset([samples % size]), told.form)
        return [count_samples(part, of_part) for part in parts], parts


def _check_own(module: pl.LightningModule, method: str, batch: Any) -> None:
    """Refuse an empty batch if the user's own step would count it.

    Raises:
        ConfigurationError: the batch is empty.
    """
    if is_empty(batch):
        raise ConfigurationError(
            f"{type(module).__name__} defines {method}, and this rank has fewer batches than others that share its "
            "experts. Give all data-parallel ranks equally many batches, or define loss_step instead."
        )

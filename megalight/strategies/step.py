"""Training and evaluation steps of a LightningModule: the Lightning part around :mod:`megalight.parallel.step`.

A ``MegalightModule`` has the driver's steps. A ``training_step`` that the user wrote runs on each micro-batch instead,
and its gradients, outputs and logs are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from megalight.attachments import overridden
from megalight.errors import ConfigurationError
from megalight.models.batches import Loaded, count_samples, loaded, split_batch, weights
from megalight.models.module import MegalightModule
from megalight.optim.sharded import sharding_of
from megalight.parallel.data_parallel import DataParallelEngine, clip_coefficient
from megalight.parallel.data_parallel.grad_norm import permit_clipping, refuse_clipping
from megalight.parallel.model import ParallelModel
from megalight.parallel.step import StepDriver, StepOutcome, run_passes
from megalight.parallel.trace import span, spanned
from megalight.plugins.precision import MegatronPrecision
from megalight.strategies._lightning import log
from megalight.strategies.micro_batches import MicroBatchSize
from megalight.strategies.stage_logs import StageLogs
from megalight.strategies.user_module import UserStages, WeightedBatch, defines_step, intercepted_log
from megalight.types import mean
from megalight.types.batch import contents, emptied, is_empty

IN_PART = (
    "cannot clip under MegatronStrategy, which divides gradients over ranks here: each would clip its part by its own "
    "norm. Use Trainer(gradient_clip_val=...) or, in the hook configure_gradient_clipping, "
    "self.clip_gradients(optimizer, gradient_clip_val=...): both clip by the norm over all ranks."
)
"""Why torch's functions that clip are refused where a rank has a part of the gradients."""


def guard_clipping(model: ParallelModel, optimizer: Optimizer) -> None:
    """Refuse torch's functions that clip, while ``fit`` runs, unless each rank has all gradients of the whole model."""
    sharding, mesh = sharding_of(optimizer), model.mesh
    if mesh.tp * mesh.pp * mesh.ep * mesh.etp > 1 or (sharding is not None and sharding.divided):
        refuse_clipping(model.parameters(), IN_PART)


def unguard_clipping(model: ParallelModel) -> None:
    """Permit them again after ``fit``, for a loop of the user's own."""
    permit_clipping(model.parameters(), IN_PART)


@spanned("clip")
def clip_by_norm(module: pl.LightningModule, engine: DataParallelEngine, max_norm: float) -> None:
    """Scale gradients to a global norm of at most ``max_norm``, and log the norm before clipping as ``grad_norm``."""
    if not engine.main_gradients.reduced:  # the batch was skipped
        return
    # The norm stays on the device: the host does not wait, neither here nor for the log.
    norm = engine.grad_norm()
    engine.scale_gradients(clip_coefficient(norm, max_norm))
    log(module, "grad_norm", norm)


@spanned("clip")
def clip_by_value(engine: DataParallelEngine, limit: float) -> None:
    """Clamp each element to ``[-limit, limit]``."""
    for bucket in engine.buckets:
        if bucket.reduced is not None:  # the batch was not skipped
            bucket.reduced.clamp_(-limit, limit)


def unscale(engine: DataParallelEngine, scale: float) -> bool:
    """Divide gradients by the loss scale. Return whether all of them are finite, on every rank. The host waits."""
    # The norm is over all ranks, so they agree: one that skipped the update alone would have other weights.
    finite = bool(torch.isfinite(engine.grad_norm()))
    if engine.main_gradients.values:
        torch._foreach_mul_(engine.main_gradients.values, 1 / scale)
    return finite


class StepError(ConfigurationError, MisconfigurationException):
    """A user's step returned something that cannot be trained on."""


@dataclass(frozen=True)
class StepReport(StepOutcome):
    """Report of the last training step. Tensors are on the device; ``.item()`` waits until the step is done.

    Attributes:
        num_samples: number of samples of the global batch, on the host.
    """

    num_samples: int


@dataclass(frozen=True)
class UserOutcome:
    """The result of a user's ``training_step`` on all micro-batches.

    Attributes:
        output: joined output of the micro-batches, without graphs. None: the batch was skipped.
        loss: mean over all ranks, 0-dim. None with ``output``.
        logs: what the step logs, if it is logged afterwards: name, value, further arguments of ``log``.
    """

    output: Any
    loss: Tensor | None
    logs: list[tuple[str, Any, dict[str, Any]]]


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
        plain = not isinstance(module, MegalightModule)
        self.stages = UserStages(module, model.device, self._refused) if plain and model.mesh.pp > 1 else None
        self.step = StepDriver(
            model,
            self.stages or module,  # type: ignore[arg-type]  # a plain module has no such methods: its own step runs
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

        As in Lightning, a user's ``training_step`` runs before that. Other steps are one call with all of their passes,
        so their gradients are discarded at once. So are those of steps that are replayed, and those of a model with
        released weights: hooks could not read them in the middle of a step.
        """
        assert self.step.engine is not None
        self._zero_due = True
        waits = self._by_user and not self._recording
        if not waits or self.step.engine.level.parameters:
            self._zero_grad()

    def _zero_grad(self) -> None:
        """Discard all gradients, if that is due."""
        if not self._zero_due:
            return
        assert self.step.engine is not None
        self._zero_due = False
        self.zero_hooks()
        self.has_gradients = False
        self.step.engine.zero_grad()

    def begin(self, engine: DataParallelEngine | None) -> None:
        """Begin a run of Lightning's loops. ``engine`` is None outside ``fit``."""
        self.step.begin(engine)
        self.logs.forget()

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
        if self._by_user:
            _refuse_empty(self.module, "training_step", args[0])
            with self.micro_batches.step(samples):
                return self._train_by_user(sizes, micro_batches, args[1:], scale, sync)
        if self.stages is not None:
            _refuse_empty(self.module, "training_step", args[0])
            self.stages.begin("training_step", args[1:])
            micro_batches = list(map(WeightedBatch, micro_batches, weights(sizes)))
        self.has_gradients = True
        with self.micro_batches.step(samples), self.logs.shared(self.module, "train", self._recording):
            done = self.step.train(micro_batches, scale, sync)
        report = StepReport(**vars(done), num_samples=samples * self.model.mesh.size("dp"))
        return report.loss, report

    def _train_by_user(
        self, sizes: list[int], micro_batches: Sequence[Any], others: Sequence[Any], scale: float, sync: bool
    ) -> tuple[Any, StepReport | None]:
        engine, totals = self.step.engine, self.step.totals
        assert engine is not None

        def passes(micro_batches: Sequence[Any]) -> UserOutcome:
            logs: list[tuple[str, Any, dict[str, Any]]] = []
            with (
                self.precision.step(sync),
                engine.micro_batches(len(micro_batches), sync),
                intercepted_log(self.module, lambda *call: logs.append(call)) if self._recording else nullcontext(),
                self._whole_aux_losses(),
            ):
                output, loss = self._user_passes(micro_batches, sizes, others, scale)
                self._zero_grad()  # the step has skipped the whole batch
            # Without gradients, the optimizer must find None and not zeros.
            if sync and (self.has_gradients or loss is not None):
                engine.finish_grad_sync()
            if sync and isinstance(self.module, MegalightModule):
                self.step.end()
            # The mean over ranks, as in the gradients, where this factor is part of each share.
            return UserOutcome(output, None if loss is None else totals.sum(loss) / totals.data_ranks, logs)

        key = scale, sync, self.has_gradients
        # Whole sequences: models of transformers take their share of each call by themselves.
        done: UserOutcome = self.step.runner(key, self.step.joined(micro_batches, cut=False), passes)
        for name, value, kwargs in done.logs:
            self.module.log(name, value, **kwargs)
        self.has_gradients |= done.loss is not None
        if done.loss is None:
            return None, None
        report = StepReport(done.loss, torch.zeros_like(done.loss), {}, sum(sizes) * self.model.mesh.size("dp"))
        output = done.output
        return ({**output, "loss": done.loss} if isinstance(output, Mapping) else done.loss), report

    def _user_passes(
        self, micro_batches: Sequence[Any], sizes: Sequence[int], others: Sequence[Any], scale: float
    ) -> tuple[Any, Tensor | None]:
        """Run forward and backward of the user's ``training_step``, which returns a mean over its samples.

        Args:
            micro_batches: this rank's micro-batches. Empty ones come last, and have weight 0.
            sizes: the number of samples of each that is not empty.
            others: further arguments of ``training_step`` from Lightning.
            scale: factor of the objective.

        Returns:
            the joined output of the micro-batches, and the mean loss of this rank's samples. Both are None if the step
            returned None for all of them. A micro-batch without a loss adds nothing, and others weigh the same.

        Raises:
            StepError: the step returned no differentiable loss, or None although other ranks wait for gradients.
        """
        module, outputs, losses = self.module, list[tuple[Any, float]](), list[Tensor]()
        # By samples: a last micro-batch may be smaller, and its mean must count less.
        real = weights(sizes)
        for index, micro_batch in enumerate(micro_batches):
            weight = 0.0 if is_empty(micro_batch) else real[index]
            logs = logs_of_empty(module) if is_empty(micro_batch) else nullcontext()
            with self.precision.step_context(), logs, span("forward", chunk=0, micro_batch=index):
                made = module.training_step(contents(micro_batch), *others)
            if made is None and self.model.mesh.world_size == 1:
                continue
            loss = made.get("loss") if isinstance(made, Mapping) else made
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise self._refused(made)
            if not is_empty(micro_batch):
                outputs.append((made, weight))
            # gradients are summed over micro-batches and data ranks, so these weights turn the sum into a mean
            share = loss * (scale * weight / self.step.totals.data_ranks)
            self._zero_grad()
            self.before_backward(share)
            with span("backward", chunk=0, micro_batch=index):
                # Lightning's `backward`, as the user's module may override it.
                module.backward(share)
            # Detached, or the graphs of all micro-batches would stay in memory.
            losses.append(loss.detach() * weight)
        if not losses:
            return None, None
        return _detached(_joined(outputs)), torch.stack(losses).sum()

    def _refused(self, made: Any) -> StepError:
        """Return the error for an output of the user's ``training_step`` that cannot be trained on."""
        loss = made.get("loss") if isinstance(made, Mapping) else made
        return StepError(f"{type(self.module).__name__}.training_step returned {_problem(made, loss)}.")

    @property
    def _by_user(self) -> bool:
        """Whether each call of the user's own ``training_step`` runs the whole model."""
        return self.stages is None and defines_step(self.module, "training_step")

    @property
    def _recording(self) -> bool:
        """Whether a runner may replay steps, which then log nothing by themselves."""
        return self.step.runner is not run_passes

    @contextmanager
    def _whole_aux_losses(self) -> Iterator[None]:
        """Let a user's step that calls ours add losses of all tokens, where each rank's layers see a share."""
        if self.step.token_shares == 1:
            yield
            return
        with overridden(self.module, whole_aux_losses=self.step.whole_aux_losses):
            yield

    def by_user(self, method: str, args: tuple[Any, ...]) -> Any:
        """Run a step that the user wrote on the whole batch. The result of an empty batch is None.

        On stages of a pipeline before the last, it is None, too, except that of ``predict_step``.

        Raises:
            ConfigurationError: the batch is empty, but the step would log it.
        """
        batch, *others = args
        if method != "predict_step":
            _refuse_empty(self.module, method, batch)
        if self.stages is not None:
            return self._on_stages(self.stages, method, batch, others)
        with self.precision.step_context():
            output = getattr(self.module, method)(contents(batch), *others)
        return None if is_empty(batch) else output

    def _on_stages(self, stages: UserStages, method: str, batch: Any, others: Sequence[Any]) -> Any:
        stages.begin(method, others)
        micro_batch = emptied(WeightedBatch(contents(batch), 0.0)) if is_empty(batch) else WeightedBatch(batch, 1.0)
        with self.logs.shared(self.module, method):
            found = self.step.outputs([micro_batch])
        output, stages.output = stages.output, None
        if method == "predict_step":
            output = self.step.totals.from_last_stage([output] if found else [])[0]
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


def _refuse_empty(module: pl.LightningModule, method: str, batch: Any) -> None:
    """Refuse an empty batch if the user's step would count it.

    Raises:
        ConfigurationError: the batch is empty.
    """
    if is_empty(batch):
        raise ConfigurationError(
            f"{type(module).__name__} defines {method}, and this rank has fewer batches than others that share its "
            "experts. Give all data-parallel ranks equally many batches, or define loss_step instead."
        )


SUMS = ("sum", torch.sum, sum)
"""What Lightning takes as ``reduce_fx`` for a sum."""


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

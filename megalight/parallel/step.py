"""The work of one optimizer step on one rank, without Lightning: counts, the schedule, totals.

A step has a fixed order: count the tokens of the whole global batch; run every micro-batch forward and backward, with
gradients scaled by these counts; reduce; and report means over the global batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.attachments import STAGE
from megalight.errors import ConfigurationError
from megalight.nn.aux_losses import AttachedAuxLosses, ZeroAuxLosses, collecting, end_step
from megalight.parallel.collectives import all_reduce
from megalight.parallel.coupling import REPLICA_AXES, check_same
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.frozen_model import FrozenModel, FrozenRun
from megalight.parallel.mesh import TOKEN_AXES, ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.executor import Executor, ScheduleExecutor
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.pipeline.stages import DeclaredStage
from megalight.parallel.pipeline.timeline import Timetable
from megalight.types import Loss, Totals, WithResults, inverse, mean
from megalight.types.batch import contents, emptied, is_empty, nothing


class MetricNames(NamedTuple):
    """Names of totals.

    Attributes:
        rows: names in the rows, which only the last pipeline stage has.
        aux_losses: names of auxiliary losses of any stage.
    """

    rows: list[str]
    aux_losses: list[str]


class GlobalTotals:
    """Reduces sums and counts of this rank's micro-batches to those of the whole batch."""

    def __init__(self, mesh: ParallelMesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self._names: dict[str, MetricNames] = {}

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different data."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    def sum(self, value: Tensor, *axes: str) -> Tensor:
        """Sum over mesh axes; by default over the ranks with different data."""
        group = self.mesh.group(*(axes or TOKEN_AXES))
        if group is not None:
            value = value.contiguous()
            dist.all_reduce(value, group=group)
        return value

    def of(
        self,
        stage: str,
        rows: Sequence[Totals],
        aux_losses: Mapping[str, Tensor] = MappingProxyType({}),
        micro_batches: Tensor | None = None,
        counts: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return ``name -> (sum, count)`` over micro-batches and ranks, with one reduction.

        Args:
            stage: stage of Lightning's loops; names must be the same in all its steps.
            rows: one row per micro-batch on the last pipeline stage; elsewhere empty.
            aux_losses: sums of the auxiliary losses of this stage; one with the name of a metric is left out.
            micro_batches: the count of auxiliary losses, already over all ranks.
            counts: the counts of auxiliary losses that have their own, by name, already over all ranks.

        Raises:
            ConfigurationError: names are not the same.
        """
        names = self._names_of(stage, MetricNames(list(rows[0]) if rows else [], list(aux_losses)))
        # float64: sums over a global batch of millions of tokens, which float32 would round.
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        # The same zero for all missing values: it is only read.
        sums = [zero] * 2 * len(names.rows)
        if rows:
            columns = [[row[name][place].detach() for row in rows] for place in (0, 1) for name in names.rows]
            sums = [torch.stack(column).sum() for column in columns]
        sums += [aux_losses.get(name, zero) for name in names.aux_losses]
        # One tensor, one all-reduce, for all sums and counts of all stages. Stages without a value give 0.
        local = torch.stack([value.to(zero.device, torch.float64, non_blocking=True) for value in sums])
        # Over `pp` too, because only the last stage has the rows, and any stage may have auxiliary losses.
        reduced = self.sum(local, "pp", *TOKEN_AXES)
        size = len(names.rows)
        totals = {name: (reduced[i], reduced[size + i]) for i, name in enumerate(names.rows)}
        for i, name in enumerate(names.aux_losses):
            assert micro_batches is not None
            totals[name] = reduced[2 * size + i], counts.get(name, micro_batches)
        return totals

    def from_last_stage(self, values: list[Any]) -> list[Any]:
        """Broadcast the value of the last pipeline stage to all stages."""
        group = self.mesh.group("pp")
        if group is None:
            return values
        # Object collectives need a list of the same length on all ranks.
        shared = values or [None]
        dist.broadcast_object_list(shared, src=self.mesh.ranks("pp")[-1], group=group, device=self.device)
        return shared

    def _names_of(self, stage: str, here: MetricNames) -> MetricNames:
        """Return the names of all totals. Pipeline stages exchange theirs once."""
        group = self.mesh.group("pp")
        # Once per kind of step: an exchange of Python objects makes the host wait.
        if stage not in self._names or group is None:
            found: list[Any] = [here]
            if group is not None:
                found *= group.size()
                dist.all_gather_object(found, here, group=group)
            self._names[stage] = _joined(found)
        known = self._names[stage]
        if here.rows and set(here.rows) != set(known.rows):
            raise ConfigurationError(
                f"loss_step returned {sorted(here.rows)} and earlier {sorted(known.rows)}: every micro-batch must have "
                "the same metrics, since other pipeline stages wait for them. Return a count of 0 instead."
            )
        if not set(here.aux_losses) <= {*known.rows, *known.aux_losses}:
            raise ConfigurationError(
                f"layers attached the losses {sorted(here.aux_losses)} and in the first step "
                f"{sorted(known.aux_losses)}: other pipeline stages wait for the same ones. Attach 0 instead."
            )
        return known


def _joined(stages: Sequence[MetricNames]) -> MetricNames:
    """Join the names of all stages. If a metric and an auxiliary loss share a name, the metric is used."""
    rows = stages[-1].rows
    names = dict.fromkeys(name for stage in stages for name in stage.aux_losses)
    return MetricNames(rows, [name for name in names if name not in rows])


class TrainingTask(Protocol):
    """The training task of a model, defined per micro-batch."""

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        """Run one chunk of the model.

        Args:
            model: the chunk; the whole model when there is no pipeline.
            carry: what the previous chunk returned; None on the first.

        Returns:
            named tensors for the next chunk, or for :meth:`loss_step` after the last.
        """

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        """Return the *sum* of the losses of the micro-batch's tokens, from the output of the last chunk."""

    def loss_tokens(self, batch: Any) -> Tensor:
        """Return the number of tokens (or samples) in that sum: a 0-dim tensor. Called before any forward.

        A task may also have ``aux_loss_counts(batch)``, which does the same for its auxiliary losses and
        for those of layers that give a count, by name; and ``context_share(batch, rank, size)``, which returns share
        ``rank`` of ``size`` of every sequence, for context parallelism. Without it, batches have
        :func:`share_of_batch`'s method. An attribute ``token_multiple`` is set to the number of which token counts must
        be multiples, for sequence parallelism.
        """


@dataclass(frozen=True)
class GlobalCounts:
    """Numbers of the whole step, known before its first forward. Tensors are 0-dim, float64, equal on every rank.

    Attributes:
        tokens: tokens that count in the loss, over all ranks.
        micro_batches: number of micro-batches on all data-parallel ranks.
        token_scale: multiplies each sum of token losses before the backward: ``scale / tokens``, 0 without tokens.
        micro_batch_scale: multiplies each loss that is a mean over its micro-batch: ``scale`` divided by the number of
            micro-batches on all data-parallel ranks.
        aux_loss_counts: name of an auxiliary loss that is a sum -> what counts in it, over all ranks.
        aux_loss_scales: what multiplies these sums before the backward.
    """

    tokens: Tensor
    micro_batches: Tensor
    token_scale: Tensor
    micro_batch_scale: Tensor
    aux_loss_counts: Mapping[str, Tensor]
    aux_loss_scales: Mapping[str, Tensor]


@dataclass(frozen=True)
class StepOutcome:
    """The result of the passes of all micro-batches of a step, all on the device.

    Attributes:
        loss: mean over all tokens of the global batch, 0-dim; 0 if no token counts.
        num_tokens: tokens that counted in it, over all ranks, 0-dim.
        metrics: further global means, 0-dim each.
    """

    loss: Tensor
    num_tokens: Tensor
    metrics: dict[str, Tensor]


Passes: TypeAlias = Callable[[Sequence[Any]], Any]
"""Forward, backward and reductions of one training step: from micro-batches on the device to reduced gradients.

The result is an :class:`StepOutcome`, or that of a user's own ``training_step``.
"""
StepRunner: TypeAlias = Callable[[Hashable, Sequence[Any], Passes], Any]
"""Runs the passes of a step in its own way: ``(a key of what else they depend on, micro_batches, passes)``."""


def run_passes(key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
    """Call the passes: the default runner."""
    return passes(micro_batches)


def share_of_batch(owner: str, batch: Any, rank: int, size: int, multiple: int, ahead: int = 0) -> Any:
    """Return ``batch.context_share(rank, size, multiple)``.

    Args:
        owner: the task's class, for the message.
        batch: a micro-batch.
        rank: which share.
        size: the number of shares.
        multiple: numbers of tokens are padded to a multiple of it.
        ahead: if it is not 0, the share also needs so many later tokens, and the method gets ``ahead``.

    Raises:
        ConfigurationError: the batch has no such method.
        DataError: its sequences are too short to be divided.
    """
    share, more = getattr(batch, "context_share", None), {"ahead": ahead} if ahead else {}
    if share is None or not _takes(share, (rank, size, multiple), more):
        needed = ", ".join(("rank", "size", "multiple", *more))
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} cannot be cut for context parallelism (cp={size}); give it a "
            f"context_share({needed}) method as megalight.types.TokenBatch has, or define "
            f"{owner}.context_share(batch, rank, size)."
        )
    return share(rank, size, multiple, **more)


def _takes(method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    try:
        inspect.signature(method).bind(*given, **named)
    except TypeError:
        return False
    return True


class StepDriver:
    """Runs training and evaluation steps of one model, under Lightning and in a plain loop.

    All ranks of a replica give the same micro-batches, of whole sequences. The first ones of a run are compared; frozen
    models run on them; under context parallelism, each rank then takes its share.

    Args:
        model: split, with values.
        task: the forward pass of its chunks, and the loss.
        varying_carry: the output of ``forward_step`` may change its names or shapes between micro-batches of equal
            shapes; pipeline stages then announce them before every message.
        context: entered around the task's code in each micro-batch (autocast, for example).
        around: entered around all micro-batches of a training step, with whether the optimizer's update follows.
        around_empty: entered around the task's code in an empty micro-batch, inside of ``context``.
        before_backward: called with each scalar before it is differentiated.

    Attributes:
        engine: reduces the gradients; needed for training.
        frozen: models that run before each schedule, by name. If there are any, ``forward_step`` and ``loss_step`` get
            :class:`~megalight.types.WithResults` instead of the micro-batch.
        runner: runs the passes of each training step; another runner may record and replay them.
        running: the number, in model order, of the pipeline stage whose code of the task runs, or ran last.
        token_shares: number of ranks that share the tokens of a layer's hidden states (sequence parallelism).
        layer_aux_losses: losses that layers attach. Each rank's loss is for its share of the tokens.
        aux_losses: further losses that ``loss_step`` returns; they are for all tokens.
    """

    def __init__(
        self,
        model: ParallelModel,
        task: TrainingTask,
        *,
        varying_carry: bool = False,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        around: Callable[[bool], AbstractContextManager[Any]] = nullcontext,
        around_empty: Callable[[], AbstractContextManager[Any]] = nullcontext,
        before_backward: Callable[[Tensor], object] = lambda loss: None,
    ) -> None:
        self.model = model
        self.task = task
        if hasattr(task, "token_multiple"):
            task.token_multiple = model.token_multiple
        self.context = context
        self.around = around
        self.around_empty = around_empty
        self.before_backward = before_backward
        self.engine: DataParallelEngine | None = None
        self.frozen: Mapping[str, FrozenRun] = {}
        self.runner: StepRunner = run_passes
        self.running = 0
        self.timetable = Timetable(model.layout.pipeline, model.pipeline_layout, model.mesh)
        messages = model.layout.pipeline.messages
        self.executor: ScheduleExecutor = Executor(
            model.chunks, model.pipeline_layout, model.mesh, model.device, varying_carry, messages
        )
        self.totals = GlobalTotals(model.mesh, model.device)
        self.token_shares = model.layout.token_multiple(model.mesh)
        self.layer_aux_losses = AttachedAuxLosses(model.device)
        self.aux_losses = AttachedAuxLosses(model.device)
        self._of_empty = ZeroAuxLosses(self.layer_aux_losses)
        self._compared = False

    def begin(self, engine: DataParallelEngine | None) -> None:
        """Begin a run, whose first batches are compared again. ``engine`` is None without training."""
        self.engine = engine
        self.runner = run_passes
        self._compared = False

    def build_frozen(self, declared: Mapping[str, FrozenModel], dtype: torch.dtype | None = None) -> None:
        """Build the models that run beside without being trained, by name. All ranks call this together.

        Args:
            dtype: dtype of those that declare none; None: that of the trained model.
        """
        dtype = dtype or next((each.dtype for each in self.model.parameters()), torch.get_default_dtype())
        mesh, device = self.model.mesh, self.model.device
        self.frozen = {name: frozen.build(name, mesh, dtype, device) for name, frozen in declared.items()}

    def check(self, batch: Any) -> None:
        """Compare the first batch of a run over the ranks of a replica; all of them call this.

        Raises:
            DataError: on all of them, if any rank got another batch.
        """
        # Once per run, because the host waits for the result.
        if not self._compared:
            self._compared = True
            if self.model.mesh.group(*REPLICA_AXES) is not None:
                check_same(batch, self.model.mesh, self.model.device)

    def train(self, micro_batches: Sequence[Any], scale: float = 1.0, sync: bool = True) -> StepOutcome:
        """Run forward and backward of this rank's share of a global batch.

        Args:
            micro_batches: at least one. Replicas may have different numbers of them.
            scale: multiplies the objective (1 / number of steps whose gradients are added up).
            sync: reduce the gradients, because no further micro-batches follow before the optimizer's step.
        """
        passes, joined = partial(self._passes, scale=scale, sync=sync), self.joined(micro_batches)
        # Before the runner: in passes that are replayed, ranks tell each other nothing on the host.
        done: StepOutcome = self.runner((scale, sync, self.executor.prepare(joined)), joined, passes)
        return done

    def evaluate(self, stage: str, micro_batches: Sequence[Any]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return ``name -> (sum, count)`` over all ranks and micro-batches, the same on every rank; forward only.

        Args:
            stage: names must be the same in all evaluations under one ``stage``.
        """
        rows = []
        joined = self.joined(micro_batches)
        # Carries exist on the last stage only. On other stages the loop is empty, and `totals` adds nothing.
        for micro_batch, carry in zip(joined, self._forward(joined), strict=False):
            loss = self._loss_step(carry, micro_batch)
            rows.append({"loss": (loss.sum, self._tokens([micro_batch])), **loss.metrics})
        return self.totals.of(stage, rows)

    def probe(self, micro_batches: Sequence[Any]) -> None:
        """Run forward and backward and reduce nothing, for those who watch gradients inside the layers.

        The scalar is the mean loss over the tokens of the global batch; auxiliary losses of layers do not count in it.
        Without an engine, parameters that need gradients keep them.
        """
        joined = self.joined(micro_batches)
        self.executor.prepare(joined)
        counts = self._count(joined, 1.0)
        nothing = {name: torch.zeros_like(factor) for name, factor in counts.aux_loss_scales.items()}
        for collector in (self.layer_aux_losses, self.aux_losses):
            collector.begin(torch.zeros_like(counts.micro_batch_scale), nothing)
        with self.around(False), torch.enable_grad():
            self._play(joined, counts)

    def outputs(self, micro_batches: Sequence[Any]) -> list[Carry]:
        """Return the last chunk's output for each micro-batch on the last stage, elsewhere nothing; forward only."""
        # Empty micro-batches come last, so cutting the list leaves the real ones.
        return self._forward(self.joined(micro_batches, cut=False))[: len(micro_batches)]

    def joined(self, micro_batches: Sequence[Any], cut: bool = True) -> Sequence[Any]:
        """Return what this rank runs: its shares of the micro-batches, with what frozen models made of them.

        Empty ones are added if data-parallel ranks communicate in a forward pass.

        Args:
            cut: False: all ranks run whole sequences.
        """
        if cut:
            self.check([contents(micro_batch) for micro_batch in micro_batches])
        peers = self.model.coupling
        joined = micro_batches if peers is None else peers.fill_up(micro_batches)
        cut = cut and self.model.mesh.cp > 1
        if not cut and not self.frozen:
            return joined
        given = batches = [contents(micro_batch) for micro_batch in joined]
        if self.frozen:
            with self.context():
                # In the same order on all ranks: each of these models exchanges tensors over all of them.
                found = {name: model(batches) for name, model in self.frozen.items()}
        if cut:
            # Only now: frozen models run on whole sequences. Their results stay whole.
            given = [self._share(batch) for batch in batches]
        if self.frozen:
            rows = [{name: results[place] for name, results in found.items()} for place in range(len(batches))]
            given = [WithResults(batch, results) for batch, results in zip(given, rows, strict=True)]
        empty = map(is_empty, joined)
        return [emptied(new) if none else new for new, none in zip(given, empty, strict=True)]

    def _share(self, batch: Any) -> Any:
        """Return this rank's share of the sequences of a micro-batch."""
        mesh, share = self.model.mesh, getattr(self.task, "context_share", None)
        if share is not None:
            return share(batch, mesh.rank("cp"), mesh.cp)
        owner = type(self.task).__name__
        return share_of_batch(owner, batch, mesh.rank("cp"), mesh.cp, self.model.token_multiple)

    def _forward(self, micro_batches: Sequence[Any]) -> list[Carry]:
        schedule = self.timetable("forward_only", len(micro_batches))
        self.executor.prepare(micro_batches)
        return self.executor.forward(schedule, micro_batches, self._forward_step, self.model.shards)

    def _passes(self, micro_batches: Sequence[Any], scale: float, sync: bool) -> StepOutcome:
        assert self.engine is not None
        with self.around(sync):
            # Before the first forward: each micro-batch is differentiated with its final scale, so no pass over the
            # gradients has to rescale them at the end, and gradients do not depend on how a batch is cut.
            counts = self._count(micro_batches, scale)
            # An auxiliary loss is a mean over this rank's share of the tokens. The mean over all of them is the sum
            # over `tp`, divided by the number of shares.
            shared = {name: factor / self.token_shares for name, factor in counts.aux_loss_scales.items()}
            self.layer_aux_losses.begin(counts.micro_batch_scale / self.token_shares, shared)
            self.aux_losses.begin(counts.micro_batch_scale, counts.aux_loss_scales)
            # The engine counts gradients inside, to send each bucket as soon as it is complete.
            with self.engine.micro_batches(len(micro_batches), sync):
                losses = self._play(micro_batches, counts)
            rows = [{"loss": (loss.sum, counts.tokens), **loss.metrics} for loss in losses]
            totals = self.totals.of("train", rows, self._aux_losses(), counts.micro_batches, counts.aux_loss_counts)
            totals["loss"] = totals["loss"][0], counts.tokens  # the number of tokens is already global
            means = {name: mean(total, count) for name, (total, count) in totals.items()}
        if sync:
            self.engine.finish_grad_sync()
            self.end()
        return StepOutcome(means.pop("loss"), counts.tokens, means)

    def end(self) -> None:
        """End an optimizer step: routers move their biases by the loads of the whole step."""
        end_step(self.model.root, self._total)

    def whole_aux_losses(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return losses of layers as means over all tokens, from those over this rank's share, with gradients."""
        if not values:
            return values
        # The backward of the sum is the identity, as each rank differentiates its own share of it.
        shares = torch.stack(list(values.values())) / self.token_shares
        return dict(zip(values, all_reduce(shares, self.model.mesh.group("tp")), strict=True))

    def _aux_losses(self) -> dict[str, Tensor]:
        """Return sums over micro-batches of the losses of this stage, from layers and from ``loss_step``."""
        found = dict(self.layer_aux_losses.totals)
        if self.token_shares > 1 and found:  # each rank's loss is the mean over its share of the tokens
            whole = self.totals.sum(torch.stack(list(found.values())), "tp") / self.token_shares
            found = dict(zip(found, whole, strict=True))
        for name, value in self.aux_losses.totals.items():
            found[name] = found[name] + value if name in found else value
        return found

    def _total(self, counts: Tensor) -> Tensor:
        """Sum counts of layers over the ranks that see different tokens."""
        return self.totals.sum(counts, *TOKEN_AXES, *["tp"] * (self.token_shares > 1))

    def _count(self, micro_batches: Sequence[Any], scale: float) -> GlobalCounts:
        """Count with one reduction, and without a wait for the device."""
        device = self.model.device
        real = sum(not is_empty(micro_batch) for micro_batch in micro_batches)
        here = {"": self._tokens(micro_batches), **self._aux_loss_counts(micro_batches)}
        # float64: float32 counts no further than 16.8 million, and a global batch may have more tokens. The last entry
        # is the number of micro-batches.
        numbers = torch.full((1 + len(here),), float(real), dtype=torch.float64, device=device)
        for place, count in enumerate(here.values()):
            # A count may be on the host. Each is copied to its place, because `stack` would refuse
            # tensors of two devices.
            numbers[place].copy_(count, non_blocking=True)
        numbers = self.totals.sum(numbers)
        scales = inverse(numbers) * scale
        names = list(here)[1:]
        return GlobalCounts(
            numbers[0],
            numbers[-1],
            scales[0],
            scales[-1],
            dict(zip(names, numbers[1:-1], strict=True)),
            dict(zip(names, scales[1:-1], strict=True)),
        )

    def _tokens(self, micro_batches: Sequence[Any]) -> Tensor:
        """Return how many tokens count in the loss."""
        counts = [self.task.loss_tokens(batch) for batch in _batches(micro_batches)]
        if odd := next((type(count).__name__ for count in counts if not isinstance(count, Tensor)), None):
            raise ConfigurationError(
                f"{type(self.task).__name__}.loss_tokens returned {odd}; return a 0-dim tensor on the device of the "
                "batch, mask.sum() or labels.new_tensor(labels.numel()), which no step waits for."
            )
        return _counted(counts, micro_batches)

    def _aux_loss_counts(self, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
        """Return what counts in the auxiliary losses that are sums, by name."""
        counts = getattr(self.task, "aux_loss_counts", None)
        rows = [] if counts is None else [counts(batch) for batch in _batches(micro_batches)]
        # Sorted: the reduction adds place by place, so all ranks need the same order of names.
        return {name: _counted([row[name] for row in rows], micro_batches) for name in sorted(rows[0])} if rows else {}

    def _play(self, micro_batches: Sequence[Any], counts: GlobalCounts) -> list[Loss]:
        def objective(loss: Loss) -> Tensor:
            # The tensor of counts stays on the device: the host never waits to learn how many tokens there are.
            total = loss.sum * counts.token_scale.to(loss.sum.dtype)
            self.before_backward(total)
            return total

        schedule = self.timetable("train", len(micro_batches))
        return self.executor.train(
            schedule, micro_batches, self._forward_step, self._attached, objective, self.model.shards
        )

    @contextmanager
    def _task_contexts(self, batch: Any) -> Iterator[None]:
        """Enter the contexts of the task's code for one micro-batch."""
        empty = is_empty(batch)
        losses = self._of_empty if empty else self.layer_aux_losses
        with self.context(), self.around_empty() if empty else nullcontext(), collecting(losses):
            yield

    def _forward_step(self, chunk: nn.Module, batch: Any, carry: Carry | None) -> Carry:
        chunk.training = self.model.root.training  # a stage is a separate object with its own mode
        self.running = self.model.stages[self.model.chunks.index(chunk)].index
        stage: DeclaredStage | None = STAGE.get(chunk)
        with self._task_contexts(batch):
            if stage is not None:
                return stage.run(lambda whole: self.task.forward_step(whole, contents(batch)), carry)
            return self.task.forward_step(chunk, contents(batch), carry)

    def _attached(self, carry: Carry, batch: Any) -> Loss:
        """Return the micro-batch's loss, with its auxiliary losses attached to the sum."""
        loss = self._loss_step(carry, batch)
        total = loss.sum
        for name, value in loss.aux_losses.items():
            total = self.aux_losses.attach(name, value, total)
        return replace(loss, sum=total, aux_losses={})

    def _loss_step(self, carry: Carry, batch: Any) -> Loss:
        self.running = len(self.model.pipeline_layout.stages) - 1
        with self._task_contexts(batch):
            loss = self.task.loss_step(carry, contents(batch))
        if not isinstance(loss, Loss):
            raise ConfigurationError(
                f"{type(self.task).__name__}.loss_step returned {type(loss).__name__}; return "
                "megalight.types.Loss(sum=...), the sum of the losses of the micro-batch's tokens."
            )
        # An empty micro-batch runs for its collectives alone; its loss is multiplied away, but it keeps its graph.
        return nothing(loss) if is_empty(batch) else loss


def _batches(micro_batches: Sequence[Any]) -> list[Any]:
    """Return the batches as the task knows them, without results of frozen models."""
    given = [contents(micro_batch) for micro_batch in micro_batches]
    return [batch.batch if isinstance(batch, WithResults) else batch for batch in given]


def _counted(counts: Sequence[Tensor], micro_batches: Sequence[Any]) -> Tensor:
    """Return the sum of the counts of micro-batches. Those of empty ones are zero."""
    empty = [is_empty(micro_batch) for micro_batch in micro_batches]
    return torch.stack([n.detach() * 0 if none else n.detach() for n, none in zip(counts, empty, strict=True)]).sum()

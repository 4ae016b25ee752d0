"""Parallel training in a plain torch loop, without Lightning.

::

    model = megalight.parallelize(net, megalight.Layout(tensor_parallel=2, pipeline_parallel=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = megalight.Training(model, optimizer, task)
    for micro_batches in batches:
        outcome = training.forward_backward(micro_batches)
        training.clip_grad_norm(1.0)
        optimizer.step()
    training.save("checkpoint")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megalight.checkpoint.run import PlainRun
from megalight.optim import Muon, shard_optimizer
from megalight.parallel.data_parallel import DataParallelOptions, clip_coefficient
from megalight.parallel.frozen_model import FrozenModel
from megalight.parallel.initial_values import broadcast_values
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import uses_backend
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.run_engine import engine_over
from megalight.parallel.source import Source
from megalight.parallel.step import StepDriver, StepOutcome, TrainingTask
from megalight.types import mean


def parallelize(
    model: nn.Module,
    layout: Layout | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    source: Source | None = None,
    fill: bool = False,
) -> ParallelModel:
    """Split a one-device model over all processes; data parallelism takes the ranks that the degrees leave.

    All ranks call this together, after ``torch.distributed.init_process_group``. A model on the meta device is never
    whole on any rank: its parts are drawn, with the same values under every layout, when :class:`Training` has made
    storage for them. A model that has values gets those of rank 0.

    Args:
        model: changed in place.
        layout: how it is split; None: not, so that all ranks are replicas.
        device: of the parameters; None: the current GPU where the process group speaks NCCL, else the CPU.
        dtype: of the floating-point parameters; None: as they are. bfloat16 ones get float32 masters when trained.
        seed: of the initial values, and of torch's random generators: equal along ``tp``, different elsewhere.
        source: values to begin from (``megalight.checkpoint.open(path)``, say).
        fill: give the parameters memory and values now, for a model that is not trained.

    Raises:
        LayoutError: the model, or the number of processes, does not divide so.
        ConfigurationError: no plan says how to split the model; options that cannot work together.
    """
    world = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    layout = layout or Layout()
    mesh = layout.mesh(*world)
    place = torch.device(device) if device is not None else _usual_device()
    # Rank 0's values for all, or replicas would begin from different ones.
    broadcast_values(model, place)
    parallel = ParallelModel.build(model, mesh, layout, device=place, dtype=dtype, seed=seed, source=source, fill=fill)
    # Last: building a model may draw, and the seed must not depend on how much.
    RandomStreams(mesh).seed(seed)
    return parallel


class Training(PlainRun):
    """One training run of one model: gradients over micro-batches and ranks, masters, clipping.

    The optimizer is pointed at this rank's shard of the parameters and then stepped as usual;
    ``optimizer.zero_grad()`` is not needed.

    Args:
        model: from :func:`parallelize`. ``data_parallel`` of its layout says how replicas share gradients and optimizer
            state. By default updated parameters are gathered inside ``optimizer.step()``; with
            ``overlap_param_gather=True`` that runs on into the next forward, and :meth:`sync_parameters` comes before
            anything else that reads weights.
        optimizer: over ``model.parameters()``, in any parameter groups; it updates each element by itself (Adam, SGD).
        task: what the chunks of the model compute, and the loss.
        frozen: models that run beside without being trained, by name; see
            :class:`~megalight.parallel.frozen_model.FrozenModel`. All ranks make them here together.
        varying_carry: what ``forward_step`` returns may change shapes between micro-batches of equal shapes.
        broadcast_buffers: whether all replicas take over the buffers of the first one after each step.
        context: made around the task's code in each micro-batch (autocast, say).

    Raises:
        ConfigurationError: the optimizer cannot step on shards, or lacks a trainable parameter.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        task: TrainingTask,
        *,
        frozen: Mapping[str, FrozenModel] | None = None,
        varying_carry: bool = False,
        broadcast_buffers: bool = True,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._broadcast_buffers = broadcast_buffers
        # Gathers stay inside the step by default: plain code may read weights right after it.
        options = (model.layout.data_parallel or DataParallelOptions(overlap_param_gather=False)).finding_unused(True)
        new = not model.filled
        self.engine = engine_over([model], [group["params"] for group in optimizer.param_groups], options)
        # Transforms change values once these exist; masters were made from the values before.
        if new and model.transform_values():
            self.engine.refresh_masters()
        self.engine.parameters.attach_gather_hooks(model.root)
        shard_optimizer(optimizer, self.engine)
        if isinstance(optimizer, Muon):
            optimizer.watch(model)
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        self.step = StepDriver(model, task, varying_carry=varying_carry, context=context)
        self.step.begin(self.engine)
        self.step.build_frozen(frozen or {})
        self._fresh = True

    def forward_backward(self, micro_batches: Sequence[Any], *, scale: float = 1.0, sync: bool = True) -> StepOutcome:
        """Forward and backward of this replica's micro-batches of one global batch; gradients are reduced.

        The gradient is that of the mean loss over all tokens of the global batch. All ranks of a replica
        (``model.mesh.rank("dp")``) pass the same micro-batches; under context parallelism each takes its share of them
        by ``task.context_share(batch, rank, size)`` or, without it, ``batch.context_share(rank, size, multiple)``.

        Args:
            scale: multiplies the objective: ``1 / n`` where gradients of ``n`` global batches are added up.
            sync: False: more global batches follow before ``optimizer.step()``.

        Raises:
            DataError: the ranks of a replica were given different batches (looked at in the first call).
        """
        self.begin_step()
        return self.step.train(micro_batches, scale, sync)

    def begin_step(self) -> None:
        """Clear the gradients if an optimizer step has passed: they can be looked at until the next step begins."""
        if self._fresh:
            self._fresh = False
            self.engine.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a global norm of ``max_norm`` at most; returns the norm before, on the device."""
        norm = self.engine.grad_norm()
        self.engine.scale_gradients(clip_coefficient(norm, max_norm))
        return norm

    def evaluate(self, micro_batches: Sequence[Any]) -> dict[str, Tensor]:
        """``loss`` and the task's metrics: means over the global batch, the same on every rank; forward only.

        Put the model in evaluation mode before (:meth:`ParallelModel.eval`).
        """
        totals = self.step.evaluate("evaluate", micro_batches)
        return {name: mean(total, count) for name, (total, count) in totals.items()}

    def sync_parameters(self) -> None:
        """Wait until every parameter holds the values of the last step; costs nothing where they do."""
        self.engine.sync_parameters()

    def _stepped(self) -> None:
        self.engine.publish()
        if self._broadcast_buffers:
            self.model.broadcast_buffers()
        self._fresh = True


def _usual_device() -> torch.device:
    on_gpu = dist.is_initialized() and uses_backend("nccl")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

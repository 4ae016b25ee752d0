"""Optimization on ordinary parameters, for what cannot step on shards: each rank then holds the whole model.

Manual optimization, several optimizers, optimizers that are not element-wise, and callbacks that average the weights of
the module run in Lightning's own loop, on the parameters and gradients of the user's module. When an optimizer steps,
its gradients are averaged over the replicas; with manual optimization they are also averaged after each backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.optim.sharded import steps_on_shards
from megalight.parallel.mesh import ParallelMesh
from megalight.strategies.mesh_strategy import MeshStrategy


def is_needed(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the optimizers, or a callback, cannot work on shards."""
    return (
        not module.automatic_optimization
        or len(optimizers) > 1
        or not all(map(steps_on_shards, optimizers))
        or averager(module.trainer) is not None
    )


def averager(trainer: pl.Trainer) -> pl.Callback | None:
    """Return Lightning's callback that averages the module's own parameters, if there is one."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, WeightAveraging | StochasticWeightAveraging)), None)


def check_early(strategy: MeshStrategy, trainer: pl.Trainer, module: pl.LightningModule, mesh: ParallelMesh) -> None:
    """Refuse manual optimization and averaging callbacks where they cannot work, before anything is built."""
    what = _reason(trainer, module, ())
    if what is not None:
        _check(strategy, trainer, module, what, mesh)


def check(strategy: MeshStrategy, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what needs whole parameters where a rank does not hold, or cannot step, all of them.

    Raises:
        ConfigurationError: the message names what to change.
    """
    trainer = module.trainer
    what = _reason(trainer, module, optimizers)
    assert what is not None
    _check(strategy, trainer, module, what, strategy.mesh)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if getattr(callback, "needs_shards", False):
            raise ConfigurationError(
                f"{what}, so there are no flat shards, which {type(callback).__name__} works on. Remove this callback, "
                "or use one element-wise optimizer with automatic optimization."
            )


def _reason(trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> str | None:
    """Return what needs whole parameters; None: nothing does."""
    other = next((optimizer for optimizer in optimizers if not steps_on_shards(optimizer)), None)
    averaging = averager(trainer)
    if not module.automatic_optimization:
        return f"{type(module).__name__} uses manual optimization"
    if averaging is not None:
        return f"{type(averaging).__name__} averages whole parameters"
    if other is not None:
        first = other.param_groups[0]["params"][0]
        name = next((name for name, parameter in module.named_parameters() if parameter is first), "its parameters")
        return (
            f"{type(other).__name__} is not known to update each element of {name} only from its own gradient (set "
            "elementwise = True on the class if it does)"
        )
    return f"{type(module).__name__} has {len(optimizers)} optimizers" if len(optimizers) > 1 else None


def _check(
    strategy: MeshStrategy, trainer: pl.Trainer, module: pl.LightningModule, what: str, mesh: ParallelMesh
) -> None:
    averaged = module.automatic_optimization and averager(trainer) is not None
    instead = "megalight.callbacks.EMA" if averaged else "one element-wise optimizer with automatic optimization"
    split = [f"{axis}={mesh.size(axis)}" for axis in ("tp", "pp", "cp", "ep") if mesh.size(axis) > 1]
    if split:
        raise ConfigurationError(
            f"{what}, which needs whole parameters and gradients, but {' and '.join(split)} divide the model or its "
            f"tokens. Use {instead}, or leave these degrees at 1."
        )
    if mesh.dp > 1 and strategy.data_parallel.level != "no_shard":
        raise ConfigurationError(
            f"{what}, which needs whole gradients and optimizer state on every rank, but data_parallel.level="
            f"{strategy.data_parallel.level!r} divides them. Pass data_parallel=DataParallelOptions(level='no_shard'), "
            f"or use {instead}."
        )
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [name for name, each in module.named_modules() if isinstance(each, kinds) and each.sparse]
    if mesh.dp > 1 and found:
        raise ConfigurationError(
            f"{what}, and the gradients of {found[0]} are sparse (sparse=True), which replicas do not average. Set "
            f"sparse=False, use {instead}, or one device."
        )
    if strategy.micro_batch_size is not None:
        raise ConfigurationError(
            f"{what}, which runs training_step on whole batches, but micro_batch_size={strategy.micro_batch_size}. "
            "Leave it out, and use accumulate_grad_batches or a smaller batch."
        )
    if strategy.precision.loss_scale is not None:
        raise ConfigurationError(
            f"{what}, which is not run with loss scaling (precision={strategy.precision.precision!r}). Use bf16-mixed, "
            f"or {instead}."
        )
    if isinstance(module, MegalightModule):
        if isinstance(averager(trainer), StochasticWeightAveraging):
            raise ConfigurationError(
                f"{what}, and it copies {type(module).__name__} before its model is built. Use {instead}."
            )
        if mesh.dp > 1 and type(module).training_step is MegalightModule.training_step:
            raise ConfigurationError(
                f"{what}, so each replica would count its own tokens only. Use {instead}, or one device."
            )
        if strategy.precision.dtype.itemsize < 4:
            raise ConfigurationError(
                f"{what}, which would step on {strategy.precision.dtype} weights without float32 masters. Use "
                f"precision='32-true', or {instead}."
            )


def averaging(optimizer: Optimizer, closure: Callable[[], Any], mesh: ParallelMesh) -> Callable[[], Any]:
    """Return a closure that also averages the gradients of the optimizer, and the loss, over the replicas."""
    group = mesh.group("dp")
    if group is None:
        return closure

    def averaged() -> Any:
        loss = closure()
        with torch.no_grad():
            average_gradients([p for part in optimizer.param_groups for p in part["params"]], group)
            if isinstance(loss, Tensor):  # a line search must see the same loss on all ranks
                loss = loss.detach().clone()
                dist.all_reduce(loss, group=group)
                loss /= group.size()
        return loss

    return averaged


class BackwardAverages:
    """Averages gradients over the replicas at the end of each backward of manual optimization.

    They may then be read or clipped. As under DDP, anybody may call it: ``manual_backward`` of the module, or
    ``backward`` of a tensor, which must bring gradients on all replicas.

    Args:
        module: its parameters' gradients are averaged. None, or a module with automatic optimization: nothing is done.
        mesh: the grid of ranks.
    """

    def __init__(self, module: pl.LightningModule | None, mesh: ParallelMesh) -> None:
        self.module = module
        manual = module is not None and not module.automatic_optimization
        self.group = mesh.group("dp") if manual else None
        self._due = self._done = False
        trained = [] if self.group is None else self._parameters()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in trained]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a ``manual_backward``."""
        self._due = self._done = False

    def end(self) -> None:
        """End it. Where it brought no gradients to this rank, it may have brought some to others."""
        if self.group is not None and not self._done:
            self._average()

    def close(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, parameter: Tensor) -> None:
        if not self._due:
            self._due = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        assert self.group is not None
        self._due, self._done = False, True
        with torch.no_grad():
            average_gradients(self._parameters(), self.group)

    def _parameters(self) -> list[Tensor]:
        assert self.module is not None
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients over a group, with one message per dtype. A gradient that no rank has stays None."""
    # One message per dtype, because a flat tensor has one dtype.
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        ours = [parameter for parameter in parameters if parameter.dtype == dtype]
        # Zeros for gradients that are missing here: every rank must send a tensor of the same size.
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in ours]
        flags = torch.tensor([float(p.grad is not None) for p in ours], dtype=dtype).to(ours[0].device)
        flat = torch.cat([*(gradient.reshape(-1) for gradient in given), flags])
        dist.all_reduce(flat, group=group)
        sizes = [*(gradient.numel() for gradient in given), len(ours)]
        *means, found = torch.split(flat / group.size(), sizes)
        # reading the flags waits for the device, so do it only if a gradient is missing here
        missing = any(parameter.grad is None for parameter in ours)
        arrived = found.tolist() if missing else [1.0] * len(ours)
        for parameter, mean, any_rank in zip(ours, means, arrived, strict=True):
            if any_rank:
                parameter.grad = mean.view(parameter.shape)

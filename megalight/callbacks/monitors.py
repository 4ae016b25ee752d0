"""Metrics of each step: learning rate, gradient norm and loss, and the loads of experts."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.nn.moe import Router
from megalight.strategies.mesh_strategy import MeshStrategy


class OptimizerMonitor(pl.Callback):
    """Logs ``lr`` and ``grad_norm`` every ``log_every_n_steps`` steps, to every logger.

    With clipping by norm, ``MegatronStrategy`` computes and logs ``grad_norm`` in every step. Without clipping it costs
    one pass over the gradients in each step that is logged. It is not logged under strategies that shard gradients in
    their own way, nor with 16-bit precision, whose gradients are scaled.

    Lightning leaves out the last step of a run if its number is no multiple. It is logged when training ends: these
    values, and others whose names begin with ``train_``.

    Nothing waits for the device before that.

    Logs:
        lr: learning rate of the first parameter group.
        grad_norm: norm of the whole gradient before clipping, over all ranks.
    """

    reads_weights = False

    def __init__(self) -> None:
        self._last: tuple[int, float | None] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the last step of an earlier run."""
        self._last = None

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Log the values of the step that comes, under its number."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        rate = learning_rate(trainer)
        # The step that comes has the next number, under which Lightning logs.
        if not every or (trainer.global_step + 1) % every:
            # A schedule changes the rate after the step.
            self._last = None if not every else (trainer.global_step, None if isinstance(rate, Tensor) else rate)
            return
        self._last = None
        if isinstance(rate, Tensor):  # on the device, for optimizers that are recorded
            pl_module.log("lr", rate.detach().clone(), on_step=True, on_epoch=False, batch_size=1)
        elif rate is not None:  # ``log`` would copy it to the device, and wait
            for logger in trainer.loggers:
                logger.log_metrics({"lr": rate}, step=trainer.global_step)
        norm = gradient_norm(trainer, pl_module)
        if norm is not None:
            pl_module.log("grad_norm", norm, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last step, unless Lightning has."""
        if self._last is None:
            return
        (step, rate), found = self._last, trainer.callback_metrics
        values = {name: float(value) for name, value in found.items() if name.startswith("train_")}
        if isinstance(trainer.strategy, MeshStrategy) and "grad_norm" in found and trainer.gradient_clip_val:
            values["grad_norm"] = float(found["grad_norm"])  # of every step, while others are of the last logged one
        if rate is not None:
            values["lr"] = rate
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)


def learning_rate(trainer: pl.Trainer) -> float | Tensor | None:
    """Return the learning rate of the first group of the first optimizer."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rate: float | Tensor | None = groups[0].get("lr") if groups else None
    return rate


def gradient_norm(trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
    """Return the norm of the gradient before clipping. None: the strategy logs it, or it is not known here."""
    strategy = trainer.strategy
    if isinstance(strategy, MeshStrategy):
        logged = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        return None if logged or strategy.engine is None else strategy.engine.grad_norm()
    # Gradients of 16-bit precision are still scaled here.
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not str(trainer.precision).startswith("16")
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients) if known and gradients else None


class ExpertLoads(pl.Callback):
    """Logs the loads of the experts and the losses of the router of each layer, every ``log_every_n_steps`` steps.

    Values are those of the whole step, over all ranks. The host does not wait for the device. ``megalight plot`` draws
    them.

    Args:
        each: also log the load of each expert.

    Logs:
        experts_<layer>/max_load: choices of the busiest expert, divided by the mean.
        experts_<layer>/min_load: choices of the least busy expert, divided by the mean.
        experts_<layer>/drop_rate: share of the choices that exceeded the capacity.
        experts_<layer>/<loss>: a loss of the router without its coefficient, such as ``aux_loss`` (1 for balanced
            experts).
        experts_<layer>/load_<expert>: choices of one expert, divided by the mean (``each=True``).

    Raises:
        ConfigurationError: the model has no experts.
    """

    def __init__(self, each: bool = False) -> None:
        self.each = each
        self._routers: dict[str, Router] = {}
        self._names: dict[str, list[str]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the routers count, and learn the layers of other pipeline stages."""
        self._routers = {_label(name): m for name, m in pl_module.named_modules() if isinstance(m, Router)}
        for router in self._routers.values():
            # Routers count only where somebody reads the counts.
            router.observed = True
        own = {label: self._columns(router) for label, router in self._routers.items()}
        found = [own]
        # Each stage has routers of its own layers, and all of them log equal names.
        if (group := _stages(trainer)) is not None:
            found *= group.size()
            dist.all_gather_object(found, own, group=group)
        self._names = {label: names for stage in found for label, names in stage.items()}
        if not self._names:
            raise ConfigurationError(
                f"ExpertLoads: {type(pl_module).__name__} has no router of megalight.nn.moe. Give its configuration "
                "experts (moe), or remove the callback."
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the last step."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or trainer.global_step % every or not trainer.global_step:
            return
        rows = {label: self._row(router) for label, router in self._routers.items() if router.loads is not None}
        device = pl_module.device
        # Zeros for layers of other stages, so that the sum over stages is each layer's own row.
        # Made on the device: a copy of host memory would have the host wait for the step.
        empty = {n: torch.zeros(len(names), dtype=torch.float64, device=device) for n, names in self._names.items()}
        values = torch.cat([rows.get(label, zeros) for label, zeros in empty.items()])
        if (group := _stages(trainer)) is not None:
            dist.all_reduce(values, group=group)  # each layer is on one stage
        names = [f"experts_{label}/{name}" for label, columns in self._names.items() for name in columns]
        # Tensors on the device: Lightning reads them when a logger asks.
        pl_module.log_dict(dict(zip(names, values, strict=True)), batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the routers count no longer than they need."""
        for router in self._routers.values():
            router.observed = False

    def _columns(self, router: Router) -> list[str]:
        loads = [f"load_{expert}" for expert in range(len(router.weight))] if self.each else []
        return ["max_load", "min_load", "drop_rate", *router.balance.names, *loads]

    def _row(self, router: Router) -> Tensor:
        loads, dropped = router.loads, router.dropped
        assert loads is not None
        assert dropped is not None
        # 1 is the mean load, whatever the number of tokens.
        relative = loads / loads.mean()
        first = [relative.max(), relative.min(), dropped.sum() / loads.sum(), *router.losses.values()]
        return torch.cat([torch.stack(first), relative]) if self.each else torch.stack(first)


def _label(name: str) -> str:
    """Return the number of the layer that holds a router, or else the router's name."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return match[1] if match else name


def _stages(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    """Return the group of the pipeline's stages; None: there is one stage."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return None if mesh is None else mesh.group("pp")

"""Logs how busy the experts of each layer are."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.nn.moe import Router


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

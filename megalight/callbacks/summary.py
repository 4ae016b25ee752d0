"""A summary of the whole model, whatever part of it this rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from torch import nn

from megalight.models.module import MegalightModule
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.whole_model import whole_model


class WholeModelSummary(ModelSummary):
    """Prints the parameters of the whole model when a stage starts, by the model's largest parts.

    Lightning's own summary counts what one rank holds, and layers only. This one counts the one-device model, and says
    which part of it rank 0 holds.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary on rank 0."""
        if trainer.is_global_zero and self._max_depth:
            print(render(pl_module, trainer), flush=True)


def render(module: pl.LightningModule, trainer: pl.Trainer) -> str:
    """Return the summary as text."""
    whole = whole_model(module)
    rows = [(name, type(child).__name__, _count(child.parameters())) for name, child in whole.named_children()]
    total, trainable = _count(whole.parameters()), _count(p for p in whole.parameters() if p.requires_grad)
    held = _count(module.parameters())
    strategy = trainer.strategy
    if not isinstance(module, MegalightModule) and isinstance(strategy, MeshStrategy) and strategy.mesh.world_size > 1:
        total = trainable = 0  # a module that was split where it stands: its specs know the whole
        assert strategy.parallel_model is not None
        for name, tensor in strategy.parallel_model.tensors().items():
            numel = sum(prod(piece.shape) for piece in strategy.parallel_model.specs[name].pieces)
            total += numel if isinstance(tensor, nn.Parameter) else 0
            trainable += numel if tensor.requires_grad else 0
        rows = []
    width = max((len(name) for name, *_ in rows), default=0)
    kind = max((len(kind) for _, kind, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {cls:<{kind}}  {_short(count):>8}" for name, cls, count in rows if count]
    frozen = "all trainable" if trainable == total else f"{_short(trainable)} trainable"
    layout = f" ({strategy.mesh.describe()})" if isinstance(strategy, MeshStrategy) else ""
    part = f"; rank 0 holds {_short(held)}{layout}" if held != total else ""
    return "\n".join([f"{type(module).__name__}: {_short(total)} parameters, {frozen}{part}", *lines])


def _count(parameters: Iterable[nn.Parameter]) -> int:
    # By identity: a tied parameter counts once.
    return sum(parameter.numel() for parameter in {id(parameter): parameter for parameter in parameters}.values())


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)

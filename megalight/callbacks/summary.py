"""A summary of the whole model, whatever part of it this rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from torch import nn

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
            print(render(pl_module, trainer, self._max_depth), flush=True)


def render(module: pl.LightningModule, trainer: pl.Trainer, max_depth: int = 1) -> str:
    """Return the summary as text, with so many levels of parts; -1: all."""
    strategy = trainer.strategy
    whole = whole_model(module, strategy.parallel_model if isinstance(strategy, MeshStrategy) else None)
    rows = [
        (name, type(part).__name__, _count(part.parameters()))
        for name, part in whole.named_modules()
        if name and (max_depth < 0 or name.count(".") < max_depth)
    ]
    total, trainable = _count(whole.parameters()), _count(p for p in whole.parameters() if p.requires_grad)
    held = _count(module.parameters())
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

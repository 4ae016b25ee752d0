"""The parts of a Lightning step as spans: a base for callbacks that listen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from megalight.parallel.trace import Listener, listen
from megalight.strategies.mesh_strategy import MeshStrategy


def label(name: str, where: dict[str, int]) -> str:
    """A span as people read it: ``forward chunk=0 micro_batch=3``."""
    return name + "".join(f" {key}={value}" for key, value in where.items())


class StepSpans(pl.Callback, ABC):
    """Listens while ``fit`` trains, and adds the spans that Lightning's hooks show.

    ``step`` (one batch), ``data`` (waiting for the next) and ``optimizer`` (clipping and the update) under every
    strategy; ``forward`` and ``backward`` where the strategy is none of ours, which tell of theirs themselves.
    Whatever is open when something fails is ended.

    Attributes:
        during_validation: whether to go on listening then.
    """

    during_validation = True

    @abstractmethod
    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Listener | None:
        """Made when training starts; None: this rank does not listen."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._stops: list[Callable[[], None]] = []
        self._open: list[str] = []
        self._foreign = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to listen."""
        self._finish()
        self._listener = self.listener(trainer, pl_module)
        self._foreign = not isinstance(trainer.strategy, MeshStrategy)
        self._listen(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is there."""
        self._end_all()  # the wait for it; or a step that a module skipped
        self._begin("step")
        if self._foreign:
            self._begin("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """The forward pass of a strategy that is none of ours is over."""
        if self._foreign:
            self._end("forward")
            self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """So is the backward pass."""
        self._end("backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Clipping and the update come next; :meth:`_listen` sees the end of them."""
        self._begin("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is over; the next batch is waited for."""
        self._end_all()
        self._begin("data")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """What comes is no waiting for data."""
        self._end("data")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training pauses."""
        self._end_all()
        if not self.during_validation:
            self._stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training goes on."""
        if not self.during_validation and self._listener is not None:
            self._listen(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen no longer."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End what is open."""
        self._finish()

    def _listen(self, trainer: pl.Trainer) -> None:
        if self._listener is not None:
            self._stops = [listen(self._listener)]
            for optimizer in trainer.optimizers:
                self._stops.append(optimizer.register_step_post_hook(lambda *given: self._end("optimizer")).remove)

    def _begin(self, name: str) -> None:
        if self._listener is not None:
            self._open.append(name)
            self._listener.begin(name, {})

    def _end(self, name: str) -> None:
        """End a span if it is open, and what is open inside it."""
        while name in self._open:
            self._end_last()

    def _end_all(self) -> None:
        while self._open:
            self._end_last()

    def _end_last(self) -> None:
        assert self._listener is not None
        self._listener.end(self._open.pop())

    def _stop(self) -> None:
        for stop in self._stops:
            stop()
        self._stops = []

    def _finish(self) -> None:
        self._end_all()
        self._stop()
        self._listener = None

"""A base class for callbacks that listen to spans: the parts of a Lightning step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from megalight.parallel.trace import Listener, listen
from megalight.strategies.mesh_strategy import MeshStrategy


def label(name: str, where: dict[str, int]) -> str:
    """Return the label of a span: ``forward chunk=0 micro_batch=3``."""
    return name + "".join(f" {key}={value}" for key, value in where.items())


class StepSpans(pl.Callback, ABC):
    """Listens to spans while ``fit`` trains, and adds spans from Lightning's hooks.

    The added spans are ``step`` (one batch), ``data`` (waiting for the next batch) and ``optimizer`` (clipping and the
    update). Our own strategies report ``forward`` and ``backward``; for other strategies they are added too. Open spans
    end when an error occurs.

    Attributes:
        during_validation: whether to listen during validation.
    """

    during_validation = True

    @abstractmethod
    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Listener | None:
        """Create the listener when training starts. None: this rank does not listen."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._stops: list[Callable[[], None]] = []
        self._open: list[str] = []
        self._foreign = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to listen."""
        # A second fit may begin without the end of the first.
        self._finish()
        self._listener = self.listener(trainer, pl_module)
        # With our strategies, spans of passes come from the passes themselves.
        self._foreign = not isinstance(trainer.strategy, MeshStrategy)
        self._listen(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End ``data`` and begin ``step``."""
        self._end_all()  # `data`, or a step that the module skipped
        self._begin("step")
        if self._foreign:
            self._begin("forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        """End ``forward`` and begin ``backward``, for strategies that do not report them."""
        if self._foreign:
            self._end("forward")
            self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End ``backward``."""
        self._end("backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Begin ``optimizer``. A hook on the optimizer ends it (:meth:`_listen`)."""
        self._begin("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End ``step`` and begin ``data``."""
        self._end_all()
        self._begin("data")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """End ``data``: saving is not waiting for data."""
        self._end("data")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End all spans; stop listening unless ``during_validation``."""
        self._end_all()
        if not self.during_validation:
            self._stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen again."""
        if not self.during_validation and self._listener is not None:
            self._listen(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop listening."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End all open spans and stop listening."""
        self._finish()

    def _listen(self, trainer: pl.Trainer) -> None:
        if self._listener is not None:
            self._stops = [listen(self._listener)]
            for optimizer in trainer.optimizers:
                # Lightning has no hook after the update; without this, the end of the batch would be it.
                self._stops.append(optimizer.register_step_post_hook(lambda *given: self._end("optimizer")).remove)

    def _begin(self, name: str) -> None:
        if self._listener is not None:
            self._open.append(name)
            self._listener.begin(name, {})

    def _end(self, name: str) -> None:
        """End a span if it is open, together with the spans inside it."""
        # Spans nest: what began inside must end first.
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
        # In this order: the ends of open spans must still reach the listener.
        self._end_all()
        self._stop()
        self._listener = None

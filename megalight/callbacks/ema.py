"""An exponential moving average of the weights, computed on the sharded fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from megalight.errors import ConfigurationError

STATE = "ema"
"""Checkpoints hold the average as ``ema.<canonical parameter name>``."""

SWAP_ELEMENTS = 2**24
"""Elements that are swapped at a time: 64 MiB of extra memory in fp32."""


class EMA(pl.Callback):
    """Keeps ``average = decay * average + (1 - decay) * weights``, and uses it for validation and test.

    Each rank averages its shard of the fp32 master weights. This takes one more fp32 number per parameter over all
    data-parallel ranks together, and no communication. The average is saved by canonical name, so a run may resume with
    another parallel layout. Lightning's ``WeightAveraging`` and ``StochasticWeightAveraging`` need whole parameters on
    every rank.

    While the average is used, the parameters wait in host memory, in their own dtype, if masters are divided over
    data-parallel ranks. So a rank whose validation ends with an error has its weights again, without the others.

    Args:
        decay: in [0, 1). The average covers about the last ``every_n_steps / (1 - decay)`` steps.
        start_step: the first optimizer step that counts. The average starts as the weights after it.
        every_n_steps: optimizer steps between updates.
        evaluate: whether validation and test use the average instead of the weights.

    Attributes:
        updates: number of updates so far.

    Raises:
        ConfigurationError: an argument is out of range, or the strategy has no sharded master weights (in ``fit``).
    """

    def __init__(
        self, decay: float = 0.999, start_step: int = 0, every_n_steps: int = 1, evaluate: bool = True
    ) -> None:
        if not 0 <= decay < 1 or start_step < 0 or every_n_steps < 1:
            raise ConfigurationError(
                f"decay is {decay}, start_step is {start_step}, every_n_steps is {every_n_steps}; decay must be at "
                "least 0 and below 1, start_step at least 0, every_n_steps at least 1."
            )
        self.decay = decay
        self.start_step = start_step
        self.every_n_steps = every_n_steps
        self.evaluate = evaluate
        self.updates = 0
        self._step = 0
        self._put_back: Callable[[], None] | None = None
        """Gives the parameters the values of the weights; None: they have them."""
        self._restored = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Allocate the average if the checkpoint holds one. Its values are read later, with the optimizer state."""
        masters, states = _masters(trainer), _states(trainer)
        if self._restored:
            # Of the same shards as the masters, so that loading fills the part that this rank holds.
            states[STATE] = [torch.empty_like(master) for master in masters]
        # Another fit of the same model keeps its average. One with other shards cannot.
        elif [average.shape for average in states.get(STATE, [])] != [master.shape for master in masters]:
            states.pop(STATE, None)
            self.updates = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the average as the weights, unless a checkpoint held one."""
        self._restored = False
        self._step = trainer.global_step
        if STATE not in _states(trainer):
            _states(trainer)[STATE] = [master.clone() for master in _masters(trainer)]

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the average if this batch ended an optimizer step."""
        step = trainer.global_step
        # Batches that only accumulate do not change the weights.
        if step == self._step:
            return
        self._step = step
        if step < self.start_step or (self.updates and (step - self.start_step) % self.every_n_steps):
            return
        masters, averages = _masters(trainer), _states(trainer)[STATE]
        # The first update copies: an average that began at zero would need a correction.
        # If nothing on this rank is trained, both lists are empty, which torch refuses.
        if masters and self.updates == 0:
            torch._foreach_copy_(averages, masters)
        elif masters:
            # One launch for all shards: `average += (1 - decay) * (weights - average)`.
            torch._foreach_lerp_(averages, masters, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self, trainer: pl.Trainer) -> Iterator[None]:
        """Context manager in which the model has the averaged weights: to evaluate, export or save them.

        All ranks enter and leave it together. A rank that leaves it with an error waits for nobody.
        """
        # Inside a validation the model has them already.
        outermost = self._put_back is None
        if outermost:
            self._enter(trainer)
        try:
            yield
        except BaseException:
            if outermost:
                self._return(trainer)
            raise
        if outermost:
            self._leave(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap the average into the model."""
        if self.evaluate and self.updates and STATE in _states(trainer):
            self._enter(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Swap the weights back into the model."""
        if self._put_back is not None:
            self._leave(trainer)

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Put the weights back, so that what is saved or trained after the error are the weights.

        Nobody waits for other ranks, which may not have failed.
        """
        if self._put_back is not None:
            self._return(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates. The values are saved with the sharded optimizer state."""
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of updates."""
        self.updates = int(state_dict["updates"])
        self._restored = True

    def _enter(self, trainer: pl.Trainer) -> None:
        """Give the model the average. All ranks call this together."""
        put_back = _engine(trainer).parameters.host_backup()
        self._swap(trainer)
        # Before the parameters follow, which may fail.
        self._put_back = put_back
        _follow(trainer)

    def _leave(self, trainer: pl.Trainer) -> None:
        """Give the model the weights. All ranks call this together."""
        self._put_back = None
        self._swap(trainer)
        _follow(trainer)

    def _return(self, trainer: pl.Trainer) -> None:
        """Give the model the weights, without other ranks."""
        assert self._put_back is not None
        put_back, self._put_back = self._put_back, None
        self._swap(trainer)
        put_back()

    @torch.no_grad()
    def _swap(self, trainer: pl.Trainer) -> None:
        """Swap master weights and average in place, piece by piece."""
        # An all-gather of the last step may still read the masters.
        _engine(trainer).sync_parameters()
        for master, average in zip(_masters(trainer), _states(trainer)[STATE], strict=True):
            # In pieces, because a whole copy would take as much memory as the masters.
            for start in range(0, master.numel(), SWAP_ELEMENTS):
                here, there = master[start : start + SWAP_ELEMENTS], average[start : start + SWAP_ELEMENTS]
                kept = here.clone()
                here.copy_(there)
                there.copy_(kept)


def _follow(trainer: pl.Trainer) -> None:
    """Update the parameters of the model from the masters. All ranks call this together."""
    engine = _engine(trainer)
    engine.publish()
    engine.sync_parameters()


def _engine(trainer: pl.Trainer) -> Any:
    return trainer.strategy.engine  # type: ignore[attr-defined]


def _masters(trainer: pl.Trainer) -> list[Tensor]:
    engine = getattr(trainer.strategy, "engine", None)
    if engine is None or not hasattr(trainer.strategy, "extra_shard_states"):
        raise ConfigurationError(
            f"EMA averages the sharded fp32 master weights, which {type(trainer.strategy).__name__} does not keep; "
            "use MegatronStrategy or, with Lightning's own strategies, Lightning's EMAWeightAveraging callback."
        )
    if half := next((shard.master.dtype for shard in engine.shards if shard.master.dtype.itemsize < 4), None):
        raise ConfigurationError(
            f"EMA averages master weights, which data_parallel.master_dtype lets be {half}: each change of the average "
            "would be rounded away. Use float32 masters, or leave the callback out."
        )
    return [shard.master.detach() for shard in engine.shards]


def _states(trainer: pl.Trainer) -> dict[str, list[Tensor]]:
    states: dict[str, list[Tensor]] = getattr(trainer.strategy, "extra_shard_states", {})
    return states

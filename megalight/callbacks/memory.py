"""Memory of a run: garbage collection at the same steps on every rank, and activations that are kept on the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl

from megalight.callbacks.cuda_graph import CUDAGraph
from megalight.errors import ConfigurationError, integer
from megalight.parallel.activation_offload import MIN_ELEMENTS, ActivationOffloading, check_patterns, chosen
from megalight.parallel.host_memory import HostPool
from megalight.parallel.layers import translated
from megalight.strategies import MegatronStrategy


class GarbageCollection(pl.Callback):
    """Disables automatic garbage collection during training and collects every few optimizer steps instead.

    Without it each rank collects at another moment, and all other ranks wait for it. With it all ranks collect at the
    same steps. Objects that exist when training starts are frozen (``gc.freeze``), so each collection is short. The
    settings of Python are restored at the end, also after an error.

    Args:
        every_n_steps: optimizer steps between collections.

    Attributes:
        collections: number of collections so far.
        seconds: time spent in them.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        integer("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.collections = 0
        self.seconds = 0.0
        self._collected = 0
        self._holding = False
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect, freeze the remaining objects, and disable automatic collection."""
        # A second fit may begin without the end of the first.
        self._restore()
        self._holding, self._enabled, self._collected = True, gc.isenabled(), trainer.global_step
        # Collected first, so that `freeze` keeps only what is alive.
        self._collect()
        # No collection but ours: ranks would wait for each other's at different moments.
        gc.disable()
        gc.freeze()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect every ``every_n_steps`` steps."""
        step = trainer.global_step
        if step != self._collected and step % self.every_n_steps == 0:
            self._collected = step
            self._collect()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collect after validation: the ranks have stopped training anyway."""
        if self._holding:
            self._collect()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore Python's own collection."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Restore Python's own collection."""
        self._restore()

    def _collect(self) -> None:
        start = time.perf_counter()
        gc.collect()
        self.collections += 1
        self.seconds += time.perf_counter() - start

    def _restore(self) -> None:
        if self._holding:
            self._holding = False
            # Frozen objects would never be collected again.
            gc.unfreeze()
            if self._enabled:
                gc.enable()


class ActivationOffload(pl.Callback):
    """Moves what modules save for the backward pass to pinned host memory, and back one module ahead of its use.

    It saves the same memory as recompute of these modules, without computing them again, if the copies are faster than
    the computation beside them. Recompute what is cheap, and move what is large.

    Args:
        modules: names or glob patterns of modules inside a layer (``attention``, ``mlp.down``, ``*_norm``). Megatron's
            names are known too (:mod:`~megalight.parallel.layers`).
        min_elements: size of the smallest tensor that is moved.

    Raises:
        ConfigurationError: another strategy than ``MegatronStrategy``, CUDA graphs, the pipeline schedule ``combined``,
            a pattern that names nothing, or nothing but modules of the last layer, whose backward pass begins at once.
    """

    reads_weights = False
    copies_to_host = True

    def __init__(self, modules: Sequence[str], min_elements: int = MIN_ELEMENTS) -> None:
        if not modules or min_elements < 1:
            raise ConfigurationError(
                f"ActivationOffload(modules={list(modules)}, min_elements={min_elements}): name modules, for example "
                "['attention', 'mlp'], and let min_elements be at least 1."
            )
        self.modules = translated(modules)
        self.min_elements = min_elements
        self._running: list[ActivationOffloading] = []
        self._pool: HostPool | None = None

    @property
    def moved(self) -> int:
        """Bytes that this rank copied to the host in the current or last run."""
        return sum(one.moved for one in self._running)

    @property
    def pinned(self) -> int:
        """Bytes of host memory that this rank took for them in the current or last run."""
        return 0 if self._pool is None else self._pool.pinned

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set hooks on the modules of this rank, which are final now."""
        strategy = trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ConfigurationError(f"ActivationOffload needs MegatronStrategy, not {type(strategy).__name__}.")
        if any(isinstance(one, CUDAGraph) and one.scope != "auto" for one in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigurationError(
                "ActivationOffload with CUDAGraph: a graph cannot copy to memory that is new in each step. Leave one "
                "of the two out."
            )
        if strategy.layout.pipeline.schedule == "combined":
            raise ConfigurationError(
                "ActivationOffload with pipeline.schedule='combined', which runs a forward and a backward pass side by "
                "side: use another schedule."
            )
        model = strategy.parallel_model
        assert model is not None
        anywhere = partial(strategy.reduce_boolean_decision, all=False)
        # A stage may have none of these modules, and raising there alone would leave the others waiting.
        check_patterns(strategy.chunks, self.modules, anywhere)
        modules = [
            # Other stages run further micro-batches before the backward pass comes back to their last layer.
            chosen(chunk, self.modules, last=model.mesh.pp == 1 or stage.head)
            for chunk, stage in zip(model.chunks, model.stages, strict=True)
        ]
        if not anywhere(any(modules)):
            raise ConfigurationError(
                f"ActivationOffload(modules={list(self.modules)}) names only modules of the last layer, and what that "
                "one saves is needed at once. Leave it out."
            )
        self._pool = HostPool(strategy.root_device)
        self._running = [ActivationOffloading(some, self._pool, self.min_elements) for some in modules]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the hooks, also after an error."""
        for one in self._running:
            one.remove()
        if self._pool is not None:
            self._pool.clear()

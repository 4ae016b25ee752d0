"""CUDA graphs where they make steps faster, without being asked for."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from megalight.callbacks.activation_offload import ActivationOffload
from megalight.callbacks.graphs.cuda_graph import CUDAGraph
from megalight.callbacks.graphs.trial import DeviceProbe, Probe, Trial
from megalight.parallel.graphs.iteration import IterationGraphs
from megalight.parallel.step import StepRunner
from megalight.parallel.tensor.shared import gains_by_recording
from megalight.strategies.megatron import MegatronStrategy


class AutomaticCUDAGraph(CUDAGraph):
    """Replays whole training steps from CUDA graphs if that is faster, which it measures in the first steps.

    It does nothing without a GPU, with other strategies than ``MegatronStrategy``, where steps cannot be recorded, and
    beside a ``CUDAGraph`` or ``ActivationOffload`` of the trainer or of the module's ``configure_callbacks``.
    Steps are tried as graphs if there is memory for a second set of activations, and one of these holds: the host needs
    most of a step to launch kernels, or split layers hide more of their communication when a graph launches it. If the
    replayed steps are not faster, later ones run eagerly. The log shows the decision and both times. With
    ``micro_batch_size="auto"``, it waits until the number is found.

    Attributes:
        probe: object that measures steps. None means the GPU.
        trial: the measurement of the current or last run.
    """

    needs_shards = False  # without shards it does nothing
    gives_way = True

    def __init__(self) -> None:
        super().__init__()
        self.probe: Probe | None = None
        self.trial: Trial | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Enter the stream for recording, where steps may be recorded."""
        strategy = trainer.strategy
        # Here, because by now the trainer also has the callbacks of the module.
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            # Graphs cannot hold copies to host memory.
            if isinstance(other, ActivationOffload) or (isinstance(other, CUDAGraph) and not other.gives_way):
                rank_zero_info(f"steps are not tried as CUDA graphs, because of the callback {type(other).__name__}")
                return
        # Units of full sharding cannot be recorded, and need no stream of ours.
        if not isinstance(strategy, MegatronStrategy) or strategy.data_parallel.has_units:
            return
        if self.recorder is not None or strategy.root_device.type == "cuda":
            super().setup(trainer, pl_module, stage)
            self._level = logging.INFO

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the trial, when the number of samples per micro-batch is known."""
        strategy = trainer.strategy
        # Without an engine, the optimizer needs whole parameters, and Lightning runs the backward.
        if not isinstance(strategy, MegatronStrategy) or strategy.engine is None:
            return
        if strategy.micro_batches is not None and strategy.micro_batches.found:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _runner(self, graphs: IterationGraphs, strategy: MegatronStrategy) -> StepRunner:
        probe = self.probe or DeviceProbe(strategy.root_device, strategy.mesh)
        self.trial = Trial(graphs, probe, strategy.largest, self._tell, partial(_gains, strategy))
        return self.trial

    def _tell(self, verdict: str) -> None:
        rank_zero_info(verdict)


def _gains(strategy: MegatronStrategy) -> bool:
    return any(gains_by_recording(chunk) for chunk in strategy.chunks)

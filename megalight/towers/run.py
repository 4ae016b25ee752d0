"""What runs of a vision-language model whose towers have layouts of their own share, without Lightning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import VLM
from megalight.models.vlm.task import freeze as freeze_parameters
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions, clip_coefficient
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.source import Source
from megalight.parallel.transform import ModelTransform, apply_transforms
from megalight.towers.layout import divided

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Build = Callable[[bool, ParallelMesh, Layout], ParallelModel]
"""Builds the tower (True) or everything else (False) over a mesh."""


class Towers(ABC):
    """One training run of a vision-language model whose towers have layouts of their own.

    All processes make it together, after ``torch.distributed.init_process_group``. The result is that of one device.

    Args:
        config: the model.
        tower, language: the layouts.
        optimizer: makes the optimizer of this rank's parameters, which may be none; it updates each element by itself
            (Adam, SGD).
        seed: of the initial values, which are those of one device.
        source: values to begin from.
        freeze: globs over names of parameters that are not trained.
        transforms: changes of the model's structure, such as adapters
            (:class:`~megalight.models.transforms.LoRA`), in this order.
        data_parallel: how replicas share gradients and optimizer state, of either model.
        device: of the parameters.
        dtype: of the floating-point parameters; None: as they are.

    Attributes:
        optimizer: the optimizer of this rank's shards.
        engine: reduces the gradients.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout; the message names it.
        ConfigurationError: a pattern of ``freeze`` or of a transform matches nothing.
    """

    optimizer: Optimizer
    engine: DataParallelEngine

    def __init__(
        self,
        config: VLMConfig,
        *,
        tower: Layout,
        language: Layout,
        optimizer: MakeOptimizer,
        seed: int = 1234,
        source: Source | None = None,
        freeze: Sequence[str] = (),
        transforms: Sequence[ModelTransform] = (),
        data_parallel: DataParallelOptions | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.config, self.transforms = config, tuple(transforms)
        sharing = data_parallel or DataParallelOptions(overlap_param_gather=False)
        # Before anything is made: a mistake should cost no process group.
        mesh = self._divide(tower, language, sharing, world, rank)
        with torch.device("meta"):
            whole = VLM(config)
        freeze_parameters(whole, freeze)
        # Of the whole model: patterns of adapters may match layers of one part alone.
        apply_transforms(whole, self.transforms)
        parts = divided(whole)

        def build(tower: bool, mesh: ParallelMesh, options: Layout) -> ParallelModel:
            return ParallelModel.build(
                parts[0] if tower else parts[1],
                mesh,
                replace(options, transforms=self.transforms),
                device=device,
                dtype=dtype,
                seed=seed,
                source=source,
                fill=False,
            )

        self._begin(tower, language, optimizer, sharing, build)
        RandomStreams(mesh).seed(seed)
        self._fresh = True

    @abstractmethod
    def _divide(
        self, tower: Layout, language: Layout, sharing: DataParallelOptions, world: int, rank: int
    ) -> ParallelMesh:
        """Check the layouts, and return the mesh whose random streams this rank has."""

    @abstractmethod
    def _begin(
        self, tower: Layout, language: Layout, optimizer: MakeOptimizer, sharing: DataParallelOptions, build: Build
    ) -> None:
        """Build the models of this rank, its engine and its optimizer."""

    def _clear(self) -> None:
        """Discard gradients if a step begins. Until then, those of the last one can be looked at."""
        if self._fresh:
            self._fresh = False
            self.engine.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients of both models down to a norm of ``max_norm`` at most; return the norm before."""
        norm = self.engine.grad_norm()
        self.engine.scale_gradients(clip_coefficient(norm, max_norm))
        return norm

    def step(self) -> None:
        """Update the parameters of this rank."""
        self.optimizer.step()
        self._fresh = True

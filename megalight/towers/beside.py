"""A vision tower and a language model on the same ranks, each in a layout of its own, without Lightning.

::

    run = TowersBeside(
        config,
        tower=Side(ranks=4),
        language=Side(ranks=4, tensor_parallel=2, sequence_parallel=True),
        optimizer=make_optimizer,
    )
    for number in range(steps):
        loss = run.forward_backward(micro_batches_of(run.replica, number))
        run.clip_grad_norm(1.0)
        run.step()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.frozen import freeze as freeze_parameters
from megalight.models.vlm.model import VLM
from megalight.optim import shard_optimizer
from megalight.parallel.data_parallel import DataParallel, clip_coefficient
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import Step
from megalight.towers.apart import MakeOptimizer
from megalight.towers.around import Around
from megalight.towers.language import LanguageTask
from megalight.towers.side import Side, check_tower


class TowersBeside:
    """One training run of a vision-language model whose towers share all ranks, but not a layout.

    All processes make it together, after ``torch.distributed.init_process_group``. In each step the tower runs for all
    micro-batches, then the language model's schedule, then the tower backward. Before each pass of the tower, the
    images of a micro-batch, of all replicas of the language model, are divided among the replicas of the tower, so that
    each has about as many rows. Features come back in the order of the images. The result is that of one device. The
    tower keeps the activations of all micro-batches; ``tower.recompute`` makes them small.

    Args:
        config: the model.
        tower, language: the layouts, each of all ranks.
        optimizer: makes the optimizer; it updates each element by itself (Adam, SGD).
        seed: of the initial values, which are those of one device.
        freeze: globs over names of parameters that are not trained.
        data_parallel: how replicas share gradients and optimizer state, of either model.
        device: of the parameters.
        dtype: of the floating-point parameters; None: as they are.

    Attributes:
        tower, language: this rank's parts of both models.
        replica: the replica of the language model whose micro-batches this rank reads.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout; the message names it.
        ConfigurationError: a pattern of ``freeze`` matches nothing, or parameters or gradients would be sharded.
    """

    def __init__(
        self,
        config: VLMConfig,
        *,
        tower: Side,
        language: Side,
        optimizer: MakeOptimizer,
        seed: int = 1234,
        freeze: Sequence[str] = (),
        data_parallel: DataParallel | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for name, side in (("tower", tower), ("language model", language)):
            if side.ranks != world:
                raise LayoutError(
                    f"the {name} has {side.ranks} ranks, and there are {world} processes, which both models share; "
                    f"set ranks={world}, or use TowersApart."
                )
        check_tower(tower)
        sharing = data_parallel or DataParallel(overlap_param_gather=False)
        if sharing.has_units:
            raise ConfigurationError(
                f"data_parallel.level={sharing.level!r} with two layouts on the same ranks: only whole parameters and "
                "gradients are supported there. Use level='optim'."
            )
        with torch.device("meta"):
            whole = VLM(config)
        freeze_parameters(whole, freeze)
        part = whole.without_tower()
        common = {"device": device, "dtype": dtype, "seed": seed, "fill": False}
        self.tower = ParallelModel.build(part, tower.mesh(rank, 0), tower.tower_options(), **common)  # type: ignore[arg-type]
        self.language = ParallelModel.build(whole, language.mesh(rank, 0), language.options(), **common)  # type: ignore[arg-type]
        self.replica = self.language.mesh.rank("dp")
        RandomStreams(self.language.mesh).seed(seed)
        models = [self.tower, self.language]
        self.optimizer: Optimizer = optimizer([p for model in models for p in model.parameters()])
        self.engine = engine_over(models, [group["params"] for group in self.optimizer.param_groups], sharing)
        for model in models:
            self.engine.attach_gather_hooks(model.root)
        shard_optimizer(self.optimizer, self.engine)
        multiple = self.language.token_multiple
        task = LanguageTask(lambda batch: self._around(batch), multiple)
        self._step = Step(self.language, task)
        self._step.engine = self.engine
        self._around = Around(config, self.tower, self.language, self._step.executor)
        self._step.executor = self._around  # type: ignore[assignment]
        self._fresh = True

    def forward_backward(self, micro_batches: Sequence[ImageTextBatch]) -> Tensor:
        """Run a step forward and backward; gradients are reduced. Return the mean loss, equal on all ranks.

        Args:
            micro_batches: those of :attr:`replica`, on the model's device. All replicas have as many.

        Raises:
            DataError: there are none, or replicas have different numbers.
        """
        if not micro_batches:
            raise DataError("there are no micro-batches; give each replica at least one.")
        if self._fresh:
            self._fresh = False
            self.engine.zero_grad()
        mesh, multiple = self.language.mesh, self.language.token_multiple
        shares = [batch.context_share(mesh.rank("cp"), mesh.cp, multiple) for batch in micro_batches]
        return self._step.train(shares).loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients of both models down to a norm of ``max_norm`` at most; return the norm before."""
        norm = self.engine.grad_norm()
        self.engine.scale_gradients(clip_coefficient(norm, max_norm))
        return norm

    def step(self) -> None:
        """Update the parameters of both models."""
        self.optimizer.step()
        self.engine.publish()
        self._fresh = True

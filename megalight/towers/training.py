"""Train a vision-language model whose tower has a layout of its own in a plain torch loop, without Lightning.

::

    run = TowersTraining(
        config,
        tower=Layout(ranks=2, tensor_parallel=2),
        language=Layout(ranks=2),
        placement="disjoint",
        optimizer=make_optimizer,
    )
    for number in range(steps):
        loss = run.forward_backward(lambda replica: micro_batches_of(replica, number))
        run.clip_grad_norm(1.0)
        run.optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import VLM, RemoteFeatures
from megalight.models.vlm.task import freeze as freeze_parameters
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.source import Source
from megalight.parallel.transform import apply_transforms
from megalight.towers.colocated import ColocatedExecutor
from megalight.towers.disjoint import FeatureReceiver, TowerRunner
from megalight.towers.placement import Placement, TowerPlacement, divided, graft_tower, tower_layout
from megalight.training import Training
from megalight.types import Loss

Read = Callable[[int], Sequence[ImageTextBatch]]
"""Index of a data-parallel replica of the language model -> its micro-batches of this step, on the model's device."""


class TowersTraining:
    """One training run of a vision-language model whose tower has a layout of its own.

    All processes make it together, after ``torch.distributed.init_process_group``. Losses, gradients and weights are
    those of a single device.

    Colocated: both models share all ranks. In each step the tower runs for all micro-batches, then the language model's
    schedule, then the tower backward. The images of a micro-batch, of all replicas of the language model, are divided
    among the replicas of the tower, so that each has about as many rows. The tower keeps the activations of all
    micro-batches; ``tower.recompute`` makes them small.

    Disjoint: the first ``tower.ranks`` ranks have the tower and the projector, the next ``language.ranks`` everything
    else. Features and their gradients go over a :class:`~megalight.parallel.bridge.BridgeCommunicator`. If the tower
    has fewer replicas, each reads the images of several replicas of the language model. If it has more, they divide the
    images of each micro-batch among them, in order, by rows.

    Args:
        config: the model.
        tower: layout of the tower.
        language: layout of the language model. Its ``data_parallel`` and ``transforms`` are for both.
        placement: ``colocated`` or ``disjoint``.
        optimizer: makes the optimizer of this rank's parameters, which may be none; it updates each element by itself
            (Adam, SGD).
        seed: of the initial values, which are those of a single device.
        source: values to begin from.
        freeze: globs over names of parameters that are not trained.
        device: of the parameters.
        dtype: of the floating-point parameters; None: as they are.

    Attributes:
        placed: the ranks of both models, as this one sees them.
        replicas: indices of the replicas of the language model whose micro-batches this rank reads.
        model: this rank's part: the tower, the language model, or the language model with the tower grafted onto it.
        optimizer: the optimizer of this rank's shards.
        engine: reduces the gradients.

    Raises:
        LayoutError: the ranks do not add up, or a model cannot have its layout; the message names it.
        ConfigurationError: a pattern of ``freeze`` or of a transform matches nothing.
    """

    def __init__(
        self,
        config: VLMConfig,
        *,
        tower: Layout,
        language: Layout,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        placement: Placement = "colocated",
        seed: int = 1234,
        source: Source | None = None,
        freeze: Sequence[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        # Before anything is made: a mistake should cost no process group.
        placed = self.placed = TowerPlacement.of(placement, tower, language, world, rank)
        self.replicas = placed.replicas
        sharing = language.data_parallel or DataParallelOptions(overlap_param_gather=False)
        with torch.device("meta"):
            whole = VLM(config)
        freeze_parameters(whole, freeze)
        # Of the whole model: patterns of adapters may match layers of one part alone.
        apply_transforms(whole, language.transforms)
        part, rest = divided(whole)
        tower, language = (
            replace(each, transforms=language.transforms, data_parallel=sharing)
            for each in (tower_layout(tower), language)
        )
        if placed.is_tower:
            model = ParallelModel(part, placed.tower, tower)
        else:
            model = ParallelModel(rest, placed.language, language)
            if not placed.disjoint:
                graft_tower(model, part, placed.tower, tower)
        model.prepare(device, dtype, seed=seed, source=source)
        self.model = model
        model.coupling = placed.coupling()
        language_task = LanguageTask(model.token_multiple)
        self.training = Training(model, optimizer(model.parameters()), language_task)
        self.optimizer, self.engine = self.training.optimizer, self.training.engine
        self._bridge: BridgeCommunicator | None = None
        if placed.disjoint:
            self._bridge = BridgeCommunicator(placed.tower, placed.language, device=model.device)
            language_task.features = FeatureReceiver(self._bridge, model.token_multiple)
            self._runner = TowerRunner(config, model, self._bridge, placed, language)
            # The norm is that of both models.
            self.engine.main_gradients.everyone = dist.group.WORLD
        else:
            assert model.grafted is not None
            step = self.training.step
            step.executor = language_task.features = ColocatedExecutor(config, model.grafted, model, step.executor)
        RandomStreams(placed.mesh).seed(seed)

    def forward_backward(self, read: Read) -> Tensor:
        """Run a step forward and backward; gradients are reduced. Return the mean loss, equal on all ranks.

        Args:
            read: called for each of :attr:`replicas`, which have as many micro-batches each.

        Raises:
            DataError: they have not.
        """
        batches = [read(replica) for replica in self.replicas]
        if len({len(each) for each in batches}) > 1 or not batches[0]:
            raise DataError(
                f"replicas {list(self.replicas)} have {[len(each) for each in batches]} micro-batches; give each as "
                "many, at least one."
            )
        if self._bridge is None:
            return self.training.forward_backward(batches[0]).loss
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        if self.placed.is_tower:
            self.training.begin_step()
            self._runner.train(self._runner.joined(list(zip(*batches, strict=True))), self.engine)
        else:
            loss.copy_(self.training.forward_backward(batches[0]).loss)
        self._bridge.finish()
        # From the first rank of the language model; all of them have it.
        dist.broadcast(loss, self.placed.language.members.start)
        return loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients of both models down to a norm of ``max_norm`` at most; return the norm before."""
        return self.training.clip_grad_norm(max_norm)


class LanguageTask:
    """The task of a vision-language model without its tower.

    Args:
        multiple: tokens are padded to a multiple of this.

    Attributes:
        features: returns the features ``[P, h]`` of a micro-batch, with padding.
    """

    features: Callable[[ImageTextBatch], Tensor]

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple

    def forward_step(self, model: nn.Module, batch: ImageTextBatch, carry: dict[str, Any] | None = None) -> Any:
        """Run a chunk. The first one waits for the features of the micro-batch."""
        sequences = batch.sequences.pad_to(self.multiple)
        received = None
        if task.has_embedding(model):
            images, _ = batch.parts()
            received = RemoteFeatures(self.features(batch), task.source_of(model, batch, sequences), images.mixtures)
        return task.forward(model, batch, sequences, carry, received, self.multiple)

    def loss_step(self, carry: dict[str, Tensor], batch: ImageTextBatch) -> Loss:
        """Return the sum of the losses."""
        return task.loss(carry, batch)

    def loss_tokens(self, batch: ImageTextBatch) -> Tensor:
        """Return the number of tokens in it."""
        return batch.loss_mask.sum()

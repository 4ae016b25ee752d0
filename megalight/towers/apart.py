"""A vision tower and a language model on disjoint ranks, trained together, without Lightning.

::

    run = TowersApart(config, tower=Side(ranks=2, tensor_parallel=2), language=Side(ranks=2), optimizer=make_optimizer)
    for number in range(steps):
        outcome = run.forward_backward(lambda replica: micro_batches_of(replica, number))
        run.clip_grad_norm(1.0)
        run.step()

The tower's ranks come first. They read the images of micro-batches, and send what the projector makes of them over a
:class:`~megalight.parallel.bridge.BridgeCommunicator`; gradients come back. The result is that of one device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.frozen import freeze as freeze_parameters
from megalight.models.vlm.model import VLM, Arrived
from megalight.models.vlm.plan import tower_plan, vlm_plan
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.bridge.lanes import lanes
from megalight.parallel.data_parallel import DataParallel, clip_coefficient
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.source import Source
from megalight.parallel.step import Outcome
from megalight.towers.shares import consecutive, end_to_end, features_of, take
from megalight.towers.side import Side, check_tower
from megalight.training import Training
from megalight.types import Loss

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Read = Callable[[int], Sequence[ImageTextBatch]]
"""Index of a data-parallel replica of the language model -> its micro-batches of this step, on the model's device."""


class TowersApart:
    """One training run of a vision-language model whose towers have ranks of their own.

    All processes make it together, after ``torch.distributed.init_process_group``. The first ``tower.ranks`` ranks have
    the vision tower and the projector, the next ``language.ranks`` everything else. Each has its own data-parallel
    engine and optimizer; the norm of gradients is that of both.

    If the tower has fewer replicas, each reads the images of several replicas of the language model. If it has more,
    they divide the images of each micro-batch among them, in order, by rows.

    Args:
        config: the model.
        tower, language: the layouts. One of their data-parallel degrees must divide the other.
        optimizer: makes the optimizer of this rank's parameters; it updates each element by itself (Adam, SGD).
        seed: of the initial values, which are those of one device.
        source: values to begin from.
        freeze: globs over names of parameters that are not trained; of the tower's ranks, some must be.
        data_parallel: how replicas share gradients and optimizer state, on either side.
        device: of the parameters.
        dtype: of the floating-point parameters; None: as they are.

    Attributes:
        is_tower: whether this rank has the tower.
        model: this rank's part of its side's model.
        replicas: indices of the replicas of the language model whose micro-batches this rank reads.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout; the message names it.
        ConfigurationError: a pattern of ``freeze`` matches nothing, or nothing is left to train on the tower's ranks.
    """

    def __init__(
        self,
        config: VLMConfig,
        *,
        tower: Side,
        language: Side,
        optimizer: MakeOptimizer,
        seed: int = 1234,
        source: Source | None = None,
        freeze: Sequence[str] = (),
        data_parallel: DataParallel | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        # All of this is arithmetic: a mistake costs no process group.
        if tower.ranks + language.ranks != world:
            raise LayoutError(
                f"the tower has {tower.ranks} ranks and the language model {language.ranks}, which are "
                f"{tower.ranks + language.ranks}, and there are {world} processes; start as many, or change a side."
            )
        check_tower(tower)
        meshes = tower.mesh(rank, 0), language.mesh(rank, tower.ranks)
        # A layout may have chunks that `virtual_pipeline` does not tell of.
        chunks = language.options().virtual_pipeline
        lanes(*meshes)
        self.config = config
        self.is_tower = rank < tower.ranks
        self.mesh = meshes[not self.is_tower]
        with torch.device("meta"):
            whole = VLM(config)
        freeze_parameters(whole, freeze)
        part = whole.without_tower()
        if not any(parameter.requires_grad for parameter in part.parameters()):
            raise ConfigurationError(
                f"freeze={list(freeze)} leaves nothing to train on the ranks of the tower; train the projector, or let "
                "both models have the same ranks."
            )
        root: nn.Module = part if self.is_tower else whole
        side = tower if self.is_tower else language
        plan = tower_plan(part) if self.is_tower else vlm_plan(whole)
        self.model = ParallelModel.build(
            root,
            self.mesh,
            replace(side.options(), plan=plan),
            device=device,
            dtype=dtype,
            seed=seed,
            source=source,
            fill=False,
        )
        RandomStreams(self.mesh).seed(seed)
        self.bridge = BridgeCommunicator(*meshes, device=device)
        ours = max(1, meshes[1].dp // meshes[0].dp)
        self._shares = max(1, meshes[0].dp // meshes[1].dp)
        lane = self.mesh.rank("dp") // (self._shares if self.is_tower else 1)
        self.replicas = range(lane * ours, (lane + 1) * ours) if self.is_tower else range(lane, lane + 1)
        # As many as a pipeline begins before its first backward; with chunks, all, which is always enough.
        self._ahead = meshes[1].pp + 1 if chunks == 1 else None
        self._side_ranks, self._tower_ranks = side.ranks, tower.ranks
        self._language = _Language(self.bridge, self.model.token_multiple)
        self.training = Training(
            self.model, optimizer(self.model.parameters()), self._language, data_parallel=data_parallel
        )
        self._fresh = True

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank's shard."""
        return self.training.optimizer

    def forward_backward(self, read: Read) -> Tensor:
        """Run a step forward and backward; gradients are reduced. Return the mean loss, equal on all ranks.

        Args:
            read: called for each of :attr:`replicas`. The replicas of the language model have as many micro-batches.

        Raises:
            DataError: they have not.
        """
        batches = [read(replica) for replica in self.replicas]
        if len({len(each) for each in batches}) > 1 or not batches[0]:
            raise DataError(
                f"replicas {list(self.replicas)} have {[len(each) for each in batches]} micro-batches; give each as "
                "many, at least one."
            )
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        if self.is_tower:
            self._encode(list(zip(*batches, strict=True)))
        else:
            outcome: Outcome = self.training.forward_backward(batches[0])
            loss.copy_(outcome.loss)
        self.bridge.finish()
        # From the first rank of the language model; all of them have it.
        dist.broadcast(loss, self._tower_ranks)
        return loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients of both models down to a norm of ``max_norm`` at most; return the norm before."""
        engine = self.training.engine
        square = engine.grad_norm().double() ** 2 / self._side_ranks  # each rank of a side has the same
        dist.all_reduce(square)
        norm = square.sqrt()
        engine.scale_gradients(clip_coefficient(norm, max_norm))
        return norm

    def step(self) -> None:
        """Update the parameters of this rank's side."""
        self.training.optimizer.step()
        self._fresh = True

    def _encode(self, micro_batches: Sequence[Sequence[ImageTextBatch]]) -> None:
        """Run the tower for all micro-batches, each of one or several replicas of the language model."""
        engine, sent = self.training.engine, deque[int]()
        if self._fresh:
            self._fresh = False
            engine.zero_grad()
        ahead = len(micro_batches) if self._ahead is None else self._ahead
        with engine.micro_batches(len(micro_batches)):
            for number, batches in enumerate(micro_batches):
                if len(sent) == ahead:
                    self._backward(sent)
                features, parts = self._features(batches)
                self.bridge.send_forward({"features": features}, {"features": parts})
                sent.append(number)
            while sent:
                self._backward(sent)
        engine.finish_grad_sync()

    def _backward(self, sent: deque[int]) -> None:
        self.bridge.backward()
        sent.popleft()

    def _features(self, batches: Sequence[ImageTextBatch]) -> tuple[Tensor, list[int]]:
        """Return the features of the images that this replica reads, and the rows of each destination."""
        images = [batch.parts()[0] for batch in batches]
        if self._shares > 1:
            (whole,) = images
            own = consecutive(whole.lengths, self._shares)[self.mesh.rank("dp") % self._shares]
            images = [take(whole, own)]
        parts = [features_of(each) for each in images]
        nothing = torch.zeros(0, dtype=torch.int64, device=self.model.device)
        pictures = task.pictures_of(self.config, end_to_end(images), nothing, self.model.token_multiple)
        features: Tensor = self.model.root(pictures)
        # Without the rows of padding.
        return features[: sum(parts)], parts


class _Language:
    """What the language model computes, with features that come over the bridge."""

    def __init__(self, bridge: BridgeCommunicator, multiple: int) -> None:
        self.bridge = bridge
        self.multiple = multiple

    def forward_step(self, model: nn.Module, batch: ImageTextBatch, carry: dict[str, Any] | None = None) -> Any:
        """Run a chunk. The first one waits for the features of the micro-batch."""
        sequences = batch.sequences.pad_to(self.multiple)
        arrived = None
        if task.has_embedding(model):
            arrived = Arrived(self._features(), task.source_of(batch, sequences))
        return task.forward(model, batch, sequences, carry, arrived)

    def _features(self) -> Tensor:
        features = self.bridge.recv_forward()["features"]
        if features.requires_grad:
            # Backward passes of the first stage come in the order of its forward passes, as messages must.
            features.register_hook(self._answer)  # type: ignore[no-untyped-call]
        # At least one row, and whole shares for sequence parallelism.
        rows = max(1, len(features))
        return F.pad(features, (0, 0, 0, rows + -rows % self.multiple - len(features)))

    def _answer(self, gradient: Tensor) -> None:
        self.bridge.send_backward({"features": gradient})

    def loss_step(self, carry: dict[str, Tensor], batch: ImageTextBatch) -> Loss:
        """Return the sum of the losses."""
        return task.loss(carry, batch)

    def loss_tokens(self, batch: ImageTextBatch) -> Tensor:
        """Return the number of tokens in it."""
        return batch.loss_mask.sum()

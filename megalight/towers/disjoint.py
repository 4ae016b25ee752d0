"""A vision tower and a language model on disjoint ranks, trained together, without Lightning.

::

    tower, language = Layout(ranks=2, tensor_parallel=2), Layout(ranks=2)
    run = TowersApart(config, tower=tower, language=language, optimizer=make_optimizer)
    for number in range(steps):
        outcome = run.forward_backward(lambda replica: micro_batches_of(replica, number))
        run.clip_grad_norm(1.0)
        run.step()

The tower's ranks come first. They read the images of micro-batches, and send what the projector makes of them over a
:class:`~megalight.parallel.bridge.BridgeCommunicator`; gradients come back. The result is that of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.coupling import contents
from megalight.parallel.data_parallel import DataParallelEngine, DataParallelOptions
from megalight.parallel.data_parallel.unit_memory import UnitPass
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.schedules import ActionKind, build
from megalight.towers.batch_split import Division, consecutive, end_to_end, features_of, take
from megalight.towers.language import LanguageTask, features, padded
from megalight.towers.layout import tower_layout
from megalight.towers.run import Build, MakeOptimizer, Towers
from megalight.training import Training


class FeatureReceiver:
    """Receives the features of each micro-batch, and sends their gradients back.

    Args:
        bridge: comes from the tower.
        multiple: features are padded to a multiple of this, for sequence parallelism.
    """

    def __init__(self, bridge: BridgeCommunicator, multiple: int) -> None:
        self.bridge = bridge
        self.multiple = multiple

    def __call__(self, batch: ImageTextBatch) -> Tensor:
        """Return the features ``[P, h]`` of the next micro-batch, with padding.

        Raises:
            DataError: the tower has read other images.
        """
        features, expected = self.bridge.recv_forward()["features"], features_of(batch.parts()[0])
        if len(features) != expected:
            raise DataError(
                f"the tower sent {len(features)} rows of features for a micro-batch whose images have {expected}: its "
                "ranks read other samples. Let the order of samples depend on the step and a seed alone, or on "
                "trainer.strategy.distributed_sampler_kwargs."
            )
        if features.requires_grad:
            # Backward passes of the first stage come in the order of its forward passes, as messages must.
            features.register_hook(self._answer)  # type: ignore[no-untyped-call]
        return padded(features, self.multiple)

    def _answer(self, gradient: Tensor) -> None:
        self.bridge.send_backward({"features": gradient})


Together = Sequence[ImageTextBatch]
"""A micro-batch of each replica of the language model that this rank reads images for."""


class TowerRunner:
    """Runs a tower for the micro-batches of a language model on other ranks.

    Args:
        config: the whole model.
        model: the tower and the projector, split.
        bridge: leads to the language model.
        division: which replicas exchange messages.
        language: options of the language model, for its schedule.
        context: entered around the code of the model in each micro-batch.
    """

    def __init__(
        self,
        config: VLMConfig,
        model: ParallelModel,
        bridge: BridgeCommunicator,
        division: Division,
        language: Layout,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.config = config
        self.model = model
        self.bridge = bridge
        self.division = division
        self.language = language
        self.context = context
        self.trained = any(parameter.requires_grad for parameter in model.parameters())

    def joined(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Return the micro-batches, with empty ones if another lane has more; all ranks call it together."""
        peers = self.model.coupling
        return list(micro_batches) if peers is None else peers.fill_up(micro_batches)

    def train(self, micro_batches: Sequence[Any], engine: DataParallelEngine, sync: bool = True) -> None:
        """Run forward and backward of all micro-batches.

        Args:
            micro_batches: as many as the language model runs, at least one; from :meth:`joined`.
            engine: reduces the gradients.
            sync: reduce them, because no further micro-batches follow before the optimizer's step.
        """
        order, batches = self._order(len(micro_batches)), iter(micro_batches)
        with engine.micro_batches(len(micro_batches), sync):
            for number, step in enumerate(order, 1):
                if engine.units is not None:
                    engine.units.follow(self.model.chunks, order[number:])
                if step.forward:
                    self._send(next(batches))
                else:
                    self.bridge.backward()
        if sync:
            engine.finish_grad_sync()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> None:
        """Run forward only."""
        for batches in micro_batches:
            self._send(batches)

    def _order(self, micro_batches: int) -> list[UnitPass]:
        """Return the order of passes through the tower.

        As many forward passes come first as the language model begins before it has ended one, and one more. So the
        features of the next micro-batch are there when the language model has sent a gradient, and neither side waits
        for a whole pass of the other.
        """
        forward, backward = UnitPass(0, True), UnitPass(0, False)
        if not self.trained:  # no gradients come back
            return [forward] * micro_batches
        ahead = min(self._begun(micro_batches) + 1, micro_batches)
        return [forward] * ahead + [backward, forward] * (micro_batches - ahead) + [backward] * ahead

    def _begun(self, micro_batches: int) -> int:
        """Return how many micro-batches the language model begins before it first needs to have ended one."""
        options, pp = self.language, self.division.language.pp
        schedule = options.pipeline
        name, chunks = schedule.schedule, options.virtual_pipeline
        first = build(name, pp, chunks, micro_batches, schedule.group_size)[0]
        most = begun = 0
        for action in (part for each in first for part in each.parts if part.chunk == 0):
            # Gradients of features come with those of the first chunk's input.
            begun += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT_GRADIENT: -1}.get(action.kind, 0)
            most = max(most, begun)
        return most

    def _send(self, batches: Any) -> None:
        """Send the features of a micro-batch, which may be empty."""
        with self.context():
            found, parts = self._features(contents(batches))
        self.bridge.send_forward({"features": found}, {"features": parts})

    def _features(self, batches: Together) -> tuple[Tensor, list[int]]:
        """Return the features of the images that this replica reads, and the rows of each destination."""
        images = [batch.parts()[0] for batch in batches]
        if self.division.shares > 1:
            (whole,) = images
            shares = self.division.shares
            own = consecutive(whole.lengths, shares)[self.model.mesh.rank("dp") % shares]
            images = [take(whole, own)]
        parts = [features_of(each) for each in images]
        return features(self.config, self.model, end_to_end(images)), parts


Read = Callable[[int], Sequence[ImageTextBatch]]
"""Index of a data-parallel replica of the language model -> its micro-batches of this step, on the model's device."""


class TowersApart(Towers):
    """One training run of a vision-language model whose towers have ranks of their own.

    The first ``tower.ranks`` ranks have the vision tower and the projector, the next ``language.ranks`` everything
    else. Each side has its own data-parallel engine and optimizer; the norm of gradients is that of both. The other
    arguments are those of :class:`~megalight.towers.run.Towers`.

    If the tower has fewer replicas, each reads the images of several replicas of the language model. If it has more,
    they divide the images of each micro-batch among them, in order, by rows.

    Attributes:
        is_tower: whether this rank has the tower.
        model: this rank's part of its side's model.
        replicas: indices of the replicas of the language model whose micro-batches this rank reads.

    Raises:
        LayoutError: one of the data-parallel degrees does not divide the other, beside what
            :class:`~megalight.towers.run.Towers` raises.
    """

    def _divide(
        self, tower: Layout, language: Layout, sharing: DataParallelOptions, world: int, rank: int
    ) -> ParallelMesh:
        self._division = Division.of(tower, language, world, rank)
        self.is_tower, self.replicas = self._division.is_tower, self._division.replicas
        self.mesh = self._division.mesh
        return self.mesh

    def _begin(
        self, tower: Layout, language: Layout, optimizer: MakeOptimizer, sharing: DataParallelOptions, build: Build
    ) -> None:
        division = self._division
        options = tower_layout(tower) if self.is_tower else language
        self.model = build(self.is_tower, self.mesh, replace(options, data_parallel=sharing))
        self.model.coupling = division.coupling()
        self.bridge = BridgeCommunicator(division.tower, division.language, device=self.model.device)
        task = LanguageTask(FeatureReceiver(self.bridge, self.model.token_multiple), self.model.token_multiple)
        self.training = Training(self.model, optimizer(self.model.parameters()), task)
        self.optimizer, self.engine = self.training.optimizer, self.training.engine
        # Gradients are those of both models.
        self.engine.main_gradients.everyone = dist.group.WORLD
        self._encoder = TowerRunner(self.config, self.model, self.bridge, division, language)

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
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        self._clear()
        if self.is_tower:
            self._encoder.train(self._encoder.joined(list(zip(*batches, strict=True))), self.engine)
        else:
            loss.copy_(self.training.forward_backward(batches[0]).loss)
        self.bridge.finish()
        # From the first rank of the language model; all of them have it.
        dist.broadcast(loss, self._division.language.members.start)
        return loss

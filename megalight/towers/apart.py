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

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.mesh import ParallelMesh
from megalight.towers.arriving import Arrivals
from megalight.towers.division import Division
from megalight.towers.encoder import Encoder
from megalight.towers.language import LanguageTask
from megalight.towers.run import Build, MakeOptimizer, Towers
from megalight.towers.side import Side
from megalight.training import Training

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

    def _divide(self, tower: Side, language: Side, sharing: DataParallel, world: int, rank: int) -> ParallelMesh:
        self._division = Division.of(tower, language, world, rank)
        self.is_tower, self.replicas = self._division.is_tower, self._division.replicas
        self.mesh = self._division.mesh
        return self.mesh

    def _begin(
        self, tower: Side, language: Side, optimizer: MakeOptimizer, sharing: DataParallel, build: Build
    ) -> None:
        division = self._division
        options = tower.tower_options() if self.is_tower else language.options()
        self.model = build(self.is_tower, self.mesh, options)
        self.model.coupling = division.coupling()
        self.bridge = BridgeCommunicator(division.tower, division.language, device=self.model.device)
        task = LanguageTask(Arrivals(self.bridge, self.model.token_multiple), self.model.token_multiple)
        self.training = Training(self.model, optimizer(self.model.parameters()), task, data_parallel=sharing)
        self.optimizer, self.engine = self.training.optimizer, self.training.engine
        # Gradients are those of both models.
        self.engine.main_gradients.everyone = dist.group.WORLD
        self._encoder = Encoder(self.config, self.model, self.bridge, division, language.options())

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

"""Colocated placement: a tower in a layout of its own, on the ranks of the language model, around its schedule.

Images of each micro-batch, of all replicas of the language model, are divided among the replicas of the tower. Their
features come back in the order of the images. After the schedule, gradients of features go the same way to the tower.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.data.multimodal.images import Images
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.data_parallel import unit_memory
from megalight.parallel.data_parallel.unshard import Units
from megalight.parallel.frozen_model import TensorRoute, exchange
from megalight.parallel.mesh import ParallelMesh, new_group, uses_backend
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.executor import ForwardStep, LossStep, Objective, ScheduleExecutor
from megalight.parallel.pipeline.p2p_communication import Carry, CarryEntry
from megalight.parallel.pipeline.timeline import RankSchedule
from megalight.towers.placement import balanced, concatenated, features, padded, take
from megalight.types import Loss
from megalight.types.batch import contents

Sizes = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Rows of each image of a micro-batch, and of their windows."""


@dataclass(eq=False)
class TowerPass:
    """A micro-batch of each replica of the language model.

    Attributes:
        homes: the images of each replica.
        shares: replica of the tower -> replica of the language model -> indices of its images.
        features: what this rank's tower made of its images, ``[P, h]``.
        arrived: the features of this replica's images, in order; None on later stages of the pipeline.
    """

    homes: list[Sizes]
    shares: list[list[list[int]]]
    features: Tensor
    arrived: Tensor | None = None


class ColocatedExecutor(ScheduleExecutor):
    """Runs a tower forward, the schedule of its language model, and the tower backward.

    Args:
        tower: the tower and the projector.
        language: everything else, on a mesh of the same ranks.
        context: entered around the code of the tower in each micro-batch.
    """

    def __init__(
        self,
        config: VLMConfig,
        tower: ParallelModel,
        language: ParallelModel,
        executor: ScheduleExecutor,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.config = config
        self.tower = tower
        self.language = language
        self.executor = executor
        self.context = context
        self.trained = any(parameter.requires_grad for parameter in tower.parameters())
        self._rank, self._device = language.mesh.global_rank, tower.device
        self._readers, self._towers = _replicas(language.mesh, 0), _replicas(tower.mesh)
        self._homes = _replicas(language.mesh)
        self._own, self._home = tower.mesh.rank("dp"), language.mesh.rank("dp")
        self._arrived: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self._told: list[list[Sizes]] = []
        self._host: dist.ProcessGroup | None = None
        if language.mesh.world_size > 1:
            # NCCL creates a group's communicator in its first collective; messages between some ranks cannot do so.
            dist.all_reduce(torch.zeros(1, device=self._device))
            self._host = None if uses_backend("gloo") else new_group(language.mesh.members, "images", backend="gloo")

    def prepare(self, micro_batches: Sequence[Any]) -> Hashable:
        """Tell the other replicas of the language model the images of these micro-batches; return those of all.

        It must be called before :meth:`train` and :meth:`forward` of these micro-batches, whose messages between ranks
        depend on nothing else. All ranks call it together, with equally many micro-batches.
        """
        self._told = self._sizes([contents(each) for each in micro_batches])
        return tuple(map(tuple, self._told))

    def train(
        self,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        loss_step: LossStep,
        objective: Objective,
        units: Units | None = None,
    ) -> list[Loss]:
        """Run the tower forward, the schedule, and the tower backward; arguments as of the executor."""
        passes = self._forward(micro_batches, units)
        losses = self.executor.train(schedule, micro_batches, forward_step, loss_step, objective, units)
        self._arrived.clear()
        for number, each in enumerate(passes if self.trained else (), 1):
            self._follow(units, [unit_memory.UnitPass(0, False)] * (len(passes) - number))
            gradient = self._to_tower(each)
            torch.autograd.backward([each.features], [gradient])
        return losses

    def forward(
        self,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        units: Units | None = None,
    ) -> list[Carry]:
        """Run forward passes without gradients."""
        with torch.no_grad():
            self._forward(micro_batches, units)
        carries = self.executor.forward(schedule, micro_batches, forward_step, units)
        self._arrived.clear()
        return carries

    def __call__(self, batch: ImageTextBatch) -> Tensor:
        """Return the features ``[P, h]`` of a micro-batch, with padding."""
        return padded(self._arrived[id(batch)].popleft(), self.language.token_multiple)

    def _follow(self, units: Units | None, coming: Sequence[unit_memory.UnitPass]) -> None:
        """Say which passes of the tower come next. Those of the language model are others on each of its stages."""
        if units is not None:
            units.follow([self.tower.root], coming)

    def _forward(self, micro_batches: Sequence[Any], units: Units | None) -> list[TowerPass]:
        passes = []
        batches = [contents(each) for each in micro_batches]
        for number, (batch, homes) in enumerate(zip(batches, self._told, strict=True), 1):
            self._follow(units, [unit_memory.UnitPass(0, True)] * (len(batches) - number))
            shares = balanced([lengths for lengths, _ in homes], len(self._towers))
            images = self._to_replica(batch.parts()[0], homes, shares)
            with self.context():
                each = TowerPass(homes, shares, features(self.config, self.tower, images))
            each.arrived = self._to_language(each)
            if each.arrived is not None:
                # An empty micro-batch, which only takes part in communication, has the contents of another one.
                self._arrived[id(batch)].append(each.arrived)
            passes.append(each)
        return passes

    def _sizes(self, micro_batches: Sequence[ImageTextBatch]) -> list[list[Sizes]]:
        """Return for each micro-batch the images of all replicas of the language model."""
        own = [(images.lengths, images.windows) for images in (batch.parts()[0] for batch in micro_batches)]
        if self.language.mesh.world_size == 1:
            return [[each] for each in own]
        told: list[Any] = [None] * self.language.mesh.world_size
        # By the host, which must know the sizes of messages.
        dist.all_gather_object(told, own, group=self._host)
        return [list(row) for row in zip(*(told[ranks[0]] for ranks in self._homes), strict=True)]

    def _to_replica(self, images: Images, homes: list[Sizes], shares: list[list[list[int]]]) -> Images:
        """Exchange images: return those that this rank's tower reads, home after home."""
        routes, held = [], []
        axes, width = tuple(images.positions.shape[:-1]), images.pixels.shape[1]
        for replica, each in enumerate(shares):
            for home, chosen in enumerate(each):
                rows = sum(homes[home][0][index] for index in chosen)
                form = (
                    CarryEntry("pixels", (rows, width), images.pixels.dtype, False),
                    CarryEntry("positions", (*axes, rows), images.positions.dtype, False),
                )
                routes.append(TensorRoute(self._homes[home], self._towers[replica], form))
                part = take(images, chosen) if home == self._home else None
                held.append(None if part is None else [part.pixels, part.positions])
        found = exchange(routes, held, self._rank, self._device)
        parts = []
        for home, chosen in enumerate(shares[self._own]):
            tensors = found[self._own * len(homes) + home]
            assert tensors is not None
            pixels, positions = tensors
            lengths, windows = homes[home]
            parts.append(
                Images(
                    pixels,
                    positions,
                    lengths=tuple(lengths[index] for index in chosen),
                    counts=(len(chosen),),
                    windows=tuple(windows[index] for index in chosen) if windows else (),
                    joined=images.joined,
                )
            )
        return concatenated(parts)

    def _to_language(self, each: TowerPass) -> Tensor | None:
        """Send features back: return those of this replica's images, in order, as a leaf."""
        routes = self._routes(each, each.features, back=False)
        counts = self._rows(each, self._own)
        held: list[list[Tensor] | None] = [None] * len(routes)
        for home, part in enumerate(torch.split(each.features.detach(), counts)):
            held[self._own * len(each.homes) + home] = [part]
        found = exchange(routes, held, self._rank, self._device)
        if self._rank not in self._readers[self._home]:
            return None
        arrived = [found[replica * len(each.homes) + self._home] for replica in range(len(self._towers))]
        rows = torch.cat([tensors[0] for tensors in arrived if tensors is not None])
        whole = torch.empty_like(rows)
        whole[self._order(each)] = rows
        return whole.requires_grad_(self.trained and torch.is_grad_enabled())

    def _to_tower(self, each: TowerPass) -> Tensor:
        """Send the gradients of features: return those of this rank's tower, whose graph goes on from there."""
        routes = self._routes(each, each.features, back=True)
        held: list[list[Tensor] | None] = [None] * len(routes)
        if each.arrived is not None:
            gradient = torch.zeros_like(each.arrived) if each.arrived.grad is None else each.arrived.grad
            # Each has seen its share of the tokens; along `tp` gradients are whole.
            if (group := self.language.mesh.group("cp")) is not None:
                dist.all_reduce(gradient, group=group)
            counts = [self._rows(each, replica)[self._home] for replica in range(len(self._towers))]
            for replica, part in enumerate(torch.split(gradient[self._order(each)], counts)):
                held[replica * len(each.homes) + self._home] = [part]
        found = exchange(routes, held, self._rank, self._device)
        first = self._own * len(each.homes)
        mine = found[first : first + len(each.homes)]
        return torch.cat([tensors[0] for tensors in mine if tensors is not None])

    def _routes(self, each: TowerPass, features: Tensor, back: bool) -> list[TensorRoute]:
        routes = []
        for replica, tower in enumerate(self._towers):
            for home, rows in enumerate(self._rows(each, replica)):
                form = (CarryEntry("features", (rows, features.shape[1]), features.dtype, False),)
                ends = (self._readers[home], tower) if back else (tower, self._readers[home])
                routes.append(TensorRoute(*ends, form))
        return routes

    def _rows(self, each: TowerPass, replica: int) -> list[int]:
        """Return the rows of features that a replica of the tower makes for each replica of the language model."""
        joined = self.config.projector.merge**2
        return [
            sum(lengths[index] for index in chosen) // joined
            for (lengths, _), chosen in zip(each.homes, each.shares[replica], strict=True)
        ]

    def _order(self, each: TowerPass) -> Tensor:
        """Return for the rows of this replica's features, tower after tower, their places in the order of images."""
        joined = self.config.projector.merge**2
        sizes = [length // joined for length in each.homes[self._home][0]]
        starts = [0, *accumulate(sizes)]
        # On the device itself: a step that is recorded copies nothing from the host.
        places = [
            torch.arange(starts[index], starts[index + 1], device=self._device)
            for share in each.shares
            for index in share[self._home]
        ]
        return torch.cat(places or [torch.zeros(0, dtype=torch.int64, device=self._device)])


def _replicas(mesh: ParallelMesh, stage: int | None = None) -> list[tuple[int, ...]]:
    """Return the global ranks of each data-parallel replica, or those of a stage of its pipeline."""
    return [
        tuple(
            rank
            for rank in mesh.members
            if mesh.rank("dp", of=rank) == place and stage in (None, mesh.rank("pp", of=rank))
        )
        for place in range(mesh.dp)
    ]

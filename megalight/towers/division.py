"""Which replicas of two models on ranks of their own work together."""

from __future__ import annotations

from megalight.errors import LayoutError
from megalight.parallel.bridge.lanes import lanes
from megalight.parallel.coupling import Coupling
from megalight.parallel.mesh import ParallelMesh
from megalight.towers.side import Side, check_tower


class Division:
    """The ranks of a tower and of a language model, as one of them sees it.

    Neighboring replicas that exchange messages form a lane. There are as many lanes as the model with fewer replicas
    has, and all ranks of a lane read the same samples. If the tower has fewer replicas, each reads the images of
    several replicas of the language model. If it has more, they divide the images of each micro-batch among them.

    Args:
        tower, language: their meshes.

    Attributes:
        is_tower: whether this rank has the tower.
        mesh: the mesh of this rank.
        lanes: number of lanes.
        lane: the lane of this rank.
        readers: number of replicas of the language model in a lane.
        shares: number of replicas of the tower in a lane.
        replicas: indices of the replicas of the language model whose micro-batches this rank reads.

    Raises:
        LayoutError: neither data-parallel degree divides the other.
    """

    def __init__(self, tower: ParallelMesh, language: ParallelMesh) -> None:
        if tower.dp % language.dp and language.dp % tower.dp:
            raise LayoutError(
                f"the tower has {tower.dp} replicas and the language model {language.dp}; one must divide the other. "
                "Change the ranks or the degrees of one, or let both have the same ranks (megatron_towers_beside)."
            )
        self.lanes = len(lanes(tower, language))
        self.tower, self.language = tower, language
        self.is_tower = tower.contains(tower.global_rank)
        self.mesh = tower if self.is_tower else language
        self.readers, self.shares = language.dp // self.lanes, tower.dp // self.lanes
        own = self.mesh.rank("dp")
        self.lane = own // (self.shares if self.is_tower else self.readers)
        every = range(self.lane * self.readers, (self.lane + 1) * self.readers)
        self.replicas = every if self.is_tower else range(own, own + 1)

    @classmethod
    def of(cls, tower: Side, language: Side, world_size: int, rank: int) -> Division:
        """Divide all ranks; the tower's come first. This is arithmetic: a mistake costs no process group.

        Raises:
            LayoutError: the ranks do not add up, or a side cannot have its layout; the message names it.
        """
        if tower.ranks + language.ranks != world_size:
            raise LayoutError(
                f"the tower has {tower.ranks} ranks and the language model {language.ranks}, which are "
                f"{tower.ranks + language.ranks}, and there are {world_size} processes; start as many, or change a "
                "side."
            )
        check_tower(tower)
        return cls(_mesh("the tower", tower, rank, 0), _mesh("the language model", language, rank, tower.ranks))

    def coupling(self) -> Coupling | None:
        """Return what lets all ranks agree on numbers of micro-batches; None with a single lane.

        Replicas of a language model with experts exchange tokens, so that all run as many. Their towers must know.
        """
        if self.lanes == 1:
            return None
        return Coupling(self.mesh, sorted({*self.tower.members, *self.language.members}))

    def describe(self) -> str:
        """Return one line for logs."""
        return f"tower on {self.tower.describe()}; language model on {self.language.describe()}"


def _mesh(name: str, side: Side, rank: int, first: int) -> ParallelMesh:
    try:
        return side.mesh(rank, first)
    except LayoutError as error:
        raise LayoutError(f"{name}, on {side.ranks} ranks from {first} on: {error}") from error

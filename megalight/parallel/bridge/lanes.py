"""Lanes: which ranks of two meshes exchange messages. This is arithmetic only, without communication."""

from __future__ import annotations

from dataclasses import dataclass

from megalight.errors import LayoutError
from megalight.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Lane:
    """Data-parallel replicas that exchange messages: several sources and one destination, the reverse, or one each.

    Attributes:
        sources: the global ranks of each source replica's last pipeline stage; the last one leads.
        destinations: the global ranks of each destination replica's first pipeline stage; the first one leads.
    """

    sources: tuple[tuple[int, ...], ...]
    destinations: tuple[tuple[int, ...], ...]

    @property
    def source_leaders(self) -> tuple[int, ...]:
        """The ranks that send activations and receive gradients, one per source replica."""
        return tuple(replica[-1] for replica in self.sources)

    @property
    def destination_leaders(self) -> tuple[int, ...]:
        """The ranks that receive activations and send gradients, one per destination replica."""
        return tuple(replica[0] for replica in self.destinations)


def lanes(src: ParallelMesh, dest: ParallelMesh) -> tuple[Lane, ...]:
    """Divide the replicas of both sides into the same number of runs of neighbors, so that rows keep their order.

    Raises:
        LayoutError: the meshes share ranks, or neither data-parallel degree divides the other.
    """
    shared = sorted(set(src.members) & set(dest.members))
    if shared:
        raise LayoutError(
            f"both meshes of the bridge have ranks {_shown(shared)}; they must be disjoint. Give the second mesh an "
            "offset: ParallelMesh(..., offset=n) begins at global rank n."
        )
    if src.dp % dest.dp and dest.dp % src.dp:
        raise LayoutError(
            f"the data-parallel degrees of the bridge are {src.dp} (source) and {dest.dp} (destination); one must "
            "divide the other. Change a degree of one mesh."
        )
    # As many lanes as the smaller side has replicas; each takes a run of the larger side.
    count = min(src.dp, dest.dp)
    sources, destinations = _runs(src, src.pp - 1, count), _runs(dest, 0, count)
    return tuple(Lane(*pair) for pair in zip(sources, destinations, strict=True))


def _runs(mesh: ParallelMesh, stage: int, count: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ranks of the replicas in one pipeline stage, in ``count`` runs of neighboring replicas."""
    replicas: list[list[int]] = [[] for _ in range(mesh.dp)]
    for rank in mesh.members:
        if mesh.rank("pp", of=rank) == stage:
            replicas[mesh.rank("dp", of=rank)].append(rank)
    # Neighboring replicas form a run, so rows keep the order in which the source read them.
    length = mesh.dp // count
    return [tuple(map(tuple, replicas[first : first + length])) for first in range(0, mesh.dp, length)]


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")

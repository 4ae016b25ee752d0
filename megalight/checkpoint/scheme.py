"""Schemes: in which form the tensors of a run are written.

A scheme turns what a rank holds into the views that are saved, and, on load, into the views that are filled. Its name
is in the manifest: a checkpoint is read by the scheme that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from megalight.checkpoint.disk.manifest import DP_RESHARDABLE, FSDP_DTENSOR, FULLY_RESHARDABLE
from megalight.checkpoint.view import View, views_of_parameters, views_of_pieces, views_of_shards
from megalight.errors import CheckpointError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.source import FlatSource
from megalight.registry import Registry


@dataclass(frozen=True)
class State:
    """One kind of flat state: masters, or one tensor of the optimizer's per shard.

    Attributes:
        prefix: of its canonical names (``optimizer.exp_avg.``).
        tensors: one flat tensor per shard, laid out as the shard is.
        shards: which canonical elements lie where.
    """

    prefix: str
    tensors: Sequence[Tensor]
    shards: Sequence[FlatSource]


@dataclass(frozen=True)
class Contents:
    """What a rank holds and a checkpoint keeps.

    Attributes:
        tensors: local parameters and buffers by local name.
        specs: local name -> what it holds of which canonical tensors.
        mesh_of: local name -> the mesh over which the tensor is split.
    """

    tensors: Mapping[str, Tensor]
    specs: Mapping[str, ShardSpec]
    mesh_of: Callable[[str], ParallelMesh]
    states: Sequence[State] = ()


Scheme: TypeAlias = Callable[[Contents], dict[str, View]]

SCHEMES: Registry[Scheme] = Registry("checkpoint scheme")


@SCHEMES.register(FULLY_RESHARDABLE)
def fully_reshardable(contents: Contents) -> dict[str, View]:
    """Every tensor under its canonical name and in its canonical shape, so that any layout reads it.

    Raises:
        CheckpointError: two tensors have one name.
    """
    views = views_of_parameters(contents.tensors.items(), contents.specs, contents.mesh_of)
    for state in contents.states:
        _add(views, views_of_shards(state.tensors, state.shards, prefix=state.prefix), state)
    return views


@SCHEMES.register(DP_RESHARDABLE)
def dp_reshardable(contents: Contents) -> dict[str, View]:
    """Weights as above; optimizer state as it lies in the flat shards, piece by piece.

    The plan of a save is small: one box per parameter and shard. Data, context and pipeline ranks may change between
    saving and loading. If the split of the weights changes (tensor or expert parallelism), pieces do not fit:
    ``megalight convert --to fully_reshardable`` turns such a checkpoint into one for any layout.
    """
    views = views_of_parameters(contents.tensors.items(), contents.specs, contents.mesh_of)
    for state in contents.states:
        make = views_of_pieces if state.prefix else views_of_shards  # without a prefix they are weights
        _add(views, make(state.tensors, state.shards, prefix=state.prefix), state)
    return views


@SCHEMES.register(FSDP_DTENSOR)
def fsdp_dtensor(contents: Contents) -> dict[str, View]:
    """Canonical tensors as in ``fully_reshardable``, in files that torch's own Distributed Checkpoint reads.

    In torch they are entries of a nested ``state_dict`` by parameter name, to be loaded into tensors and DTensors; see
    :mod:`megalight.checkpoint.foreign.torch_dcp`.
    """
    # The same tensors; only the files differ, which the writer chooses by the scheme's name.
    return fully_reshardable(contents)


def _add(views: dict[str, View], more: Mapping[str, View], state: State) -> None:
    if taken := sorted(views.keys() & more.keys()):
        raise CheckpointError(
            f"{len(taken)} tensors of the state {state.prefix.removesuffix('.')!r} have names of other tensors in the "
            f"checkpoint: {taken[0]}. Give the state another name."
        )
    views |= more

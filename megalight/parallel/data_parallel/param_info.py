"""What the engine knows about a parameter before it has a place in a buffer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from megalight.errors import MegalightError
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, with what the engine needs to know about it.

    Attributes:
        name: its name in the local model, for messages.
        parameter: the object. It keeps its identity; its storage moves into a flat buffer. It may have no memory yet:
            its values may come after the engine is built.
        spec: the canonical pieces that it holds.
        group: index of its optimizer parameter group.
        chunk: index of the model chunk on this rank that holds it, in model order.
        mesh: the mesh over which its model is split; None: the engine's mesh.
        unit: number of the unit that holds it; None: none does. See :mod:`~megalight.parallel.data_parallel.units`.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    group: int
    chunk: int = 0
    mesh: ParallelMesh | None = None
    unit: int | None = None


def distinct(infos: Iterable[ParamInfo]) -> list[ParamInfo]:
    """Return the parameters in order; a tied parameter comes once.

    Raises:
        MegalightError: those that need gradients have no storage yet, or live on several devices.
    """
    seen: dict[int, ParamInfo] = {}
    for info in infos:
        seen.setdefault(id(info.parameter), info)
    devices = {info.parameter.device: info.name for info in seen.values() if info.parameter.requires_grad}
    if len(devices) > 1 or torch.device("meta") in devices:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise MegalightError(f"parameters must have storage on one device: {where}. Materialize the model first.")
    return list(seen.values())

"""Whole canonical tensors out of what each rank holds: what parity tests compare with one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec


def gather_canonical(
    tensors: Mapping[str, Tensor],
    specs: Mapping[str, ShardSpec],
    mesh: ParallelMesh,
    *,
    sum_partial: bool = True,
) -> dict[str, Tensor]:
    """Canonical name -> full tensor, equal on every rank.

    Args:
        tensors: local tensors by parameter name: parameters, gradients, optimizer state.
        specs: what they hold.
        mesh: of this rank.
        sum_partial: sum each piece over its partial axes first: gradients that no engine has reduced. Ranks that see
            different tokens have different ones, so that copies along data axes are not looked at.

    Fails where owners cover an element twice or not at all, or where holders of the same box differ.
    """
    pieces = []
    held = [(piece, specs[name].data, tensor) for name, tensor in tensors.items() for piece in specs[name].pieces]
    # A tied weight is an embedding on one stage and a head on another: all stages sum in the order of canonical names.
    for piece, data, tensor in sorted(held, key=lambda each: each[0].name):
        value = piece.view(tensor.detach()).clone()
        group = mesh.group(*piece.partial) if piece.partial else None
        if sum_partial and group is not None:
            dist.all_reduce(value, group=group)
        owner = piece.owner and (sum_partial or mesh.ranks(*data)[0] == mesh.global_rank)
        pieces.append((piece.name, piece.shape, piece.box, owner, value.cpu().double().numpy()))
    group = mesh.group("pp", "tp") if sum_partial else mesh.everyone
    everyone = [pieces]
    if group is not None:
        everyone = [None] * group.size()
        dist.all_gather_object(everyone, pieces, group=group)
    # With numpy, which is several times as fast as torch for thousands of small boxes.
    whole: dict[str, np.ndarray[Any, Any]] = {}
    owners: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape, box, owner, value in (piece for pieces in everyone for piece in pieces):
        if name not in whole:
            whole[name], owners[name] = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        if owner:
            whole[name][box] = value
            owners[name][box] += 1
    for name, count in owners.items():
        assert (count == 1).all(), f"{name}: owners per element range from {count.min()} to {count.max()}"
    for name, _, box, _, value in (piece for pieces in everyone for piece in pieces):
        assert np.array_equal(whole[name][box], value), f"{name}: holders of one box differ"
    return {name: torch.from_numpy(value) for name, value in whole.items()}


def relative_error(a: Tensor, b: Tensor, floor: float = 1e-6) -> float:
    """``|a - b| / max(|b|, floor)`` in float64; the floor is for zeros with rounding noise (a key bias's gradient)."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / max(float(b.norm()), floor))

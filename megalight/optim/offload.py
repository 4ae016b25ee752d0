"""Moving optimizer state and master weights to host memory and back, to free device memory for a while."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.ops.parameter import known_state
from megalight.optim.sharded import sharding_of

_homes: WeakKeyDictionary[Optimizer, dict[Tensor, torch.device]] = WeakKeyDictionary()
"""Offloaded optimizers -> their parameters and the devices to return them to."""


def offload_to_cpu(optimizer: Optimizer) -> None:
    """Move optimizer state and fp32 copies of low-precision parameters to host memory.

    The tensor objects stay the same; only their storage changes. Gradients of moved parameters are dropped. Parameters
    that the model computes with are not moved, nor are 0-dim state tensors. A second call changes nothing.
    """
    homes = _homes.setdefault(optimizer, {})
    for parameter in _parameters(optimizer):
        homes.setdefault(parameter, parameter.device)
        # Only masters that are copies move. Others are the parameters with which the model computes.
        if (own := known_state(parameter)) is not None and own.master_copy:
            parameter.grad = None
            # `.data`: optimizers find their state by the tensor object, so the object must stay.
            parameter.data = parameter.data.to("cpu")
        _move_state(optimizer, parameter, torch.device("cpu"))
    _follow(optimizer)
    if any(device.type == "cuda" for device in homes.values()):
        torch.cuda.empty_cache()  # so that other processes can use the memory


def restore_from_cpu(optimizer: Optimizer) -> None:
    """Move everything back to its device. Without an earlier :func:`offload_to_cpu` this does nothing."""
    for parameter, device in _homes.pop(optimizer, {}).items():
        parameter.data = parameter.data.to(device)
        _move_state(optimizer, parameter, device)
    _follow(optimizer)


def _follow(optimizer: Optimizer) -> None:
    if (sharding := sharding_of(optimizer)) is not None:
        sharding.follow()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that the optimizer updates."""
    if (sharding := sharding_of(optimizer)) is not None:
        whole = [shard.master for shard in sharding.engine.shards]
        # Each of those of divided shards has a state, and is a view of a whole one.
        return list(dict.fromkeys([*whole, *(part.master for part in sharding.shards)]))
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _move_state(optimizer: Optimizer, parameter: Tensor, device: torch.device) -> None:
    state = optimizer.state.get(parameter, {})
    # State of one number is read by the host, or counted on a device.
    for value in state.values():
        if isinstance(value, Tensor) and value.ndim:
            value.data = value.data.to(device)

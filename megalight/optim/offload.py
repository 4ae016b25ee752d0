"""Moving optimizer state and masters to host memory and back, to make room on the device for a while."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.ops.parameter import known_state

_homes: WeakKeyDictionary[Optimizer, dict[Tensor, torch.device]] = WeakKeyDictionary()
"""The parameters of offloaded optimizers, and the devices that they belong on."""


def offload_to_cpu(optimizer: Optimizer) -> None:
    """Move state, and the masters that are copies of low-precision parameters, to host memory.

    Tensors keep their identity: only their storage changes. Gradients of what moves are dropped. Parameters that the
    model itself computes with stay where they are, and so do 0-dim state tensors. Doing it twice is harmless.
    """
    homes = _homes.setdefault(optimizer, {})
    for parameter in _parameters(optimizer):
        homes.setdefault(parameter, parameter.device)
        if (own := known_state(parameter)) is not None and own.master_copy:
            parameter.grad = None
            parameter.data = parameter.data.to("cpu")
        _move_state(optimizer, parameter, torch.device("cpu"))
    if any(device.type == "cuda" for device in homes.values()):
        torch.cuda.empty_cache()  # other processes may want the room


def restore_from_cpu(optimizer: Optimizer) -> None:
    """Bring everything back to the device that it came from. Harmless when nothing was moved."""
    for parameter, device in _homes.pop(optimizer, {}).items():
        parameter.data = parameter.data.to(device)
        _move_state(optimizer, parameter, device)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _move_state(optimizer: Optimizer, parameter: Tensor, device: torch.device) -> None:
    state = optimizer.state.get(parameter, {})
    for value in state.values():
        if isinstance(value, Tensor) and value.ndim:
            value.data = value.data.to(device)

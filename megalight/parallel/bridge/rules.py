"""Checks of messages and gradients before they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.parallel.bridge.header import Header, TensorSpec
from megalight.parallel.bridge.transfer import Rows


def spec_of(name: str, tensor: Tensor, batch_dim: int | Mapping[str, int], device: torch.device) -> TensorSpec:
    """Return the spec of a tensor.

    Raises:
        LayoutError: the tensor has no batch dim, or is on another type of device than the bridge.
    """
    dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(name)
    if dim is None:
        raise LayoutError(f"batch_dim of the bridge has no {name!r}; add it: batch_dim={{..., {name!r}: 0}}.")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LayoutError(
            f"{name} {list(tensor.shape)} has no batch dim {dim}; add one (make a number a tensor of one row), or give "
            "batch_dim by name."
        )
    # Only the type: the index differs between the GPUs of both sides.
    if tensor.device.type != device.type:
        raise LayoutError(
            f"{name} is on {tensor.device}, but the bridge sends {device.type} tensors; move it, or set the device of "
            "the bridge."
        )
    # Counted from the front, because a header says nothing about how the sender counted.
    return TensorSpec(tuple(tensor.shape), tensor.dtype, dim % tensor.ndim, tensor.requires_grad)


def rows_of(header: Header, parts: Rows, count: int) -> dict[str, Sequence[int]]:
    """Return the number of rows of each tensor for each of ``count`` replicas: from ``parts``, or as even as possible.

    Raises:
        LayoutError: ``parts`` has an unknown name, or numbers that do not sum to the rows.
    """
    if unknown := parts.keys() - header.keys():
        raise LayoutError(
            f"parts has {', '.join(sorted(unknown))}, but the message has no such tensor; remove it from parts."
        )
    rows: dict[str, Sequence[int]] = {}
    for name, spec in header.items():
        # The first replicas get one row more where it does not divide.
        even = [spec.rows // count + (place < spec.rows % count) for place in range(count)]
        rows[name] = own = list(parts.get(name, even))
        if len(own) != count or sum(own) != spec.rows or min(own) < 0:
            raise LayoutError(
                f"parts of {name} are {own}; give {count} numbers, one per destination replica, that sum to its "
                f"{spec.rows} rows."
            )
    return rows


def checked_gradients(grads: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of all ``tensors``, in their order; missing gradients are zeros.

    Raises:
        LayoutError: a gradient was not requested, or does not have the shape, dtype and device of its tensor.
    """
    if unknown := grads.keys() - tensors.keys():
        raise LayoutError(
            f"gradients of {', '.join(sorted(unknown))} were not requested; the message needs those of "
            f"{', '.join(tensors)}."
        )
    checked = {}
    for name, tensor in tensors.items():
        grad = grads.get(name)
        # The source waits for a gradient of every tensor that asked for one, used or not.
        grad = torch.zeros_like(tensor) if grad is None else grad.detach()
        # The source reads the bytes into its own shape and dtype: a difference would arrive as noise.
        for what in ("shape", "dtype", "device"):
            if getattr(grad, what) != getattr(tensor, what):
                raise LayoutError(
                    f"the gradient of {name} has {what} {getattr(grad, what)}, but the tensor has "
                    f"{getattr(tensor, what)}; send gradients in the order of the messages."
                )
        checked[name] = grad
    return checked

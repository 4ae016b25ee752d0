"""What may cross a bridge: raised before anything moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.parallel.bridge.header import Header, TensorSpec
from megalight.parallel.bridge.transfer import Rows


def spec_of(name: str, tensor: Tensor, batch_dim: int | Mapping[str, int], device: torch.device) -> TensorSpec:
    """How a tensor is announced.

    Raises:
        LayoutError: it has no batch dim, or lies on another kind of device than the bridge's.
    """
    dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(name)
    if dim is None:
        raise LayoutError(f"the bridge's batch_dim names no {name!r}; add it: batch_dim={{..., {name!r}: 0}}.")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LayoutError(
            f"{name} {list(tensor.shape)} has no dim {dim}, along which replicas are joined and split. "
            "Give it one (a number becomes a tensor of one row), or state batch_dim by name."
        )
    if tensor.device.type != device.type:
        raise LayoutError(
            f"{name} lies on {tensor.device}, but the bridge carries {device.type} tensors. Move it, or state the "
            "bridge's device."
        )
    return TensorSpec(tuple(tensor.shape), tensor.dtype, dim % tensor.ndim, tensor.requires_grad)


def rows_of(header: Header, parts: Rows, count: int) -> dict[str, Sequence[int]]:
    """Rows of each tensor for each of ``count`` replicas: as told, or as even as can be.

    Raises:
        LayoutError: ``parts`` name what is not there, or do not add up.
    """
    if unknown := parts.keys() - header.keys():
        raise LayoutError(f"parts are given for {', '.join(sorted(unknown))}, which the message does not hold.")
    rows: dict[str, Sequence[int]] = {}
    for name, spec in header.items():
        even = [spec.rows // count + (place < spec.rows % count) for place in range(count)]
        rows[name] = own = list(parts.get(name, even))
        if len(own) != count or sum(own) != spec.rows or min(own) < 0:
            raise LayoutError(
                f"parts of {name} are {own}; they must be {count} numbers, one per destination replica, that add up to "
                f"its {spec.rows} rows."
            )
    return rows


def checked_gradients(grads: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of all ``tensors``, in their order; zeros where none is given.

    Raises:
        LayoutError: one that nobody asked for, or that does not look like its tensor.
    """
    if unknown := grads.keys() - tensors.keys():
        raise LayoutError(
            f"gradients of {', '.join(sorted(unknown))} were not asked for; the message being answered wants those of "
            f"{', '.join(tensors)}."
        )
    checked = {}
    for name, tensor in tensors.items():
        grad = grads.get(name)
        grad = torch.zeros_like(tensor) if grad is None else grad.detach()
        for what in ("shape", "dtype", "device"):
            if getattr(grad, what) != getattr(tensor, what):
                raise LayoutError(
                    f"the gradient of {name} has {what} {getattr(grad, what)}, but the tensor that it answers has "
                    f"{getattr(tensor, what)}. Answers come in the order of the messages."
                )
        checked[name] = grad
    return checked

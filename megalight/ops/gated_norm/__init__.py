"""RMS norm in groups of features with a gate, before the norm (Mamba-2) or after it (Gated DeltaNet)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import lazy, serve_all, triton_why_not, whole_why_not
from megalight.ops.gated_norm import reference
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """A request to the norm.

    Attributes:
        device: device type.
        dtype: dtype of the input.
        weight_dtype: dtype of the weight.
        size: number of features of a group.
        divided: the groups are parts of those that are normalized together.
    """

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    size: int
    divided: bool = False


GATED_NORM: BackendRegistry[Spec, Callable[..., Tensor]] = BackendRegistry("gated_norm")
REGISTRIES = (GATED_NORM,)
EXAMPLE = Spec("cpu", torch.bfloat16, torch.bfloat16, 1024)

MAX_SIZE = 16384
"""Most features of a group that a program of the kernels holds."""


def _triton_why_not(spec: Spec) -> str | None:
    if spec.size > MAX_SIZE:
        return f"serves groups of at most {MAX_SIZE} features, not {spec.size}"
    return whole_why_not(spec.divided) or triton_why_not(spec.device, spec.dtype, spec.weight_dtype)


GATED_NORM.register(Backend("triton", lazy("megalight.ops.gated_norm.triton", "gated_norm"), 20, _triton_why_not))
GATED_NORM.register(Backend("reference", reference.gated_norm, 0, serve_all))


@remembered
def _choose(spec: Spec, backend: str) -> Callable[..., Tensor]:
    return GATED_NORM.select(spec, backend).fn


def check_backend(weight: Tensor, group_size: int, device: str, backend: str, divided: bool) -> None:
    """Do what :func:`megalight.ops.norm.check_backend` does for this op, for groups of ``group_size`` features."""
    _choose(Spec(device, weight.dtype, weight.dtype, group_size, divided), backend)


def gated_norm(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    group_size: int,
    eps: float,
    *,
    last: bool = False,
    average: Callable[[Tensor], Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """``norm(y * silu(z))``, or ``norm(y) * silu(z)``.

    ``norm(u)`` is ``u / sqrt(mean(u^2) + eps) * weight``, the mean over each group of features. Half dtypes are
    computed in float32.

    Args:
        y: ``[T, size]``.
        z: ``[T, size]``. Rows may lie apart in memory.
        weight: ``[size]``, or ``[group_size]`` for one weight of all groups.
        group_size: features of a group, a divisor of ``size``.
        eps: added to the mean square.
        last: whether the gate comes after the norm.
        average: mean squares ``[T, groups, 1]`` of the features here -> those of whole groups, of which these features
            are a part. None: groups are whole.
        backend: a backend's name, or ``auto``.

    Raises:
        BackendError: the named backend cannot serve, for example because of ``average``.
    """
    spec = Spec(y.device.type, y.dtype, weight.dtype, group_size, average is not None)
    return _choose(spec, backend)(y, z, weight, group_size, eps, last, average=average)

"""The backends of grouped products: of rows with weights, and of gradients with rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.common import HALF, lazy, serve_all, triton_why_not
from megalight.ops.grouped_linear import native, reference
from megalight.registry import Backend, BackendRegistry, remembered

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Sequence[int] | None", bool], Tensor]
"""``(x, weight, offsets, sizes, transposed)``: each group of ``x`` times ``W_e^T``, or ``W_e`` if not transposed."""

Accumulate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, "Sequence[int] | None", bool], None]
"""``(main_grad [E, out, in], grad_y [R, out], x [R, in], offsets, sizes, write)``: adds in place, or overwrites."""


class Spec(NamedTuple):
    """A request to a grouped product.

    Attributes:
        device: device type.
        dtype: dtype of the rows.
        weight_dtype: dtype of the weight, or of what its gradient is added to.
        known_sizes: whether the host knows the sizes of the groups.
        aligned: whether rows and columns of the weight are multiples of 8 features.
    """

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    known_sizes: bool
    aligned: bool

    @staticmethod
    def of(x: Tensor, weight: Tensor, sizes: Sequence[int] | None) -> Spec:
        """Return the request of these tensors."""
        aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
        return Spec(x.device.type, x.dtype, weight.dtype, sizes is not None, aligned)


PRODUCT: BackendRegistry[Spec, Product] = BackendRegistry("grouped_product")
WGRAD: BackendRegistry[Spec, Accumulate] = BackendRegistry("grouped_weight_gradient")
EXAMPLE = Spec("cpu", torch.bfloat16, torch.bfloat16, False, True)


def _hopper_why_not(spec: Spec) -> str | None:
    """Why kernels for Hopper, which load tiles by TMA, cannot serve."""
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if not spec.aligned:
        return "needs rows and columns of multiples of 8 features"
    if (reason := triton_why_not(spec.device, spec.dtype)) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 9 else f"needs a GPU of compute capability 9.0, not {major}.{minor}"


def _product_why_not(spec: Spec) -> str | None:
    if spec.weight_dtype != spec.dtype:
        return f"needs a weight of {spec.dtype}, not of {spec.weight_dtype}"
    return _hopper_why_not(spec)


def _grouped_mm_why_not(spec: Spec) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"serves bfloat16, not {spec.dtype}"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    return _product_why_not(spec)


def _loop_why_not(spec: Spec) -> str | None:
    if spec.device != "cpu" and not spec.known_sizes:
        return "needs the sizes of the groups on the host"
    return None


_TRITON = "megalight.ops.grouped_linear.triton"
PRODUCT.register(Backend("triton", lazy(_TRITON, "product"), 30, _product_why_not))
PRODUCT.register(Backend("grouped_mm", native.grouped_mm, 20, _grouped_mm_why_not))
PRODUCT.register(Backend("loop", native.product, 10, _loop_why_not))
PRODUCT.register(Backend("reference", reference.product, 0, serve_all))
WGRAD.register(Backend("triton", lazy(_TRITON, "accumulate"), 30, _hopper_why_not))
WGRAD.register(Backend("loop", native.accumulate, 10, _loop_why_not))
WGRAD.register(Backend("reference", reference.accumulate, 0, serve_all))


@remembered
def choose(registry: BackendRegistry[Spec, Any], spec: Spec, backend: str = "auto") -> Callable[..., Any]:
    """Return the function that serves ``spec``."""
    found: Callable[..., Any] = registry.select(spec, backend).fn
    return found

"""The backends of grouped products: of rows with weights, and of gradients with rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.ops.common import serve_all
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


def _loop_why_not(spec: Spec) -> str | None:
    if spec.device != "cpu" and not spec.known_sizes:
        return "needs the sizes of the groups on the host"
    return None


PRODUCT.register(Backend("loop", native.product, 10, _loop_why_not))
PRODUCT.register(Backend("reference", reference.product, 0, serve_all))
WGRAD.register(Backend("loop", native.accumulate, 10, _loop_why_not))
WGRAD.register(Backend("reference", reference.accumulate, 0, serve_all))


@remembered
def choose(registry: BackendRegistry[Spec, Any], spec: Spec, backend: str = "auto") -> Callable[..., Any]:
    """Return the function that serves ``spec``."""
    found: Callable[..., Any] = registry.select(spec, backend).fn
    return found

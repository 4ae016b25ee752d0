"""Grouped GEMM backends: of rows with weights, and of gradients with rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops import linear
from megalight.ops.common import HALF, lazy, serve_all, triton_why_not, wide
from megalight.ops.parameter import put
from megalight.registry import Backend, BackendRegistry, choose


def groups(offsets: Tensor, sizes: Sequence[int] | None) -> Iterator[tuple[int, slice]]:
    """Yield each expert's index and its rows. Without ``sizes``, the host waits for the offsets.

    The groups of ``sizes`` follow each other without padding.
    """
    start = 0
    ends = offsets.tolist() if sizes is None else None
    for expert in range(len(offsets)):
        end = ends[expert] if ends is not None else start + sizes[expert]  # type: ignore[index]
        yield expert, slice(start, end)
        start = end


def reference_product(
    x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool
) -> Tensor:
    """Multiply each group with its weight; rows after the last group are zeros."""
    dtype = wide(x.dtype)
    y = x.new_zeros(len(x), weight.shape[1 if transposed else 2])
    for expert, rows in groups(offsets, sizes):
        factor = weight[expert].T if transposed else weight[expert]
        y[rows] = (x[rows].to(dtype) @ factor.to(dtype)).to(x.dtype)
    return y


def reference_accumulate(
    main_grad: Tensor, grad_y: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int] | None, write: bool
) -> None:
    """Add each group's ``grad_y^T x``, or write it."""
    dtype = torch.promote_types(wide(grad_y.dtype), main_grad.dtype)
    for expert, rows in groups(offsets, sizes):
        put(main_grad[expert], grad_y[rows].to(dtype).T @ x[rows].to(dtype), write)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool) -> Tensor:
    """Multiply each group with its weight, in one call."""
    # The library's kernel refuses zero rows.
    if not len(x):
        return x.new_empty(0, weight.shape[1 if transposed else 2])
    return F.grouped_mm(x, weight.mT if transposed else weight, offs=offsets)


def torch_product(x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, transposed: bool) -> Tensor:
    """Multiply each group with its weight."""
    # Rows after the last group stay uninitialized: the contract allows any values there, and zeroing costs a pass.
    y = x.new_empty(len(x), weight.shape[1 if transposed else 2])
    factors = weight.mT if transposed else weight
    for expert, rows in groups(offsets, sizes):
        torch.mm(x[rows], factors[expert], out=y[rows])
    return y


def torch_accumulate(
    main_grad: Tensor, grad_y: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int] | None, write: bool
) -> None:
    """Add each group's ``grad_y^T x`` by the backend of dense layers, or write it."""
    spec = linear.WeightGradientSpec(grad_y.device.type, grad_y.dtype, main_grad.dtype)
    add = choose(linear.WGRAD, spec)
    for expert, rows in groups(offsets, sizes):
        if rows.start != rows.stop:
            add(main_grad[expert], grad_y[rows], x[rows], write)
        elif write:
            main_grad[expert].zero_()  # a library's product of zero rows may write nothing


Product: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Sequence[int] | None", bool], Tensor]
"""``(x, weight, offsets, sizes, transposed)``: each group of ``x`` times ``W_e^T``, or ``W_e`` if not transposed."""

Accumulate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, "Sequence[int] | None", bool], None]
"""``(main_grad [E, out, in], grad_y [R, out], x [R, in], offsets, sizes, write)``: adds in place, or overwrites."""


class GroupedLinearSpec(NamedTuple):
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
    def of(x: Tensor, weight: Tensor, sizes: Sequence[int] | None) -> GroupedLinearSpec:
        """Return the request of these tensors."""
        aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
        return GroupedLinearSpec(x.device.type, x.dtype, weight.dtype, sizes is not None, aligned)


PRODUCT: BackendRegistry[GroupedLinearSpec, Product] = BackendRegistry("grouped_product")
WGRAD: BackendRegistry[GroupedLinearSpec, Accumulate] = BackendRegistry("grouped_weight_gradient")
EXAMPLE = GroupedLinearSpec("cpu", torch.bfloat16, torch.bfloat16, False, True)


def _hopper_why_not(spec: GroupedLinearSpec) -> str | None:
    """Why kernels for Hopper, which load tiles by TMA, cannot serve."""
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    if not spec.aligned:
        return "needs rows and columns of multiples of 8 features"
    if (reason := triton_why_not(spec.device, spec.dtype)) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 9 else f"needs a GPU of compute capability 9.0, not {major}.{minor}"


def _product_why_not(spec: GroupedLinearSpec) -> str | None:
    if spec.weight_dtype != spec.dtype:
        return f"needs a weight of {spec.dtype}, not of {spec.weight_dtype}"
    return _hopper_why_not(spec)


def _grouped_mm_why_not(spec: GroupedLinearSpec) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"serves bfloat16, not {spec.dtype}"
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    return _product_why_not(spec)


def _loop_why_not(spec: GroupedLinearSpec) -> str | None:
    if spec.device != "cpu" and not spec.known_sizes:
        return "needs the sizes of the groups on the host"
    return None


_TRITON = "megalight.ops.grouped_linear.triton"
PRODUCT.register(Backend("triton", lazy(_TRITON, "product"), 30, _product_why_not))
PRODUCT.register(Backend("grouped_mm", grouped_mm, 20, _grouped_mm_why_not))
PRODUCT.register(Backend("loop", torch_product, 10, _loop_why_not))
PRODUCT.register(Backend("reference", reference_product, 0, serve_all))
WGRAD.register(Backend("triton", lazy(_TRITON, "accumulate"), 30, _hopper_why_not))
WGRAD.register(Backend("loop", torch_accumulate, 10, _loop_why_not))
WGRAD.register(Backend("reference", reference_accumulate, 0, serve_all))


def reads_sizes(spec: GroupedLinearSpec, backend: str = "auto") -> bool:
    """Return whether a product reads the sizes of its groups on the host."""
    return PRODUCT.select(spec, backend).name in ("loop", "reference")

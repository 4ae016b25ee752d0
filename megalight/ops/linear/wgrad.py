"""Backends that add ``grad_y^T x`` to the main gradient of a weight."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.ops.common import HALF, cuda_why_not, lazy, serve_all, triton_why_not, wide
from megalight.ops.linear import aligned
from megalight.ops.linear.measured import Accumulate, Measured
from megalight.ops.parameter import put, state_of
from megalight.ops.quantize import Quantized
from megalight.registry import Backend, BackendRegistry, remembered


class Spec(NamedTuple):
    """What a backend must support: device type, dtype of the operands, and dtype of the main gradient."""

    device: str
    dtype: torch.dtype
    main_dtype: torch.dtype


TALL = 4
"""Rows per column of a weight from which ``baddbmm`` is faster than ``addmm`` on an H200 (docs/performance/log.md)."""

WGRAD: BackendRegistry[Spec, Accumulate] = BackendRegistry("weight_gradient")
EXAMPLE = Spec("cpu", torch.bfloat16, torch.float32)


def _reference(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    dtype = torch.promote_types(wide(grad_y.dtype), main_grad.dtype)
    put(main_grad, grad_y.to(dtype).T @ x.to(dtype), write)


def _addmm(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    # With beta = 0, BLAS does not read the old content, so NaN left in the buffer does no harm.
    main_grad.addmm_(grad_y.T, x, beta=0 if write else 1)


def _addmm_why_not(spec: Spec) -> str | None:
    # Equal dtypes: the GEMM adds to its output itself (beta = 1), without a temporary.
    return None if spec.dtype == spec.main_dtype else f"needs a main gradient of the operands' type, {spec.dtype}"


def _addmm_fp32(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    torch.addmm(main_grad, grad_y.T, x, beta=0 if write else 1, out_dtype=torch.float32, out=main_grad)


def _baddbmm_fp32(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    batch, beta = main_grad.unsqueeze(0), 0 if write else 1
    torch.baddbmm(batch, grad_y.T.unsqueeze(0), x.unsqueeze(0), beta=beta, out_dtype=torch.float32, out=batch)


def _shaped_fp32(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    rows, columns = main_grad.shape
    (_baddbmm_fp32 if rows >= TALL * columns else _addmm_fp32)(main_grad, grad_y, x, write)


def _half_to_fp32_why_not(spec: Spec) -> str | None:
    if spec.dtype not in HALF or spec.main_dtype != torch.float32:
        return "needs half operands and a float32 main gradient"
    return cuda_why_not(spec.device)


def _addmm_fp32_why_not(spec: Spec) -> str | None:
    return _half_to_fp32_why_not(spec) or _probe(_addmm_fp32, spec.dtype)


def _baddbmm_fp32_why_not(spec: Spec) -> str | None:
    return _half_to_fp32_why_not(spec) or _probe(_baddbmm_fp32, spec.dtype)


def _both_fp32_why_not(spec: Spec) -> str | None:
    return _addmm_fp32_why_not(spec) or _baddbmm_fp32_why_not(spec)


@lru_cache
def _probe(accumulate: Accumulate, dtype: torch.dtype) -> str | None:
    """Test whether this torch release can add a half product to a float32 matrix in place, and overwrite one."""
    ones = torch.ones(16, 16, dtype=dtype, device="cuda")
    main_grad = torch.ones(16, 16, dtype=torch.float32, device="cuda")
    # NaN shows whether a write reads the old content.
    written = torch.full_like(main_grad, float("nan"))
    try:
        accumulate(main_grad, ones, ones, False)
        accumulate(written, ones, ones, True)
    except (RuntimeError, TypeError) as error:
        return f"this torch refuses a float32 addend: {str(error).splitlines()[0]}"
    return None if bool(((main_grad == 17) & (written == 16)).all()) else "this torch gives a wrong sum"


def _triton_why_not(spec: Spec) -> str | None:
    return _half_to_fp32_why_not(spec) or triton_why_not(spec.device, spec.dtype)


def _mm_fp32_add(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    put(main_grad, torch.mm(grad_y.T, x, out_dtype=torch.float32), write)


def _matmul_add(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    put(main_grad, grad_y.T @ x, write)


WGRAD.register(Backend("addmm", _addmm, 30, _addmm_why_not))
WGRAD.register(Backend("shaped_fp32", _shaped_fp32, 25, _both_fp32_why_not))
WGRAD.register(Backend("addmm_fp32", _addmm_fp32, 20, _addmm_fp32_why_not))
WGRAD.register(Backend("baddbmm_fp32", _baddbmm_fp32, 15, _baddbmm_fp32_why_not))
WGRAD.register(Backend("measured_fp32", Measured(_addmm_fp32, _baddbmm_fp32), 12, _both_fp32_why_not))
WGRAD.register(Backend("triton", lazy("megalight.ops.linear.triton", "accumulate"), 10, _triton_why_not))
WGRAD.register(Backend("mm_fp32_add", _mm_fp32_add, 5, _half_to_fp32_why_not))
WGRAD.register(Backend("reference", _reference, 1, serve_all))
WGRAD.register(Backend("matmul_add", _matmul_add, 0, serve_all))


@remembered
def choose(spec: Spec, backend: str = "auto") -> Accumulate:
    """Return the function that accumulates for ``spec``."""
    return WGRAD.select(spec, backend).fn


def add(weight: Tensor, grad_y: Tensor, x: Tensor | Quantized) -> None:
    """Add ``grad_y^T x`` to the main gradient of ``weight``, ``[out, in]``, and report it.

    The first gradient of a step overwrites: see :mod:`megalight.ops.parameter`.

    Args:
        grad_y: ``[..., out]``; all leading dims are summed over.
        x: ``[..., in]``; may be cast already if ``weight`` has a precision.
    """
    state = state_of(weight)
    main_grad, write = state.main_grad, state.touch()
    assert main_grad is not None
    if write and not grad_y.numel():
        main_grad.zero_()  # a library's product of zero tokens may write nothing
    if state.precision is not None:
        state.precision.accumulate(main_grad, grad_y, x, write)
    else:
        assert isinstance(x, Tensor)
        if grad_y.dim() != 2:
            grad_y, x = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
        if x.dtype != grad_y.dtype:
            x = x.to(grad_y.dtype)
        accumulate = choose(Spec(grad_y.device.type, grad_y.dtype, main_grad.dtype))
        odd = (main_grad.shape[0] | main_grad.shape[1]) % aligned.MULTIPLE and aligned.pays(x, main_grad.shape)
        if odd and len(x):
            aligned.add_weight_gradient(accumulate, main_grad, grad_y, x, write)
        else:
            accumulate(main_grad, grad_y, x, write)
    state.mark_grad_ready()

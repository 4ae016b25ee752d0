"""NVIDIA Apex: backends for norms, weight gradients and Adam.

This module does not import the package; a backend does when it is used. Apex's version has been 0.1 for years, so the
extensions that were built are looked for instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops.adam import ADAM, AdamSpec
from megalight.ops.common import HALF, whole_why_not
from megalight.ops.linear import WGRAD, WeightGradientSpec
from megalight.ops.norm import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM, NormSpec, of_sum
from megalight.plugins.package import Package
from megalight.registry import Backend

CORRECT_BIAS = 1


@lru_cache
def _no_overflow(device: torch.device) -> Tensor:
    """Return the flag with which the kernels skip a step; it is never set."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class MultiTensorAdam:
    """A backend of the op ``adam`` with one kernel. To scale the gradient takes a separate pass over memory.

    Attributes:
        applier: returns the function that calls a kernel on lists of tensors.
        kernel: returns a kernel by name.
        writes_out: whether the kernel also writes the low-precision copy if ``lr`` and ``step`` are numbers.
    """

    applier: Callable[[], Any]
    kernel: Callable[[str], Any]
    writes_out: bool

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: float | Tensor,
        decoupled: bool = True,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Implement :func:`megalight.ops.adam.adam_step`."""
        # A shard may be empty, and then there is nothing to launch.
        if not param.numel():
            return
        # A recorded step must not read numbers on the host, and tensors stay on the device.
        on_device = isinstance(lr, Tensor) or isinstance(step, Tensor)
        name, last = "multi_tensor_adam", list[Tensor]()
        # Not in place: the gradient belongs to the caller, and hooks may read it after the step.
        own = grad if grad_scale is None else grad.float() * grad_scale.float()
        lists = [[own], [param], [exp_avg], [exp_avg_sq]]
        if on_device:
            # This kernel multiplies the gradient by its last argument in place, so it gets a copy.
            lists[0] = [own.to(torch.float32, copy=own is grad)]
            lr = torch.as_tensor(lr, dtype=torch.float32, device=param.device)
            step = torch.as_tensor(step, device=param.device).to(torch.int32)
            # The last argument is the inverse of a loss scale, which is 1 here: scaling is done above.
            name, last = "multi_tensor_adam_capturable", [torch.ones(1, dtype=torch.float32, device=param.device)]
        else:
            lr, step = float(lr), int(step)
        # With a fifth list, the kernel reads and writes masters there, and writes the copy to the second list.
        if fused := out is not None and self.writes_out and not on_device:
            lists = [lists[0], [out], *lists[2:], [param]]
        numbers = (lr, beta1, beta2, eps, step, int(decoupled), CORRECT_BIAS, weight_decay, *last)
        # The flag says whether to skip the step. Ours is decided before, on all ranks together.
        self.applier()(self.kernel(name), _no_overflow(param.device), lists, *numbers)
        if out is not None and not fused:
            out.copy_(param)


PACKAGE = Package(
    "apex",
    "apex",
    "build https://github.com/NVIDIA/apex with its C++ and CUDA extensions (PyPI's apex is another package)",
)


# Norms


MODULE = "apex.normalization.fused_layer_norm"
NORM_EXTENSION = "fused_layer_norm_cuda"


def _why_not(spec: NormSpec, function: str) -> str | None:
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.dtype != spec.weight_dtype:
        return f"needs a weight in the dtype of the input, {spec.dtype}"
    reason = whole_why_not(spec.divided)
    return reason or PACKAGE.why_not(spec.device, "the fused norm", f"{MODULE}:{function}", NORM_EXTENSION)


def rms_why_not(spec: NormSpec) -> str | None:
    """Return why it cannot serve RMS norm, or None."""
    return _why_not(spec, "fused_rms_norm_affine")


def layer_why_not(spec: NormSpec) -> str | None:
    """Return why it cannot serve layer norm, or None."""
    return _why_not(spec, "fused_layer_norm_affine")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim."""
    out: Tensor = PACKAGE.load(f"{MODULE}:fused_rms_norm_affine")(x, weight, tuple(weight.shape), eps)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim. The kernel always adds a bias; without one it gets zeros."""
    shift = torch.zeros_like(weight) if bias is None else bias
    out: Tensor = PACKAGE.load(f"{MODULE}:fused_layer_norm_affine")(x, weight, shift, tuple(weight.shape), eps)
    return out


# The package has no kernel for both, so the sum is a pass of its own.
add_rms_norm = of_sum(rms_norm)
add_layer_norm = of_sum(layer_norm)


# Weight gradients, added to the main gradient inside the GEMM


WEIGHT_GRADIENT_EXTENSION = "fused_weight_gradient_mlp_cuda"


def _kernel(dtype: torch.dtype) -> str:
    return f"{WEIGHT_GRADIENT_EXTENSION}:wgrad_gemm_accum_{'fp32' if dtype == torch.float32 else 'fp16'}"


def weight_gradient_why_not(spec: WeightGradientSpec) -> str | None:
    """Return why it cannot serve an accumulation, or None."""
    if spec.dtype not in HALF or spec.main_dtype not in (torch.float32, spec.dtype):
        return "needs half operands, and a main gradient in float32 or their type"
    return PACKAGE.why_not(spec.device, "the fused weight gradient", "apex", _kernel(spec.main_dtype))


def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """``main_grad [out, in] += grad_y [T, out]^T x [T, in]``; ``write``: to zeros, as the kernel only adds.

    Raises:
        BackendError: ``main_grad`` is not contiguous; the kernel would not notice.
    """
    if not main_grad.is_contiguous():
        raise BackendError(
            f"apex adds to contiguous main gradients, and this one, {list(main_grad.shape)}, is not. "
            "Next: weight_gradient='auto'."
        )
    if write:
        # The old content may be NaN: a product with beta = 1 would keep it.
        main_grad.zero_()
    # The kernel reads rows as they lie in memory.
    PACKAGE.load(_kernel(main_grad.dtype))(x.contiguous(), grad_y.contiguous(), main_grad)


# Adam, by multi-tensor kernels


APPLY = "apex.multi_tensor_apply:multi_tensor_applier"
ADAM_EXTENSION = "amp_C"


def adam_why_not(spec: AdamSpec) -> str | None:
    """Return why it cannot serve a step, or None."""
    if not spec.contiguous:
        return "needs contiguous tensors"
    # The kernels take one dtype for all lists, and do not write a low-precision copy.
    if {spec.dtype, spec.grad_dtype, *spec.state_dtypes} != {torch.float32}:
        return "needs parameters, gradients and moments in float32"
    kernels = (f"{ADAM_EXTENSION}:multi_tensor_adam", f"{ADAM_EXTENSION}:multi_tensor_adam_capturable")
    return PACKAGE.why_not(spec.device, "fused Adam", APPLY, *kernels)


# Functions, as nothing of the package may be imported before it is used.
adam_step = MultiTensorAdam(
    applier=lambda: PACKAGE.load(APPLY), kernel=lambda name: PACKAGE.load(f"{ADAM_EXTENSION}:{name}"), writes_out=False
)

NAME = "apex"
PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends."""
    # The same names in every registry: a user asks all ops for one package with one word.
    RMS_NORM.register(Backend(NAME, rms_norm, PRIORITY, rms_why_not))
    ADD_RMS_NORM.register(Backend(NAME, add_rms_norm, PRIORITY, rms_why_not))
    LAYER_NORM.register(Backend(NAME, layer_norm, PRIORITY, layer_why_not))
    ADD_LAYER_NORM.register(Backend(NAME, add_layer_norm, PRIORITY, layer_why_not))
    WGRAD.register(Backend(NAME, accumulate, PRIORITY, weight_gradient_why_not))
    ADAM.register(Backend(NAME, adam_step, PRIORITY, adam_why_not))

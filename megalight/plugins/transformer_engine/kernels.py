"""TransformerEngine's kernels: backends for activations, norms, weight gradients and Adam."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megalight.ops.activation import ActivationSpec
from megalight.ops.adam import AdamSpec
from megalight.ops.autograd import once_differentiable
from megalight.ops.common import HALF, whole_why_not
from megalight.ops.linear import WeightGradientSpec
from megalight.ops.norm import NormSpec, of_sum
from megalight.plugins.apex import MultiTensorAdam
from megalight.plugins.package import Package

PACKAGE = Package("transformer_engine", "transformer-engine", "pip install --no-build-isolation 'megalight[te]'")
TORCH = "transformer_engine.pytorch"
KERNELS = "transformer_engine_torch"
"""The compiled extension. :data:`TORCH` must be imported first, because it finds the extension."""


def why_not(device: str, feature: str, minimum: str, *paths: str) -> str | None:
    """Return why the package cannot serve ``feature``, or None."""
    return PACKAGE.why_not(device, feature, TORCH, *paths, minimum=minimum)


def kernel(name: str) -> Any:
    """Return a function of the compiled extension."""
    PACKAGE.load(TORCH)
    return PACKAGE.load(f"{KERNELS}:{name}")


def dtype_code(dtype: Any) -> Any:
    """Return the extension's value for a torch dtype."""
    return PACKAGE.load("transformer_engine.pytorch.constants:TE_DType")[dtype]


# Activations: what Megatron calls ``use_te_activation_func``


ACTIVATION_MINIMUM = "2.8"
KINDS = {
    "silu": ("silu", "swiglu"),
    "gelu_tanh": ("gelu", "geglu"),
    "quick_gelu": ("qgelu", "qgeglu"),
    "relu": ("relu", "reglu"),
    "squared_relu": ("srelu", "sreglu"),
}
"""Our name -> names of the plain and the gated kernel. The backward kernel has a ``d`` in front. GELU is with tanh."""


# The backward kernel is asked for, too: it is found missing now, and not in the first backward.
def _activation_why_not(spec: ActivationSpec, gates: bool) -> str | None:
    if spec.kind not in KINDS:
        return f"has no {spec.kind}; it has {', '.join(KINDS)}"
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    name = KINDS[spec.kind][gates]
    kernels = (f"{KERNELS}:{name}", f"{KERNELS}:d{name}")
    return why_not(spec.device, f"the activation {name}", ACTIVATION_MINIMUM, *kernels)


def gated_why_not(spec: ActivationSpec) -> str | None:
    """Return why it cannot serve the gated form, or None."""
    return _activation_why_not(spec, True)


def activation_why_not(spec: ActivationSpec) -> str | None:
    """Return why it cannot serve the plain form, or None."""
    return _activation_why_not(spec, False)


class _TEActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        # Kept as the kernel reads it, so that the backward makes no second copy.
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.name = name
        out: Tensor = kernel(name)(x, None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        # The kernel returns rows of two dims.
        return kernel(f"d{ctx.name}")(grad_y.contiguous(), x, None).view(x.shape), None


def activation(x: Tensor, kind: str) -> Tensor:
    """``act(x)``."""
    out: Tensor = _TEActivation.apply(x, KINDS[kind][0])  # type: ignore[no-untyped-call]
    return out


def gated(x: Tensor, kind: str) -> Tensor:
    """``act(gate) * up`` with ``x = gate | up`` along the last dim, as the kernels define it."""
    out: Tensor = _TEActivation.apply(x, KINDS[kind][1])  # type: ignore[no-untyped-call]
    return out


# Norms: one pass forward, one and a sum over rows backward


NORM_MINIMUM = "2.1"
NO_MARGIN, NOT_CENTERED = 0, False
"""Use all SMs, and a weight that is the factor itself, not the factor minus one."""


def _norm_why_not(spec: NormSpec, kind: str) -> str | None:
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.dtype != spec.weight_dtype:
        return f"needs a weight in the dtype of the input, {spec.dtype}"
    kernels = [f"{KERNELS}:{kind}_{way}" for way in ("fwd", "bwd")]
    reason = whole_why_not(spec.divided)
    return reason or why_not(spec.device, f"the norm ({kind})", NORM_MINIMUM, *kernels)


def rms_why_not(spec: NormSpec) -> str | None:
    """Return why it cannot serve RMS norm, or None."""
    return _norm_why_not(spec, "rmsnorm")


def layer_why_not(spec: NormSpec) -> str | None:
    """Return why it cannot serve layer norm, or None."""
    return _norm_why_not(spec, "layernorm")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, weight.shape[0]).contiguous()
        # The kernel saves the inverse deviation in float32, with which the backward needs no
        # second pass for statistics.
        y, _, rstd = kernel("rmsnorm_fwd")(flat, weight, eps, None, None, dtype_code(x.dtype), NO_MARGIN, NOT_CENTERED)
        ctx.save_for_backward(flat, weight, rstd)
        out: Tensor = y.view(x.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, rstd = ctx.saved_tensors
        grad = grad_y.reshape(flat.shape).contiguous()
        grad_x, grad_weight = kernel("rmsnorm_bwd")(grad, flat, rstd, weight, NO_MARGIN, NOT_CENTERED)
        return grad_x.view(grad_y.shape), grad_weight, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        flat = x.reshape(-1, weight.shape[0]).contiguous()
        # The kernel always adds a bias.
        shift = torch.zeros_like(weight) if bias is None else bias
        y, mean, rstd = kernel("layernorm_fwd")(
            flat, weight, shift, eps, None, None, dtype_code(x.dtype), NO_MARGIN, NOT_CENTERED
        )
        ctx.save_for_backward(flat, weight, mean, rstd)
        ctx.has_bias = bias is not None
        out: Tensor = y.view(x.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, mean, rstd = ctx.saved_tensors
        grad = grad_y.reshape(flat.shape).contiguous()
        grad_x, grad_weight, grad_bias = kernel("layernorm_bwd")(
            grad, flat, mean, rstd, weight, NO_MARGIN, NOT_CENTERED
        )
        # The gradient of the zeros is dropped.
        return grad_x.view(grad_y.shape), grad_weight, grad_bias if ctx.has_bias else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim."""
    out: Tensor = _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return out


add_rms_norm = of_sum(rms_norm)
add_layer_norm = of_sum(layer_norm)


# Adam, by multi-tensor kernels, which also write the low-precision copy


ADAM_MINIMUM = "2.1"
APPLY = "transformer_engine.pytorch.optimizers:multi_tensor_applier"


def adam_why_not(spec: AdamSpec) -> str | None:
    """Return why it cannot serve a step, or None."""
    if not spec.contiguous:
        return "needs contiguous tensors"
    if spec.dtype != torch.float32 or set(spec.state_dtypes) != {torch.float32}:
        return "needs parameters and moments in float32"
    if spec.grad_dtype not in (*HALF, torch.float32):
        return f"serves gradients in bfloat16, float16 and float32, not {spec.grad_dtype}"
    if spec.out_dtype not in (None, *HALF, torch.float32):
        return f"writes copies in bfloat16, float16 and float32, not {spec.out_dtype}"
    # Both kernels: which one runs depends on whether `lr` and `step` are tensors, which is
    # known only in the step.
    kernels = (APPLY, f"{KERNELS}:multi_tensor_adam", f"{KERNELS}:multi_tensor_adam_capturable")
    return why_not(spec.device, "fused Adam", ADAM_MINIMUM, *kernels)


adam_step = MultiTensorAdam(applier=lambda: PACKAGE.load(APPLY), kernel=kernel, writes_out=True)


# Weight gradients, added to the main gradient inside the GEMM


WEIGHT_GRADIENT_MINIMUM = "2.1"
GEMM = "transformer_engine.pytorch.cpp_extensions:general_gemm"
WORKSPACE = "transformer_engine.pytorch.module.base:get_workspace"


def weight_gradient_why_not(spec: WeightGradientSpec) -> str | None:
    """Return why it cannot serve an accumulation, or None."""
    if spec.dtype not in (*HALF, torch.float32):
        return f"serves bfloat16, float16 and float32, not {spec.dtype}"
    if spec.main_dtype not in (torch.float32, spec.dtype):
        return f"needs a main gradient in float32 or the operands' type, not {spec.main_dtype}"
    return why_not(spec.device, "the fused weight gradient", WEIGHT_GRADIENT_MINIMUM, GEMM)


# By signature, as versions do not tell which form a build has.
@lru_cache
def _takes_workspace(gemm: Any) -> bool:
    """Return whether the caller must pass a workspace, as in releases before about 2.10."""
    return "workspace" in inspect.signature(gemm).parameters


def workspace(gemm: Any) -> dict[str, Any]:
    """Return the extra arguments that the product needs in the installed release."""
    return {"workspace": PACKAGE.load(WORKSPACE)()} if _takes_workspace(gemm) else {}


def accumulate(main_grad: Tensor, grad_y: Tensor, x: Tensor, write: bool) -> None:
    """``main_grad [out, in] += grad_y [T, out]^T x [T, in]``, with sums in float32. With ``write``: ``=``."""
    gemm = PACKAGE.load(GEMM)
    gemm(
        x.contiguous(),
        grad_y.contiguous(),
        out_dtype=main_grad.dtype,
        # cuBLAS is column-major: `grad_y^T x` is its `x^T grad_y`, and the input comes first.
        layout="NT",
        # With beta = 0, a `write` never reads what was there.
        accumulate=not write,
        out=main_grad,
        grad=True,
        **workspace(gemm),
    )

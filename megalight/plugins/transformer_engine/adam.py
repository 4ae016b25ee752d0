"""Adam with TransformerEngine's multi-tensor kernels, which also write the low-precision copy."""

from __future__ import annotations

import torch

from megalight.ops.adam import Spec
from megalight.ops.common import HALF
from megalight.plugins.multi_tensor import MultiTensorAdam
from megalight.plugins.transformer_engine.package import KERNELS, PACKAGE, kernel
from megalight.plugins.transformer_engine.package import why_not as package_why_not

MINIMUM = "2.1"
APPLY = "transformer_engine.pytorch.optimizers:multi_tensor_applier"


def why_not(spec: Spec) -> str | None:
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
    return package_why_not(spec.device, "fused Adam", MINIMUM, *kernels)


adam_step = MultiTensorAdam(applier=lambda: PACKAGE.load(APPLY), kernel=kernel, writes_out=True)

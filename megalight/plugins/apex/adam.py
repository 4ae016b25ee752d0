"""Adam with Apex's multi-tensor kernels."""

from __future__ import annotations

import torch

from megalight.ops.adam import Spec
from megalight.plugins.apex.package import PACKAGE
from megalight.plugins.apex.package import why_not as package_why_not
from megalight.plugins.multi_tensor import MultiTensorAdam

APPLY = "apex.multi_tensor_apply:multi_tensor_applier"
EXTENSION = "amp_C"


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve a step, or None."""
    if not spec.contiguous:
        return "needs contiguous tensors"
    # The kernels take one dtype for all lists, and do not write a low-precision copy.
    if {spec.dtype, spec.grad_dtype, *spec.state_dtypes} != {torch.float32}:
        return "needs parameters, gradients and moments in float32"
    kernels = (f"{EXTENSION}:multi_tensor_adam", f"{EXTENSION}:multi_tensor_adam_capturable")
    return package_why_not(spec.device, "fused Adam", APPLY, *kernels)


# Functions, as nothing of the package may be imported before it is used.
adam_step = MultiTensorAdam(
    applier=lambda: PACKAGE.load(APPLY), kernel=lambda name: PACKAGE.load(f"{EXTENSION}:{name}"), writes_out=False
)

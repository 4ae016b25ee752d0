"""What cuDNN's graphs of attention serve, and the package that builds them."""

from __future__ import annotations

import torch

from megalight.ops.attention import NEAR, AttentionSpec
from megalight.ops.common import HALF, cuda_why_not, triton_why_not
from megalight.plugins.package import Package

PACKAGE = Package("cudnn", "nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend")
MINIMUM = "1.32"
"""The first version that was tried."""
CUDNN = 91900
"""The first version of cuDNN itself that was tried. It comes with torch 2.11."""
WIDEST = 256
"""Features of a head."""
MEASURED = 128
"""Features of the heads with which it was compared with our kernels."""


def why_not(spec: AttentionSpec) -> str | None:
    """Return why cuDNN's graphs cannot serve attention, or None."""
    if spec.dropout:
        return "has no dropout"
    if spec.softcap and not spec.square:
        return "has a soft cap only where queries and keys are the same tokens"
    sizes = (spec.head_dim, spec.value_dim)
    if spec.dtype not in HALF or max(sizes) > WIDEST or any(size % 8 for size in sizes):
        return f"needs heads of multiples of 8 up to {WIDEST} in half types, not {sizes} in {spec.dtype}"
    if (reason := PACKAGE.why_not(spec.device, "attention", "cudnn:pygraph", minimum=MINIMUM)) is not None:
        return reason
    if spec.sink and (reason := triton_why_not(spec.device, spec.dtype)) is not None:
        return reason  # for the gradient of sinks
    # Asked last: these need a GPU, and the other reasons do not.
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"needs a GPU of compute capability 9.0, not {major}.{minor}"
    found = PACKAGE.load("cudnn:backend_version")()
    return None if found >= CUDNN else f"needs cuDNN {CUDNN}, found {found}. Next: install a newer torch"


def slower(spec: AttentionSpec) -> str | None:
    """Return why ``auto`` should take another backend, or None: it takes this one only where it was measured faster.

    Measured on an H200: 8192 tokens, 32 heads, 8 of keys, 128 features, forward and backward.
    """
    if spec.swift:
        return "our kernels for Hopper are faster"
    if not (spec.uniform and spec.square):
        return "our kernels are about as fast for packed sequences, and need no graph for each size"
    if spec.softcap:
        return "our kernels are about as fast for soft caps"
    if spec.window == spec.sink:
        return (
            "was not measured with windows and sinks together" if spec.sink else "torch's own call of cuDNN is as fast"
        )
    if spec.near:
        return f"our kernels are faster for windows below {NEAR}"
    if (spec.head_dim, spec.value_dim) != (MEASURED, MEASURED):
        return f"was measured with heads of {MEASURED} features alone"
    if cuda_why_not(spec.device) is None and torch.cuda.get_device_capability() != (9, 0):
        return "was measured on Hopper alone"
    if torch.are_deterministic_algorithms_enabled():
        return "cuDNN keeps all scores for gradients in a fixed order"
    return None

"""What a layer launches on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megalight.nn import MLP, Attention, InnerAttention, LayerContext, RMSNorm, TransformerLayer
from megalight.nn.init import initialize
from megalight.types import PackedSequences

pytestmark = pytest.mark.gpu


def test_one_kernel_adds_beside_the_norms() -> None:
    """The sum at the layer's end; all others, forward and backward, are in the norms' own passes."""
    layer = TransformerLayer(
        RMSNorm(256), Attention(256, 4, 2, 64, InnerAttention()), RMSNorm(256), MLP(256, 512)
    )  # fmt: skip
    initialize(layer, 1)
    layer = layer.to("cuda", torch.bfloat16)
    context = LayerContext(PackedSequences.of_uniform(2, 128, "cuda"))
    hidden = torch.randn(256, 256, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn_like(hidden)
    layer(hidden, context).backward(gradient)  # compiles
    layer.zero_grad(set_to_none=True)
    hidden.grad = None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        layer(hidden, context).backward(gradient)
        torch.cuda.synchronize()
    kernels = [event.name for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels
    adding = [name for name in kernels if "CUDAFunctor_add" in name or "CUDAFunctorOnSelf_add" in name]
    assert len(adding) == 1, "\n".join(kernels)

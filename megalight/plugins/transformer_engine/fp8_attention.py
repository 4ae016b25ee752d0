"""Attention with 8-bit products by TransformerEngine's ``DotProductAttention``, which takes cuDNN's kernel.

On Hopper the package has only kernels whose scales are all of past steps. They are not offered: with release 2.12 on
an H100 with cuDNN 9.19, forward and backward of 8192 tokens took 4.5 ms, and 2.5 ms in bf16. After three calls, small
gradients of queries and keys were 42 % wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalight.errors import LayoutError, MissingPackageError
from megalight.ops.common import HALF
from megalight.ops.fp8_attention import Attend, Spec, sizes_why_not
from megalight.plugins.transformer_engine.package import PACKAGE, TORCH
from megalight.plugins.transformer_engine.package import why_not as package_why_not

RECIPE = "transformer_engine.common.recipe:Float8CurrentScaling"
FORMATS = "transformer_engine.common.recipe:Format"
MINIMUM = "2.8"
"""The first release whose attention takes scales by current values."""


def why_not(spec: Spec) -> str | None:
    """Return why it cannot serve, or None."""
    if spec.power:
        return "its attention has no scales that are powers of two"
    if spec.dtype not in HALF:
        return f"serves bfloat16 and float16, not {spec.dtype}"
    reason = package_why_not(spec.device, "attention in 8 bits", MINIMUM, f"{TORCH}:DotProductAttention", RECIPE)
    if reason is not None:
        return reason
    if (major := torch.cuda.get_device_capability()[0]) < 10:
        return f"its attention by current values needs a GPU of compute capability 10.0, not {major}.x"
    return sizes_why_not(spec)


def _autocast(recipe: Any) -> Any:
    """Enter the package's context for 8-bit modules, whose name has changed."""
    try:
        return PACKAGE.load(f"{TORCH}:autocast")(enabled=True, recipe=recipe)
    except MissingPackageError:
        return PACKAGE.load(f"{TORCH}:fp8_autocast")(enabled=True, fp8_recipe=recipe)


def make(spec: Spec) -> Attend:
    """Make the attention of one layer. Its module has no parameters, but a scale of the gradients of scores."""
    formats = PACKAGE.load(FORMATS)
    recipe = PACKAGE.load(RECIPE)(fp8_format=formats.HYBRID if spec.gradient == "e5m2" else formats.E4M3, fp8_dpa=True)
    modules: dict[tuple[int, int], Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise LayoutError(
                "fp8_attention: attention of TransformerEngine in 8 bits updates scales on the host's side, and cannot "
                "be recorded as a CUDA graph; leave out the graphs, or fp8_attention."
            )
        key = q.shape[1], k.shape[1]
        if key not in modules:
            modules[key] = PACKAGE.load(f"{TORCH}:DotProductAttention")(
                key[0], spec.head_dim, num_gqa_groups=key[1], attention_dropout=0.0, softmax_scale=spec.scale
            )
        heads = [t.view(sequences, -1, *t.shape[1:]) for t in (q, k, v)]
        with _autocast(recipe):
            out: Tensor = modules[key](*heads, qkv_format="bshd", attn_mask_type="causal" if spec.causal else "no_mask")
        return out.reshape(q.shape)

    return attend

"""FlashMLA (https://github.com/deepseek-ai/FlashMLA): attention to stored latents, on Hopper.

This module imports nothing of the package; the backend does when its name is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalight.ops.attention.batch_invariant import PagedAttentionOptions
from megalight.ops.common import HALF
from megalight.ops.paged_attention import PAGE_SIZES, PAGED_ATTENTION, PagedAttentionSpec, of_tokens
from megalight.plugins.flash_attn import lacks_arguments
from megalight.plugins.package import Package
from megalight.registry import Backend
from megalight.types import Pages

PACKAGE = Package("flash_mla", "flash-mla", "pip install git+https://github.com/deepseek-ai/FlashMLA")
METADATA, ATTENTION = "flash_mla:get_mla_metadata", "flash_mla:flash_mla_with_kvcache"
ARGUMENTS = {
    ATTENTION: (
        *("block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
        *("softmax_scale", "causal"),
    )
}
PAGE_SIZE = 64
SIZES = 576, 512
"""Features of a key and of a value: the latent, and the key that is rotated."""


def why_not(spec: PagedAttentionSpec) -> str | None:
    """Return why it cannot serve, or None."""
    for name in ("window", "chunk", "softcap", "sink", "quantized"):
        if getattr(spec, name):
            return "reads no e4m3 with a scale for each token" if name == "quantized" else f"has no {name}"
    if not spec.shared or (spec.head_dim, spec.value_dim) != SIZES or spec.dtype not in HALF:
        return f"reads latents with keys and values of {SIZES} features, in half precision"
    if spec.page_size != PAGE_SIZE:
        return f"needs blocks of {PAGE_SIZE} tokens, not {spec.page_size}: set block_size"
    if (reason := PACKAGE.why_not(spec.device, "attention to latents", METADATA, ATTENTION)) is not None:
        return reason
    if (reason := lacks_arguments(PACKAGE, ARGUMENTS)) is not None:
        return reason
    major = torch.cuda.get_device_capability()[0]
    return None if major == 9 else f"serves sm_90, not sm_{major}x"


def paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Pages, options: PagedAttentionOptions) -> Tensor:
    """See :func:`megalight.ops.paged_attention.paged_attention`."""
    pages = of_tokens(pages, len(q)) if pages.recorded else pages
    keys, heads = k_pool.view(-1, pages.page_size, *k_pool.shape[1:]), k_pool.shape[1]
    outputs, first, token = [], 0, 0
    # A call takes equally many queries of each sequence.
    for count in [pages.decodes] * (pages.decodes > 0) + [1] * (len(pages.query_lengths) - pages.decodes):
        queries = pages.query_lengths[first]
        rows = q[token : token + count * queries].view(count, queries, *q.shape[1:])
        lengths = pages.lengths[first : first + count]
        plan, splits = PACKAGE.load(METADATA)(lengths, queries * q.shape[1] // heads, heads)
        out, _ = PACKAGE.load(ATTENTION)(
            rows,
            keys,
            block_table=pages.block_table[first : first + count],
            cache_seqlens=lengths,
            head_dim_v=v_pool.shape[-1],
            tile_scheduler_metadata=plan,
            num_splits=splits,
            softmax_scale=options.scale,
            causal=options.causal,
        )
        outputs.append(out.flatten(0, 1))
        first, token = first + count, token + count * queries
    return torch.cat(outputs)


def register() -> None:
    """Add the backend. Backends of plugins are chosen only by name."""
    PAGED_ATTENTION.register(Backend("flash_mla", paged, 0, why_not))
    PAGE_SIZES["flash_mla"] = PAGE_SIZE

"""FlashInfer (https://github.com/flashinfer-ai/flashinfer): attention to stored keys and values.

It plans a pass on the host, which must know how many tokens each sequence has, and runs the plan in every layer. So a
recorded step, whose numbers are on the device alone, cannot use it.

This module imports nothing of the package; the backend does when its name is asked for.
"""

from __future__ import annotations

import inspect
import weakref
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.ops.attention.batch_invariant import PagedAttentionOptions
from megalight.ops.common import HALF
from megalight.ops.paged_attention import PAGED_ATTENTION, PagedAttentionSpec
from megalight.plugins.package import Package
from megalight.registry import Backend
from megalight.types import Pages, to_device

PACKAGE = Package("flashinfer", "flashinfer-python", "pip install flashinfer-python")
WRAPPER = "flashinfer:BatchPrefillWithPagedKVCacheWrapper"
PLANNED = ("head_dim_qk", "head_dim_vo", "causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type")
"""Arguments of a plan that older releases do not have."""
SIZES = 64, 128, 256
"""Features of a head."""
WORKSPACE = 128 << 20
"""Bytes for parts of outputs, which all plans share: the passes of a device come one after the other."""


def why_not(spec: PagedAttentionSpec) -> str | None:
    """Return why it cannot serve, or None."""
    for name in ("chunk", "sink"):
        if getattr(spec, name):
            return f"has no {name}s"
    if spec.quantized or spec.shared:
        return "reads no e4m3 with a scale for each head of each token" if spec.quantized else "reads no latents"
    if spec.dtype not in HALF or spec.head_dim != spec.value_dim or spec.head_dim not in SIZES:
        return f"needs heads of {', '.join(map(str, SIZES))} features in half precision"
    if (reason := PACKAGE.why_not(spec.device, "attention to stored keys", WRAPPER, minimum="0.2")) is not None:
        return reason
    lacking = [name for name in PLANNED if name not in inspect.signature(PACKAGE.load(WRAPPER).plan).parameters]
    return f"{WRAPPER}.plan takes no {', '.join(lacking)}. Next: {PACKAGE.how}" if lacking else None


class _Plan:
    """A plan of the package, for layers with equal options: made anew for each pass.

    Args:
        device: where it runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._wrapper = PACKAGE.load(WRAPPER)(_workspace(device), "NHD")
        self._pages: weakref.ref[Pages] | None = None
        self._copied: torch.cuda.Event | None = None

    def of(self, pages: Pages, heads: tuple[int, int], options: dict[str, Any]) -> Any:
        """Return what runs the plan of a pass.

        Args:
            pages: of the pass.
            heads: number of query heads, and of key heads.
            options: of the plan.
        """
        if self._pages is not None and self._pages() is pages:
            return self._wrapper
        if self._copied is not None:
            # The package sends plans from one pinned buffer: the last one must be there before it is written again.
            self._copied.synchronize()
        # The host knows lengths, or waits for them once in a pass.
        lengths: list[int] = [*pages.bounds] if pages.exact else pages.lengths.tolist()
        counts = [-(-length // pages.page_size) for length in lengths]
        width = pages.block_table.shape[1]
        places = [row * width + block for row, count in enumerate(counts) for block in range(count)]
        device = pages.block_table.device
        self._wrapper.plan(
            torch.tensor([0, *accumulate(pages.query_lengths)], dtype=torch.int32),
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            pages.block_table.flatten()[to_device(places, torch.int64, device)],
            torch.tensor([(length - 1) % pages.page_size + 1 for length in lengths], dtype=torch.int32),
            *heads,
            page_size=pages.page_size,
            **options,
        )
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._pages = weakref.ref(pages)
        return self._wrapper


@lru_cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


@lru_cache(maxsize=64)
def _plan(device: torch.device, *_: Any) -> _Plan:
    """Return the plan of layers whose other arguments are equal."""
    return _Plan(device)


def paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Pages, options: PagedAttentionOptions) -> Tensor:
    """See :func:`megalight.ops.paged_attention.paged_attention`. Masks and windows are aligned bottom-right.

    Raises:
        ConfigurationError: the pass is recorded.
    """
    if pages.recorded:
        raise ConfigurationError(
            "FlashInfer plans each pass on the host, which a recorded step does not ask. Set cuda_graphs=0, or take "
            "another attention_backend."
        )
    given = {
        "head_dim_qk": q.shape[-1],
        "head_dim_vo": v_pool.shape[-1],
        "causal": options.causal,
        "sm_scale": options.scale,
        "window_left": -1 if options.window is None else options.window,
        "logits_soft_cap": options.softcap or 0.0,
        "q_data_type": q.dtype,
    }
    heads = q.shape[1], k_pool.shape[1]
    wrapper = _plan(q.device, heads, *given.values()).of(pages, heads, given)
    keys, values = (pool.view(-1, pages.page_size, *pool.shape[1:]) for pool in (k_pool, v_pool))
    found: Tensor = wrapper.run(q, (keys, values))
    return found


def register() -> None:
    """Add the backend. Backends of plugins are chosen only by name."""
    PAGED_ATTENTION.register(Backend("flashinfer", paged, 0, why_not))

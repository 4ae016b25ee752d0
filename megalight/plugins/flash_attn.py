"""flash-attn: attention by releases 2, 3 and 4, separate packages that may be installed together.

Release 2 also reads stored keys and values, and release 4 serves the blocks of ring attention, under the same names.
This module imports nothing of the packages; a backend does when its name is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.ops.attention import ATTENTION, AttentionSpec
from megalight.ops.attention.batch_invariant import PagedAttentionOptions
from megalight.ops.attention_block import ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, AttentionBlockSpec
from megalight.ops.common import heads_why_not
from megalight.ops.paged_attention import PAGE_SIZES, PAGED_ATTENTION, PagedAttentionSpec
from megalight.plugins.package import Package
from megalight.registry import Backend
from megalight.types import PackedSequences, Pages

# All releases: one function for equally long sequences, and one for packed sequences


DENSE, PACKED = "flash_attn_func", "flash_attn_varlen_func"
WIDEST = 256
ARGUMENTS = ("softmax_scale", "causal", "window_size", "softcap", "deterministic")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""Arguments that the functions must have. Releases 3 and 4 have no reliable version numbers to check instead."""


def lacks_arguments(package: Package, wanted: Mapping[str, Sequence[str]]) -> str | None:
    """Return what a function of the package does not take, or None. ``wanted``: path of a function -> its arguments.

    We look at the functions instead of a version: builds from source often report none.
    """
    for path, names in wanted.items():
        lacking = [name for name in names if name not in inspect.signature(package.load(path)).parameters]
        if lacking:
            return f"{path} takes no {', '.join(lacking)} in this release. Next: {package.how}"
    return None


def lengths_of(sequences: PackedSequences) -> dict[str, Any]:
    """Return the values of :data:`LENGTHS`."""
    keys = sequences.keys or sequences
    values = (sequences.cu_seqlens, keys.cu_seqlens, sequences.max_length, keys.max_length)
    return dict(zip(LENGTHS, values, strict=True))


@dataclass(frozen=True)
class Release:
    """One release of flash-attn.

    Attributes:
        package: the package.
        module: the module with its functions.
        minimum: the first version that serves. None: any version whose functions have the arguments.
        unlimited: the value for a window without a limit.
        dropout: whether it can drop attention weights.
        sink: the argument that takes sinks. None: it has none.
        gpu_why_not: says why this GPU cannot serve a request, or None. It is asked last: other reasons need no GPU.
    """

    package: Package
    module: str
    minimum: str | None = None
    unlimited: int | None = -1
    dropout: bool = False
    sink: str | None = None
    gpu_why_not: Callable[[AttentionSpec], str | None] = lambda spec: None

    def why_not(self, spec: AttentionSpec) -> str | None:
        """Return why this release cannot serve, or None."""
        # Cheap reasons first: looking at functions imports the package.
        if spec.sink and self.sink is None:
            return "has no sinks"
        if spec.dropout and not self.dropout:
            return "has no dropout"
        if (reason := heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, WIDEST)) is not None:
            return reason
        paths = (f"{self.module}:{DENSE}", f"{self.module}:{PACKED}")
        if (reason := self.package.why_not(spec.device, "attention", *paths, minimum=self.minimum)) is not None:
            return reason
        more = (self.sink,) if spec.sink and self.sink else ()
        wanted = {paths[0]: (*ARGUMENTS, *more), paths[1]: (*ARGUMENTS, *LENGTHS, *more)}
        return lacks_arguments(self.package, wanted) or self.gpu_why_not(spec)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        causal: bool,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        dropout: float,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Compute attention. All releases align masks and windows bottom-right, and support grouped key heads."""
        keys = sequences.keys or sequences
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": causal,
            # A causal mask already hides what comes after, so its right side is 0.
            "window_size": (self.unlimited if window is None else window, 0 if causal else self.unlimited),
            "softcap": softcap or 0.0,
            # Its backward adds up gradients of queries with atomics unless asked not to.
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.dropout:
            options["dropout_p"] = dropout
        if self.sink is not None and sink is not None:
            options[self.sink] = sink
        if sequences.uniform is not None and keys.uniform is not None:
            batch = sequences.uniform[0]
            # Views: equally long sequences lie one behind the other.
            q, k, v = (t.view(batch, -1, *t.shape[1:]) for t in (q, k, v))
            function = DENSE
        else:
            function = PACKED
            options |= lengths_of(sequences)
        found = self.package.load(f"{self.module}:{function}")(q, k, v, **options)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # some releases return the log-sum-exp too
        return out.reshape(sequences.num_tokens, -1, v.shape[-1])


ARCHITECTURES = (8, 9)
"""Major compute capabilities that release 3 serves."""


def _architecture_why_not(spec: AttentionSpec) -> str | None:
    major = torch.cuda.get_device_capability()[0]
    return None if major in ARCHITECTURES else f"serves sm_80 to sm_90, not sm_{major}x"


def too_wide(head_dim: int) -> str | None:
    """Return why heads are too wide for release 4 on this GPU, or None."""
    if head_dim > 128 and torch.cuda.get_device_capability()[0] > 9:
        return f"serves heads up to 128 on this device, not {head_dim}"
    return None


_BUILD = "build the folder hopper/ of https://github.com/Dao-AILab/flash-attention"
VERSION_2 = Release(
    Package("flash_attn", "flash-attn", "pip install --no-build-isolation 'megalight[flash-attn]'"),
    "flash_attn",
    minimum="2.6",  # the first version with a soft cap on scores
    dropout=True,
)
"""flash-attn 2 (https://arxiv.org/abs/2307.08691). It has all features of the op but sinks."""
VERSION_3 = Release(
    Package("flash_attn_interface", "flash-attn-3", _BUILD), "flash_attn_interface", gpu_why_not=_architecture_why_not
)
"""flash-attn 3, for Hopper (https://arxiv.org/abs/2407.08608)."""
VERSION_4 = Release(
    Package("flash_attn.cute", "flash-attn-4", "pip install --pre flash-attn-4"),
    "flash_attn.cute",
    unlimited=None,
    sink="learnable_sink",
    gpu_why_not=lambda spec: too_wide(spec.head_dim),
)
"""flash-attn 4, for Hopper and Blackwell. It is written in CuTe and compiled at its first use."""


BLOCKS_MODULE = "flash_attn.cute.interface"
FORWARD, BACKWARD = f"{BLOCKS_MODULE}:_flash_attn_fwd", f"{BLOCKS_MODULE}:_flash_attn_bwd"
COMMON = ("softmax_scale", "causal", "window_size_left", "window_size_right")
BLOCK_ARGUMENTS = {FORWARD: (*COMMON, *LENGTHS, "return_lse"), BACKWARD: (*COMMON, *LENGTHS, "deterministic")}
"""Arguments that the functions must have: they are private, and may change in any release."""


def blocks_why_not(spec: AttentionBlockSpec) -> str | None:
    """Return why it cannot serve a block, or None.

    The package has no public function for the backward pass alone, so both are the functions behind its own
    autograd.
    """
    if (reason := heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, WIDEST)) is not None:
        return reason
    if (reason := VERSION_4.package.why_not(spec.device, "attention of blocks", FORWARD, BACKWARD)) is not None:
        return reason
    return lacks_arguments(VERSION_4.package, BLOCK_ARGUMENTS) or too_wide(spec.head_dim)


def _options(
    sequences: PackedSequences | None, causal: bool, scale: float | None, window: int | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
    if window is not None:
        options |= {"window_size_left": window, "window_size_right": 0 if causal else None}
    if sequences is not None:
        options |= lengths_of(sequences)
    return options


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block. It aligns masks bottom-right, as the op does."""
    packed = sequences is not None
    tensors = [t[0] if packed else t for t in (q, k, v)]  # packed tensors are `[T, H, D]` for the package
    out, lse, *_ = VERSION_4.package.load(FORWARD)(
        *tensors, return_lse=True, **_options(sequences, causal, scale, window)
    )
    return (out[None], lse[None]) if packed else (out, lse)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: PackedSequences | None,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block, from the merged ``out`` and ``lse``."""
    packed = sequences is not None
    # The package derives `exp(scores - lse)` from what it is given, so merged ones give this block's share.
    tensors = [t[0] if packed else t for t in (q, k, v, out, grad_out, lse)]
    options = _options(sequences, causal, scale, window)
    # Its sums of gradients of queries are atomic unless asked for an order.
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    grads = VERSION_4.package.load(BACKWARD)(*tensors, **options)[:3]
    grad_q, grad_k, grad_v = (t[None] for t in grads) if packed else grads
    return grad_q, grad_k, grad_v


# Attention to stored keys and values, by release 2


STORED, STORED_PACKED = "flash_attn:flash_attn_with_kvcache", f"flash_attn:{PACKED}"
PAGE_SIZE = 256
"""Tokens of a block must be a multiple of this."""
STORED_ARGUMENTS = {
    STORED: ("cache_seqlens", "block_table", "softmax_scale", "causal", "window_size", "softcap"),
    STORED_PACKED: (*LENGTHS, "block_table", "softmax_scale", "causal", "window_size", "softcap"),
}


def paged_why_not(spec: PagedAttentionSpec) -> str | None:
    """Return why it cannot read stored keys and values, or None."""
    if spec.sink or spec.chunk:
        return f"has no {'sinks' if spec.sink else 'chunks'}"
    if spec.quantized or spec.shared:
        return "reads no e4m3 with a scale for each head of each token" if spec.quantized else "reads no latents"
    if (reason := heads_why_not(spec.dtype, spec.head_dim, spec.value_dim, WIDEST)) is not None:
        return reason
    if spec.page_size % PAGE_SIZE:
        return f"needs blocks of a multiple of {PAGE_SIZE} tokens, not {spec.page_size}: set block_size"
    feature = "attention to stored keys"
    if (reason := VERSION_2.package.why_not(spec.device, feature, *STORED_ARGUMENTS, minimum="2.6")) is not None:
        return reason
    return lacks_arguments(VERSION_2.package, STORED_ARGUMENTS)


def paged(q: Tensor, k_pool: Tensor, v_pool: Tensor, pages: Pages, options: PagedAttentionOptions) -> Tensor:
    """See :func:`megalight.ops.paged_attention.paged_attention`. Masks and windows are aligned bottom-right."""
    k, v = (pool.view(-1, pages.page_size, *pool.shape[1:]) for pool in (k_pool, v_pool))
    given: dict[str, Any] = {
        "softmax_scale": options.scale,
        "causal": options.causal,
        "window_size": (-1 if options.window is None else options.window, 0 if options.causal else -1),
        "softcap": options.softcap or 0.0,
        "block_table": pages.block_table,
    }
    load = VERSION_2.package.load
    if pages.decodes == len(pages.query_lengths) == len(q):
        # Splits the keys of a sequence over programs.
        one: Tensor = load(STORED)(q[:, None], k, v, cache_seqlens=pages.lengths, **given)
        return one[:, 0]
    ends = pages.lengths.cumsum(0, dtype=torch.int32)
    lengths = (pages.cu_queries, F.pad(ends, (1, 0)), max(pages.query_lengths), max(pages.bounds))
    out: Tensor = load(STORED_PACKED)(q, k, v, **dict(zip(LENGTHS, lengths, strict=True)), **given)
    return out


PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends."""
    # One name for each release: their numerics differ, and a run should not change with what is installed.
    releases = {"flash_attn": VERSION_2, "flash_attn_3": VERSION_3, "flash_attn_4": VERSION_4}
    for name, release in releases.items():
        ATTENTION.register(Backend(name, release.attention, PRIORITY, release.why_not))
    PAGED_ATTENTION.register(Backend("flash_attn", paged, PRIORITY, paged_why_not))
    PAGE_SIZES["flash_attn"] = PAGE_SIZE
    ATTENTION_BLOCK.register(Backend("flash_attn_4", forward, PRIORITY, blocks_why_not))
    ATTENTION_BLOCK_BACKWARD.register(Backend("flash_attn_4", backward, PRIORITY, blocks_why_not))

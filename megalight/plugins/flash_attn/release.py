"""Common code of all releases: two functions, one for equally long sequences and one for packed sequences."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalight.ops.attention import Spec
from megalight.ops.common import heads_why_not
from megalight.plugins.package import Package
from megalight.types import PackedSequences

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
    """

    package: Package
    module: str
    minimum: str | None = None
    unlimited: int | None = -1
    dropout: bool = False
    sink: str | None = None

    def why_not(self, spec: Spec) -> str | None:
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
        return lacks_arguments(self.package, wanted)

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

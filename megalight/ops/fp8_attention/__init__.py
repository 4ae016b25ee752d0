"""Attention with 8-bit products: queries, keys, values, weights and their gradients are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalight.errors import LayoutError
from megalight.ops.fp8_attention import reference
from megalight.registry import Backend, BackendRegistry
from megalight.types import PackedSequences

WIDEST = 128
"""Largest head size. FP8 kernels of Hopper have no larger one."""
MULTIPLE = 16
"""Head sizes are multiples of this: 8-bit products contract sixteen elements at a time."""

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""``q [T, H, D], k, v [T, Hkv, D]``, number of equally long sequences ``-> [T, H, D]``."""


class Spec(NamedTuple):
    """A request to 8-bit attention.

    Attributes:
        device: device type.
        dtype: dtype of queries, keys and values.
        head_dim: size of a head.
        causal: whether a query sees no later key.
        scale: factor of the scores; None: ``1 / sqrt(D)``.
        gradient: format of the gradients of output and scores. All else is e4m3.
        power: whether scales are powers of two.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    causal: bool = True
    scale: float | None = None
    gradient: Literal["e4m3", "e5m2"] = "e5m2"
    power: bool = False


FP8_ATTENTION: BackendRegistry[Spec, Callable[[Spec], Attend]] = BackendRegistry("fp8_attention")
"""Backends are factories: what they make may have a state for each layer."""
REGISTRIES = (FP8_ATTENTION,)
EXAMPLE = Spec("cpu", torch.bfloat16, 128)


def sizes_why_not(spec: Spec) -> str | None:
    """Return why no 8-bit product serves the heads, or None."""
    if spec.head_dim % MULTIPLE or spec.head_dim > WIDEST:
        return f"needs heads of a multiple of {MULTIPLE} up to {WIDEST}, not {spec.head_dim}"
    return None


FP8_ATTENTION.register(Backend("reference", reference.emulated, 0, sizes_why_not))


class FP8Attention:
    """8-bit attention of one layer.

    Args:
        name: name of the layer, for messages.
        spec: what to compute.
        backend: ``reference`` emulates on any device; plugins have kernels.

    Raises:
        BackendError: the backend cannot serve.
    """

    def __init__(self, name: str, spec: Spec, backend: str) -> None:
        self.name = name
        self.attend = FP8_ATTENTION.select(spec, backend).fn(spec)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences) -> Tensor:
        """``q [T, H, D], k, v [T, Hkv, D] -> [T, H, D]``.

        Raises:
            LayoutError: sequences have unequal lengths, or the keys are of other tokens than the queries.
        """
        if sequences.uniform is None or sequences.keys is not None:
            what = "the keys are not those of the queries" if sequences.keys is not None else "their lengths differ"
            raise LayoutError(
                f"{self.name}: attention in 8 bits (fp8_attention) serves equally long sequences that attend to "
                f"themselves, and {what}. Cut or pad sequences to one length, or leave out fp8_attention."
            )
        return self.attend(q, k, v, sequences.uniform[0])

"""Low-rank adapters of stacked experts: a pair of matrices for each projection of each expert."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megalight.nn.adapter import tensor_name
from megalight.nn.canonical import joined
from megalight.nn.init import Constant, Initializer, Normal
from megalight.nn.moe.dispatch import Grouped
from megalight.ops.grouped_linear import grouped_linear


class StackAdapter(nn.Module):
    """Adds ``scale * (x A_e^T) B_e^T`` to one projection of each expert ``e``. It is in the projection's
    :class:`~megalight.nn.adapter.AdapterSet`.

    The canonical names are those of the expert's weight with ``lora_A.weight`` or ``lora_B.weight`` in place of
    ``weight``: ``experts.3.gate.lora_A.weight``.

    Args:
        down: ``A``, ``[E, r, in]``.
        up: ``B``, ``[E, out, r]``.
        scale: ``alpha / r``.
        inner: the dim of the projection's weight ``[out, in]`` that counts the inner width of an expert.

    Attributes:
        inner_dims: the dim of each parameter's canonical tensors that counts the inner width; None: no dim does.
    """

    def __init__(self, down: nn.Parameter, up: nn.Parameter, scale: float, inner: int) -> None:
        super().__init__()
        self.A = down
        self.B = up
        self.scale = scale
        self.inner_dims: dict[str, int | None] = {"A": None if inner == 0 else 1, "B": 0 if inner == 0 else None}
        # the same values as those of a layer that is not stacked
        std = (3 * down.shape[2]) ** -0.5
        self.initializers: dict[str, Initializer] = {"A": Normal(std), "B": Constant(0.0)}

    @property
    def width(self) -> int:
        """``r``."""
        return self.B.shape[2]

    def forward(self, x: Tensor, copies: Grouped, backend: str) -> Tensor:
        """``[R, in] -> [R, out]``: the term to add. Rows after those of the last expert get any values."""
        narrow = grouped_linear(x, self.A, copies.offsets, copies.sizes, backend)
        return grouped_linear(self.scale * narrow, self.B, copies.offsets, copies.sizes, backend)

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield one tensor per expert; see :mod:`megalight.nn.canonical`."""
        # `experts.adapters.gate.NAME`: the expert's index takes the place of "adapters".
        *around, _, projection, adapter = path.split(".")
        stacked: Tensor = getattr(self, local)
        for expert in range(len(stacked)):
            yield tensor_name(joined(*around, str(expert), projection), local, adapter), tuple(stacked.shape[1:])

    def merged(self, stacked: Tensor) -> Tensor:
        """Return ``W + scale B A`` for a stack ``[E, out, in]``, summed in float32 or wider and rounded once."""
        wide = torch.promote_types(stacked.dtype, torch.float32)
        return (stacked.to(wide) + self.scale * (self.B.to(wide) @ self.A.to(wide))).to(stacked.dtype)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{len(self.A)} x ({self.A.shape[2]} -> {self.width} -> {self.B.shape[1]}), scale={self.scale:g}"

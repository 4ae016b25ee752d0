"""Low-rank adapters of stacked experts: a pair of matrices for each projection of each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megalight.nn.adapter import tensor_name
from megalight.nn.canonical import joined
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.nn.moe.dispatch import Grouped
from megalight.ops.grouped_linear import grouped_linear, grouped_scale

WIDE_ELEMENTS = 2**26
"""Elements of a stack that are cast to float32 at a time, where lengths of rows are found."""


class StackAdapter(nn.Module):
    """Adds ``scale * (x A_e^T) B_e^T`` to one projection of each expert ``e``. It is in the projection's
    :class:`~megalight.nn.adapter.AdapterSet`.

    The canonical names are those of the expert's weight with ``lora_A.weight``, ``lora_B.weight`` or
    ``lora_magnitude_vector.weight`` in place of ``weight``: ``experts.3.gate.lora_A.weight``.

    Args:
        down: ``A``, ``[E, r, in]``.
        up: ``B``, ``[E, out, r]``.
        scale: ``alpha / r``.
        inner: the dim of the projection's weight ``[out, in]`` that counts the inner width of an expert.

    Attributes:
        magnitude: ``[E, out]``: learned lengths of the rows of each expert's new weight (DoRA,
            https://arxiv.org/abs/2402.09353), or None.
        inner_dims: the dim of each parameter's canonical tensors that counts the inner width; None: no dim does.
    """

    magnitude: nn.Parameter | None

    def __init__(self, down: nn.Parameter, up: nn.Parameter, scale: float, inner: int) -> None:
        super().__init__()
        self.A = down
        self.B = up
        self.register_parameter("magnitude", None)
        self.scale = scale
        rows = 0 if inner == 0 else None
        self.inner_dims: dict[str, int | None] = {"A": None if inner == 0 else 1, "B": rows, "magnitude": rows}
        # the same values as those of a layer that is not stacked
        std = (3 * down.shape[2]) ** -0.5
        self.initializers: dict[str, Initializer] = {"A": Normal(std), "B": ConstantInit(0.0)}

    @property
    def width(self) -> int:
        """``r``."""
        return self.B.shape[2]

    def forward(self, x: Tensor, y: Tensor, weight: Callable[[], Tensor], copies: Grouped, backend: str) -> Tensor:
        """Return ``y`` with what the adapter adds. Rows after those of the last expert get any values.

        Args:
            x: ``[R, in]``, the input of the projection.
            y: ``[R, out]``, its output, without a bias.
            weight: returns its weights ``[E, out, in]``; called only if there are magnitudes.
            copies: the groups of rows.
            backend: backend of the products.
        """
        narrow = grouped_linear(x, self.A, copies.offsets, copies.sizes, backend)
        whole = y + grouped_linear(self.scale * narrow, self.B, copies.offsets, copies.sizes, backend)
        if self.magnitude is None:
            return whole
        return grouped_scale(whole, self.magnitude / self.lengths(weight()), copies.offsets, copies.sizes)

    @torch.no_grad()
    def lengths(self, weight: Tensor) -> Tensor:
        """Return the lengths of the rows of ``W + scale B A``, ``[E, out]``, in float32 or wider.

        They are constants, as in :meth:`megalight.nn.adapter.Adapter.lengths`, which says how they are found.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        # Some experts at a time: a wide copy of a whole stack would be large.
        few = max(1, WIDE_ELEMENTS // weight[0].numel())
        found = []
        for w, a, b in zip(weight.split(few), self.A.split(few), self.B.split(few), strict=True):  # type: ignore[no-untyped-call]
            w, a, b = w.to(wide), a.to(wide), b.to(wide)
            cross = 2 * self.scale * (w @ a.mT) + self.scale**2 * b @ (a @ a.mT)
            found.append(w.square().sum(2) + cross.mul(b).sum(2))
        return self.total(torch.cat(found)).clamp_min(torch.finfo(wide).tiny).sqrt()

    def total(self, squares: Tensor) -> Tensor:
        """Return sums over all input features. On one device they are complete; a parallel adapter overrides this."""
        return squares

    def canonical_parts(self, path: str, local: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield one tensor per expert; see :mod:`megalight.nn.canonical`."""
        # `experts.adapters.gate.NAME`: the expert's index takes the place of "adapters".
        *around, _, projection, adapter = path.split(".")
        stacked: Tensor = getattr(self, local)
        for expert in range(len(stacked)):
            own = "magnitude_vector" if local == "magnitude" else local
            yield tensor_name(joined(*around, str(expert), projection), own, adapter), tuple(stacked.shape[1:])

    def merged(self, stacked: Tensor) -> Tensor:
        """Return ``W + scale B A`` for a stack ``[E, out, in]``, its rows rescaled if there are magnitudes.

        It is computed in float32 or wider, and rounded once.
        """
        wide = torch.promote_types(stacked.dtype, torch.float32)
        whole = stacked.to(wide) + self.scale * (self.B.to(wide) @ self.A.to(wide))
        if self.magnitude is not None:
            whole = whole * (self.magnitude.to(wide) / self.lengths(stacked))[..., None]
        return whole.to(stacked.dtype)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{len(self.A)} x ({self.A.shape[2]} -> {self.width} -> {self.B.shape[1]}), scale={self.scale:g}"

"""Grouped products in 8 bits of all experts at once. The host does not wait for the numbers of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalight.ops import grouped_scaled
from megalight.ops.grouped_linear import apart_trial
from megalight.ops.grouped_linear.apart import Apart
from megalight.ops.grouped_linear.low_precision import StackPrecision
from megalight.ops.grouped_linear.stack_casts import Gradients, StackCasts, lined
from megalight.ops.linear.session import Session
from megalight.ops.quantize import Quantized
from megalight.ops.quantize.recipes import Recipe

LARGE_ONE_SCALE, LARGE = 2e10, 1e11
"""From how many multiplications of an expert in one product on, with one scale per matrix and with others, experts are
faster one by one.

Products of the library run up to 1.35 times as fast as our grouped kernel with one scale per matrix, and 1.1 times with
a scale per row. But each costs launches of its own. Mixtral-8x7B (2e11 and 1e11 per expert) is faster one by one on an
H200, and Qwen3-30B-A3B (2e9) together: ``benchmarks/moe_ops.py --only stack``.
"""

ROWS = 512
"""Rows of an expert in one product that are usual at least: experts that are large with so many want sizes."""


class Together(StackCasts, StackPrecision):
    """Products of a stack ``[E, out, in]``, each with one call; but one by one of large experts.

    It has the arguments of its base class, and

    Args:
        always: never run large experts one by one.
    """

    def __init__(self, recipe: Recipe, session: Session, *, always: bool = False, **options: Any) -> None:
        super().__init__(recipe, session, **options)
        self._least = math.inf if always else LARGE_ONE_SCALE if recipe.one_scale else LARGE
        self._apart = Apart(self)

    def wants_sizes(self, weight: Tensor) -> bool:
        """Return whether experts of this size usually run one by one, and can on this device."""
        return ROWS * weight[0].numel() >= self._least and self._has_apart(weight.device)

    def way(self, weight: Tensor, sizes: Sequence[int] | None) -> StackPrecision:
        """Return the faster way. Without sizes on the host it is this one: the host would have to wait for them."""
        small = sizes is None or sum(sizes) * weight[0].numel() < self._least * self.count
        return self._apart if not small and self._has_apart(weight.device) else self

    def _has_apart(self, device: torch.device) -> bool:
        # Emulated products serve everywhere.
        return self.backend == "reference" or apart_trial.why_not(self.recipe, device) is None

    @staticmethod
    def why_not(weight: Tensor, recipe: Recipe, emulate: bool) -> str | None:
        """Return why a recipe cannot have grouped products on the device of ``weight``, or None."""
        for scheme in (recipe.x, recipe.weight, recipe.gradient):
            if (reason := grouped_scaled.scheme_why_not(scheme)) is not None:
                return reason
        if emulate:
            return None
        pairs = [(recipe.x, recipe.weight), (recipe.gradient, recipe.weight_t), (recipe.gradient_t, recipe.x_t)]
        for a, b in pairs:
            spec = grouped_scaled.Spec(weight.device.type, lined(a), lined(b), weight.dtype)
            if (reason := grouped_scaled.why_not(spec)) is not None:
                return reason
        return None

    def product(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, keep: bool
    ) -> tuple[Tensor, Quantized | None]:
        """Multiply all groups. One pair of casts serves this product and the weight gradient."""
        rows, columns = self.cast_input(x, offsets, rows=True, columns=keep)
        assert rows is not None
        factor = self.cast_weight(weight)[0]
        # Sums with fewer bits do a forward pass no harm. Gradients get sums in full float32.
        y = grouped_scaled.product(rows, factor, offsets, x.dtype, fast=True, backend=self.backend)
        return y, columns

    def input_gradient(self, grads: Gradients, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Multiply all groups."""
        factor = self.cast_weight(weight)[1]
        return grouped_scaled.product(grads.rows, factor, grads.offsets, grads.dtype, backend=self.backend)

    def accumulate(self, out: Tensor, grads: Gradients, x: Tensor | Quantized, write: bool) -> None:  # type: ignore[override]
        """Add ``grad^T x`` of all groups."""
        if isinstance(x, Tensor):
            _, x_t = self.cast_input(x, grads.offsets, rows=False, columns=True)
            assert x_t is not None
            x = x_t
        grouped_scaled.add_weight_gradient(out, grads.columns, x, grads.offsets, write, backend=self.backend)

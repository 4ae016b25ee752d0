"""Grouped products in 8 bits with the library's products, one expert after the other. Casts are of all experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalight.ops.grouped_linear.low_precision import StackPrecision
from megalight.ops.grouped_linear.stack_casts import Gradients, StackCasts
from megalight.ops.quantize import Quantized, Scheme
from megalight.ops.scaled_accumulate.groups import accumulate_groups
from megalight.ops.scaled_mm.groups import Factors, multiply_groups


class Apart(StackPrecision):
    """Multiplies large experts one by one, with codes that were cast all at once.

    Args:
        casts: makes the codes.
    """

    needs_sizes = True

    def __init__(self, casts: StackCasts) -> None:
        self.casts = casts
        self.history = casts.history

    def product(
        self, x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, keep: bool
    ) -> tuple[Tensor, Quantized | None]:
        """Multiply the rows of each expert; rows after the last are unset."""
        assert sizes is not None
        recipe = self.casts.recipe
        rows, columns = self.casts.cast_input(x, offsets, rows=True, columns=keep)
        assert rows is not None
        y = x.new_empty(x.shape[0], weight.shape[1])
        # Sums with fewer bits do a forward pass no harm. Gradients get sums in full float32.
        self._multiply(y, rows, columns, recipe.x, self.casts.factors(weight)[0], offsets, sizes, fast=True)
        return y, columns

    def gradients(self, grad_y: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Gradients:
        """Cast the gradient for both products of the backward pass."""
        return self.casts.gradients(grad_y, offsets, sizes)

    def input_gradient(self, grads: Gradients, weight: Tensor) -> Tensor:
        """Multiply the gradients of each expert; rows after the last are unset."""
        assert grads.sizes is not None
        rows, factors = grads.rows, self.casts.factors(weight)[1]
        grad_x = weight.new_empty(rows.data.shape[0], weight.shape[2], dtype=grads.dtype)
        scheme = self.casts.recipe.gradient
        self._multiply(grad_x, rows, grads.columns, scheme, factors, grads.offsets, grads.sizes, fast=False)
        return grad_x

    def accumulate(self, out: Tensor, grads: Gradients, x: Tensor | Quantized, write: bool) -> None:
        """Add ``grad^T x`` of each expert."""
        assert grads.sizes is not None
        if isinstance(x, Tensor):
            _, x_t = self.casts.cast_input(x, grads.offsets, rows=False, columns=True)
            assert x_t is not None
            x = x_t
        recipe = self.casts.recipe
        schemes = recipe.gradient_t, recipe.x_t
        accumulate_groups(out, grads.columns, x, schemes, grads.sizes, write=write, backend=self.casts.backend)

    def forget(self) -> None:
        """Drop the casts of the weights, because the weights may change or go."""
        self.casts.forget()

    def refresh(self, weight: Tensor) -> None:
        """Cast the weights, once a step, into fixed memory, where recorded graphs read them."""
        self.casts.refresh(weight)

    def release(self) -> None:
        """Free that memory; no graph reads it any more."""
        self.casts.release()

    def _multiply(
        self,
        out: Tensor,
        rows: Quantized,
        columns: Quantized | None,
        scheme: Scheme,
        factors: Factors,
        offsets: Tensor,
        sizes: Sequence[int],
        fast: bool,
    ) -> None:
        """Write the product of each group's rows and its factor; ``columns`` is the transposed cast, or None."""
        scales = None
        if scheme.tile == (0, 0):
            # Both casts of a group have the same scale, and the transposed one has it apart.
            scales = (_one_per_group(rows.scale, offsets) if columns is None else columns.scale)[:, 0].unbind()
        rows = Quantized(rows.data, rows.scale, scheme)
        multiply_groups(out, rows, scales, factors, sizes, fast=fast, backend=self.casts.backend)


def _one_per_group(scales: Tensor, offsets: Tensor) -> Tensor:
    """Return the scale of each group, of scales ``[R, 1]`` equal in a group: ``[E, 4]``, rows of 16 bytes each."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return scales[starts.clamp(max=scales.shape[0] - 1)].repeat(1, 4)

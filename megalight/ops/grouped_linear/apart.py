"""Grouped products in 8 bits with the library's products, one expert after the other. Casts are of all experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalight.ops.grouped_linear.low_precision import StackPrecision
from megalight.ops.grouped_linear.stack_casts import Gradients, StackCasts
from megalight.ops.grouped_scaled import GROUP
from megalight.ops.quantize import Quantized, Scheme
from megalight.ops.scaled_accumulate import scaled_accumulate
from megalight.ops.scaled_mm import multiply_into, scaled_mm


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
        y = x.new_empty(len(x), weight.shape[1])
        # Sums with fewer bits do a forward pass no harm. Gradients get sums in full float32.
        factor = self.casts.cast_weight(weight)[0]
        self._multiply(y, rows, recipe.x, factor, recipe.weight, offsets, sizes, fast=True)
        return y, columns

    def gradients(self, grad_y: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Gradients:
        """Cast the gradient for both products of the backward pass."""
        return self.casts.gradients(grad_y, offsets, sizes)

    def input_gradient(self, grads: Gradients, weight: Tensor) -> Tensor:
        """Multiply the gradients of each expert; rows after the last are unset."""
        assert grads.sizes is not None
        recipe, factor = self.casts.recipe, self.casts.cast_weight(weight)[1]
        grad_x = weight.new_empty(len(grads.rows.data), weight.shape[2], dtype=grads.dtype)
        rows, offsets, sizes = grads.rows, grads.offsets, grads.sizes
        self._multiply(grad_x, rows, recipe.gradient, factor, recipe.weight_t, offsets, sizes, fast=False)
        return grad_x

    def accumulate(self, out: Tensor, grads: Gradients, x: Tensor | Quantized, write: bool) -> None:
        """Add ``grad^T x`` of each expert."""
        assert grads.sizes is not None
        if isinstance(x, Tensor):
            _, x_t = self.casts.cast_input(x, grads.offsets, rows=False, columns=True)
            assert x_t is not None
            x = x_t
        recipe, start = self.casts.recipe, 0
        for expert, size in enumerate(grads.sizes):
            if size:
                # Tensor cores contract multiples of 16 tokens. The codes after the last token are zeros.
                tokens = slice(start, start + -(-size // 16) * 16)
                left, right = (
                    Quantized(codes.data[:, tokens], _own(codes.scale[expert].unsqueeze(1), scheme), scheme)
                    for codes, scheme in ((grads.columns, recipe.gradient_t), (x, recipe.x_t))
                )
                scaled_accumulate(out[expert], left, right, write=write, backend=self.casts.backend)
            elif write:
                out[expert].zero_()  # the memory holds anything when a step begins
            start += -(-size // GROUP) * GROUP

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
        row_scheme: Scheme,
        factor: Quantized,
        scheme: Scheme,
        offsets: Tensor,
        sizes: Sequence[int],
        fast: bool,
    ) -> None:
        """Write the product of each group's rows and its matrix, of those one below the other in ``factor``."""
        backend, width, filled = self.casts.backend, out.shape[1], list(_filled(sizes))
        if not filled:
            return
        one = _one_per_group(rows.scale, offsets) if row_scheme.tile == (0, 0) else None
        for expert, part in filled:
            # A copy: groups begin anywhere, and products need scales at multiples of 16 bytes.
            scale = rows.scale[part].clone() if one is None else one[expert, :1, None]
            a = Quantized(rows.data[part], scale, row_scheme)
            matrix = slice(expert * width, (expert + 1) * width)
            b = Quantized(factor.data[matrix], _own(factor.scale[matrix], scheme), scheme)
            if not multiply_into(out[part], a, b, fast=fast, backend=backend):
                out[part] = scaled_mm(a, b, out.dtype, fast=fast, backend=backend)


def _filled(sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and where they are."""
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            yield expert, slice(start, start + size)
        start += size


def _one_per_group(scales: Tensor, offsets: Tensor) -> Tensor:
    """Return the scale of each group, of scales ``[R, 1]`` equal in a group: ``[E, 4]``, rows of 16 bytes each."""
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    return scales[starts.clamp(max=len(scales) - 1)].repeat(1, 4)


def _own(scales: Tensor, scheme: Scheme) -> Tensor:
    """Return scales ``[r, 1]`` of rows, or ``[1, 1]`` if the scheme has one for the matrix: all are equal then."""
    return scales[:1] if scheme.tile == (0, 0) else scales

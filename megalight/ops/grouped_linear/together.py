"""Grouped products in 8 bits of all experts at once. The host does not wait for the numbers of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops import grouped_scaled
from megalight.ops.grouped_linear.low_precision import OneByOne, StackPrecision
from megalight.ops.grouped_scaled import LINE
from megalight.ops.linear.low_precision import LowPrecision, Reduce, Session
from megalight.ops.quantize import Quantized, Scheme, cast
from megalight.ops.quantize.history import GRADIENT, INPUT, STEPS, WEIGHT, AmaxHistory
from megalight.ops.quantize.recipes import Recipe

LARGE_ONE_SCALE, LARGE = 2e10, 1e11
"""From how many multiplications of an expert in one product on, with one scale per matrix and with others, experts are
faster one by one.

Products of the library run up to 1.35 times as fast as our grouped kernel with one scale per matrix, and 1.1 times with
a scale per row. But each expert costs its own casts and launches: 35 to 65 us in the three products of a stack. These
are the break-even points on an H200, from Mixtral-8x7B (2e11 and 1e11 per expert, faster one by one) and Qwen3-30B-A3B
(2e9, three times as slow): ``benchmarks/moe_ops.py --only stack``.
"""

ROWS = 512
"""Rows of an expert in one product that are usual at least: experts that are large with so many want sizes."""


class Gradients(NamedTuple):
    """Both casts of a gradient, and the ends of its groups."""

    rows: Quantized
    columns: Quantized
    offsets: Tensor
    dtype: torch.dtype


class Together(LowPrecision, StackPrecision):
    """Products of a stack ``[E, out, in]``, each with one call; but one by one of large experts.

    A step with groups of very different sizes may use both ways, and then holds the codes of both until its end. It has
    the arguments of its base class, and

    Args:
        count: ``E``.
        always: never run large experts one by one.
    """

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        *,
        count: int,
        history: int = STEPS,
        always: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(recipe, session, history=AmaxHistory(history, count), **options)
        self.count = count
        self._least = math.inf if always else LARGE_ONE_SCALE if recipe.one_scale else LARGE
        self._options = options
        self._one_by_one: OneByOne | None = None
        self._served = False

    def wants_sizes(self, weight: Tensor) -> bool:
        """Return whether experts of this size usually run one by one."""
        return ROWS * weight[0].numel() >= self._least

    def way(self, weight: Tensor, sizes: Sequence[int] | None) -> StackPrecision:
        """Return the faster way. Without sizes on the host it is this one: the host would have to wait for them."""
        if sizes is None or sum(sizes) * weight[0].numel() < self._least * self.count:
            self._served = True
            return self
        if self._one_by_one is None:
            histories: Sequence[int | AmaxHistory] = [STEPS] * self.count
            if self.history is not None:
                # Parts of this stack's history: both ways scale alike, and a step may change from one to the other.
                self.history.place(weight.device)
                histories = self.history.weights
            self._one_by_one = OneByOne(
                [LowPrecision(self.recipe, self.session, history=part, **self._options) for part in histories],
                self.history,
            )
        return self._one_by_one

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
            spec = grouped_scaled.Spec(weight.device.type, _lined(a), _lined(b), weight.dtype)
            if (reason := grouped_scaled.why_not(spec)) is not None:
                return reason
        return None

    def product(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, keep: bool
    ) -> tuple[Tensor, Quantized | None]:
        """Multiply all groups. One pair of casts serves this product and the weight gradient."""
        recipe = self.recipe
        rows, columns = self._cast_groups(x, INPUT, recipe.x, recipe.x_t if keep else None, offsets, self.reduce_in)
        assert rows is not None
        factor = self._cast_weight(weight)[0]
        # Sums with fewer bits do a forward pass no harm. Gradients get sums in full float32.
        y = grouped_scaled.product(rows, factor, offsets, x.dtype, fast=True, backend=self.backend)
        return y, columns

    def gradients(self, grad_y: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Gradients:
        """Cast the gradient for both products of the backward pass."""
        recipe = self.recipe
        rows, columns = self._cast_groups(
            grad_y, GRADIENT, recipe.gradient, recipe.gradient_t, offsets, self.reduce_out
        )
        assert rows is not None and columns is not None
        return Gradients(rows, columns, offsets, grad_y.dtype)

    def input_gradient(self, grads: Gradients, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Multiply all groups."""
        factor = self._cast_weight(weight)[1]
        return grouped_scaled.product(grads.rows, factor, grads.offsets, grads.dtype, backend=self.backend)

    def accumulate(self, out: Tensor, grads: Gradients, x: Tensor | Quantized, write: bool) -> None:  # type: ignore[override]
        """Add ``grad^T x`` of all groups."""
        if isinstance(x, Tensor):
            _, x_t = self._cast_groups(x, INPUT, None, self.recipe.x_t, grads.offsets, self.reduce_in)
            assert x_t is not None
            x = x_t
        grouped_scaled.add_weight_gradient(out, grads.columns, x, grads.offsets, write, backend=self.backend)

    def refresh(self, weight: Tensor) -> None:
        """Cast the weights for the ways that have served: a graph is recorded after passes like it."""
        if self._one_by_one is not None:
            self._one_by_one.refresh(weight)
        if self._served or self._one_by_one is None:
            super().refresh(weight)

    def release(self) -> None:
        """Free the codes of both ways."""
        super().release()
        if self._one_by_one is not None:
            self._one_by_one.release()

    def _cast_groups(
        self,
        x: Tensor,
        role: int,
        rows: Scheme | None,
        columns: Scheme | None,
        offsets: Tensor,
        reduce: Reduce | None,
    ) -> tuple[Quantized | None, Quantized | None]:
        """Cast ``x [R, f]`` for a product that contracts features, and its transposed groups for one of tokens."""
        by_row = by_column = None
        scheme = rows or columns
        assert scheme is not None
        if self.recipe.one_scale:
            expert = torch.searchsorted(offsets, torch.arange(len(x), dtype=offsets.dtype, device=x.device), right=True)
            # Rows after the last group count for an expert more, whose magnitude is dropped.
            found = x.new_zeros(self.count + 1, dtype=torch.float32).scatter_reduce_(0, expert, _largest(x, 1), "amax")
            amax = self._allowed(found[:-1], role, reduce)
            by_row = amax[expert.clamp(max=self.count - 1)].unsqueeze(1)
            by_column = amax.unsqueeze(1).expand(-1, x.shape[1])
        elif rows is not None:
            by_row = self._amax(x, rows, role, reduce)
        return (
            None if rows is None else cast(x, _lined(rows), None, amax=by_row)[0],
            None if columns is None else grouped_scaled.columns_of_groups(x, _lined(columns), offsets, by_column),
        )

    def _cast_both(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        recipe, flat = self.recipe, weight.flatten(0, 1)
        if recipe.one_scale:
            amax = self._allowed(_largest(weight.flatten(1), 1), WEIGHT, self.reduce_weight).unsqueeze(1)
            by_row = amax.expand(-1, weight.shape[1]).reshape(-1, 1)
            by_column: Tensor | None = amax.expand(-1, weight.shape[2])
        else:
            by_row, by_column = self._amax(flat, recipe.weight, WEIGHT, self.reduce_in), None  # type: ignore[assignment]
            if self.reduce_out is not None:
                # The output features of other ranks are the other part of what the transpose's scales cover.
                by_column = _largest(weight, 1)
                self.reduce_out(by_column)
        rows, _ = cast(flat, _lined(recipe.weight), None, amax=by_row)
        assert rows is not None
        return rows, grouped_scaled.columns_of_stack(weight, _lined(recipe.weight_t), by_column)

    def _allowed(self, amax: Tensor, role: int, reduce: Reduce | None) -> Tensor:
        """Return the magnitudes ``[E]`` that the scales cover, of this step's magnitudes or of past ones."""
        if reduce is not None:
            reduce(amax)
        if self.history is not None:
            # An expert without a token in all past steps takes its values of now.
            amax = self.history.allow(role, amax, record=self.session.inside)
        return amax * 2.0**self.margin if self.margin else amax


def _lined(scheme: Scheme) -> Scheme:
    """Return the scheme with a scale per row: one scale per matrix is that of each of its rows."""
    return replace(scheme, tile=LINE)


def _largest(x: Tensor, dim: int) -> Tensor:
    """Return the largest magnitudes along ``dim``, float32, in one pass."""
    if not x.shape[dim]:
        return x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]), dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dim, dtype=wide)
    return found.float()

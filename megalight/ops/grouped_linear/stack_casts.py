"""Quantization of expert stacks: all experts at once, forward and backward, without a host synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.ops import grouped_scaled
from megalight.ops.grouped_scaled import LINE
from megalight.ops.linear.low_precision import LowPrecision, Reduce, Session
from megalight.ops.quantize import Quantized, Scheme, cast
from megalight.ops.quantize.amax_history import GRADIENT, INPUT, STEPS, WEIGHT, AmaxHistory
from megalight.ops.quantize.recipes import QuantizationRecipe
from megalight.ops.scaled_mm import Factors

# The expert of each row of grouped rows. All casts of a layer ask for it, and get it from the first one.


class ExpertsOfRows(NamedTuple):
    """The expert of each row.

    Attributes:
        counted: ``[R]``; rows after the last group have an expert more, ``E``.
        known: ``[R]``; those have the last expert.
        version: version of the offsets.
    """

    counted: Tensor
    known: Tensor
    version: int


def experts_of_rows(offsets: Tensor, rows: int) -> ExpertsOfRows:
    """Return the expert of each of so many rows; ``offsets [E]`` is the end of each group.

    It is kept on the offsets, until these are written.
    """
    # A recorded pass computes its own: what was computed before would never change again.
    recorded = offsets.is_cuda and torch.cuda.is_current_stream_capturing()
    keeps = not (recorded or offsets.is_inference())
    found: ExpertsOfRows | None = getattr(offsets, "megalight_rows", None) if keeps else None
    if found is not None and found.version == offsets._version and found.known.shape[0] == rows:
        return found
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    counted = torch.searchsorted(offsets, row, right=True)
    known = counted.clamp(max=offsets.shape[0] - 1)
    found = ExpertsOfRows(counted, known, offsets._version if keeps else -1)
    if keeps:
        offsets.megalight_rows = found  # type: ignore[attr-defined]
    return found


class Gradients(NamedTuple):
    """Both casts of a gradient, and the ends of its groups; their sizes if the host knows them."""

    rows: Quantized
    columns: Quantized
    offsets: Tensor
    sizes: Sequence[int] | None
    dtype: torch.dtype


class StackCasts(LowPrecision):
    """Casts of a stack ``[E, out, in]`` and of the rows of its experts. All codes have a scale per row of a group.

    It has the arguments of its base class, and

    Args:
        count: ``E``.

    Attributes:
        lined: the recipe with a scale per row in all schemes.
    """

    def __init__(
        self, recipe: QuantizationRecipe, session: Session, *, count: int, history: int = STEPS, **options: Any
    ) -> None:
        super().__init__(recipe, session, history=AmaxHistory(history, count), **options)
        self.count = count
        self.lined = recipe.with_schemes(lined)
        self._views: tuple[Quantized, Factors, Factors] | None = None

    def cast_input(
        self, x: Tensor, offsets: Tensor, rows: bool, columns: bool
    ) -> tuple[Quantized | None, Quantized | None]:
        """Cast an input ``[R, in]`` for the product, and transposed for the weight gradient."""
        recipe = self.lined
        return self._cast_groups(
            x, INPUT, recipe.x if rows else None, recipe.x_t if columns else None, offsets, self.reduce_in
        )

    def gradients(self, grad_y: Tensor, offsets: Tensor, sizes: Sequence[int] | None) -> Gradients:
        """Cast the gradient ``[R, out]`` for both products of the backward pass."""
        recipe = self.lined
        rows, columns = self._cast_groups(
            grad_y, GRADIENT, recipe.gradient, recipe.gradient_t, offsets, self.reduce_out
        )
        assert rows is not None and columns is not None
        return Gradients(rows, columns, offsets, sizes, grad_y.dtype)

    def cast_weight(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """Return the casts for the forward pass, ``[E * out, in]``, and for the input gradient, ``[E * in, out]``."""
        return self._cast_weight(weight)

    def factors(self, weight: Tensor) -> tuple[Factors, Factors]:
        """Return both casts of :meth:`cast_weight` with the matrices apart. The views last as long as the casts."""
        rows, columns = self._cast_weight(weight)
        if self._views is None or self._views[0] is not rows:
            recipe = self.recipe
            straight = Factors.of(rows, self.count, recipe.weight)
            self._views = rows, straight, Factors.of(columns, self.count, recipe.weight_t)
        return self._views[1:]

    def forget(self) -> None:
        """Drop the casts of the weights, and the views of them."""
        super().forget()
        self._views = None

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
        if self.one_scale:
            rows_of = experts_of_rows(offsets, x.shape[0])
            # Rows after the last group count for an expert more, whose magnitude is dropped.
            found = x.new_zeros(self.count + 1, dtype=torch.float32)
            found.scatter_reduce_(0, rows_of.counted, _largest(x, 1), "amax")
            amax = self._allowed(found[: self.count], role, reduce)
            by_row = amax.index_select(0, rows_of.known).unsqueeze(1)
            by_column = amax.unsqueeze(1).expand(-1, x.shape[1])
        elif rows is not None:
            by_row = self._amax(x, rows, role, reduce)
        return (
            None if rows is None else cast(x, rows, None, amax=by_row)[0],
            None if columns is None else grouped_scaled.columns_of_groups(x, columns, offsets, by_column),
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
        rows, _ = cast(flat, self.lined.weight, None, amax=by_row)
        assert rows is not None
        return rows, grouped_scaled.columns_of_stack(weight, self.lined.weight_t, by_column)

    def _allowed(self, amax: Tensor, role: int, reduce: Reduce | None) -> Tensor:
        """Return the magnitudes ``[E]`` that the scales cover, of this step's magnitudes or of past ones."""
        if reduce is not None:
            reduce(amax)
        if self.history is not None:
            # An expert without a token in all past steps takes its values of now.
            amax = self.history.allow(role, amax, record=self.session.inside)
        return amax * 2.0**self.margin if self.margin else amax


def lined(scheme: Scheme) -> Scheme:
    """Return the scheme with a scale per row: one scale per matrix is that of each of its rows."""
    return scheme._replace(tile=LINE)


def _largest(x: Tensor, dim: int) -> Tensor:
    """Return the largest magnitudes along ``dim``, float32, in one pass."""
    if not x.shape[dim]:
        return x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]), dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dim, dtype=wide)
    return found.float()

"""Grouped GEMMs in 8 bits whose casts are of all experts of a stack at once.

``Apart`` multiplies one expert after another with the library's products. ``Together`` multiplies all experts at once,
and the host does not wait for the numbers of their rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalight.errors import BackendError
from megalight.ops import grouped_scaled
from megalight.ops.grouped_linear.low_precision import StackPrecision
from megalight.ops.grouped_scaled import LINE
from megalight.ops.linear.low_precision import LowPrecision, Reduce, Session
from megalight.ops.quantize import Quantized, Scheme, cast
from megalight.ops.quantize.amax_history import GRADIENT, INPUT, STEPS, WEIGHT, AmaxHistory
from megalight.ops.quantize.recipes import QuantizationRecipe
from megalight.ops.scaled_accumulate import accumulate_groups
from megalight.ops.scaled_mm import Factors, multiply_groups


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
    """Casts of a stack ``[E, out, in]`` and of the rows of its experts. All have a scale per row of a group.

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

    def factors(self, weight: Tensor) -> tuple[Factors, Factors]:
        """Return views of both casts with the matrices apart: for the forward pass, and for the input gradient."""
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


class Apart(StackPrecision):
    """Multiplies large experts one by one, with quantized values that were cast all at once.

    Args:
        casts: makes the quantized values.
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


_log = logging.getLogger(__name__)

SIZES, IN, OUT = (5, 21, 40), 128, 96
"""Groups that begin at rows whose scales lie at no multiple of 16 bytes, and whose tokens are no multiples of 16."""


@lru_cache
def one_by_one_why_not(recipe: QuantizationRecipe, device: torch.device) -> str | None:
    """Multiply three small experts in all three ways; return and log why this fails or goes wrong here, or None."""
    if (reason := _tried(recipe, device)) is not None:
        _log.warning("recipe %s: large experts run in one product, which is slower: %s", recipe.name, reason)
    return reason


def _tried(recipe: QuantizationRecipe, device: torch.device) -> str | None:
    expected = products(recipe, device, emulate=True)
    try:
        found = products(recipe, device, emulate=False)
    except (BackendError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"this torch refuses it here: {str(error).splitlines()[0]}"
    wrong = max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))
    # Loose: results are rounded to bfloat16, and sums may be short.
    return None if wrong < 2e-2 else f"this torch gives wrong products here (relative error {wrong:.1e})"


def products(recipe: QuantizationRecipe, device: torch.device, emulate: bool) -> list[Tensor]:
    """Return outputs, input gradients and weight gradients, added to ones, in float32."""
    draws = torch.Generator().manual_seed(0)  # its own: a trial must not move the random stream of the run
    weight, x, grad = (
        torch.randn(shape, generator=draws).to(device, torch.bfloat16)
        for shape in ((len(SIZES), OUT, IN), (sum(SIZES), IN), (sum(SIZES), OUT))
    )
    apart = Apart(StackCasts(recipe, Session(), count=len(SIZES), emulate=emulate))
    offsets = torch.tensor(SIZES).cumsum(0).to(device, torch.int32)
    y, x_t = apart.product(x, weight, offsets, SIZES, keep=True)
    assert x_t is not None
    grads = apart.gradients(grad, offsets, SIZES)
    out = torch.ones(weight.shape, device=device)
    apart.accumulate(out, grads, x_t, write=False)
    return [y.float(), apart.input_gradient(grads, weight).float(), out]


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

    def __init__(self, recipe: QuantizationRecipe, session: Session, *, always: bool = False, **options: Any) -> None:
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
        return self.backend == "reference" or one_by_one_why_not(self.recipe, device) is None

    @staticmethod
    def why_not(weight: Tensor, recipe: QuantizationRecipe, emulate: bool) -> str | None:
        """Return why a recipe cannot have grouped GEMMs on the device of ``weight``, or None."""
        for scheme in (recipe.x, recipe.weight, recipe.gradient):
            if (reason := grouped_scaled.scheme_why_not(scheme)) is not None:
                return reason
        if emulate:
            return None
        pairs = [(recipe.x, recipe.weight), (recipe.gradient, recipe.weight_t), (recipe.gradient_t, recipe.x_t)]
        for a, b in pairs:
            spec = grouped_scaled.GroupedScaledSpec(weight.device.type, lined(a), lined(b), weight.dtype)
            if (reason := grouped_scaled.why_not(spec)) is not None:
                return reason
        return None

    def product(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, offsets: Tensor, sizes: Sequence[int] | None, keep: bool
    ) -> tuple[Tensor, Quantized | None]:
        """Multiply all groups. One pair of casts serves this product and the weight gradient."""
        rows, columns = self.cast_input(x, offsets, rows=True, columns=keep)
        assert rows is not None
        factor = self._cast_weight(weight)[0]
        # Sums with fewer bits do a forward pass no harm. Gradients get sums in full float32.
        y = grouped_scaled.product(rows, factor, offsets, x.dtype, fast=True, backend=self.backend)
        return y, columns

    def input_gradient(self, grads: Gradients, weight: Tensor) -> Tensor:  # type: ignore[override]
        """Multiply all groups."""
        factor = self._cast_weight(weight)[1]
        return grouped_scaled.product(grads.rows, factor, grads.offsets, grads.dtype, backend=self.backend)

    def accumulate(self, out: Tensor, grads: Gradients, x: Tensor | Quantized, write: bool) -> None:  # type: ignore[override]
        """Add ``grad^T x`` of all groups."""
        if isinstance(x, Tensor):
            _, x_t = self.cast_input(x, grads.offsets, rows=False, columns=True)
            assert x_t is not None
            x = x_t
        grouped_scaled.add_weight_gradient(out, grads.columns, x, grads.offsets, write, backend=self.backend)

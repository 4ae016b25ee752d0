"""Linear layers with GEMMs in 8 or 4 bits.

A weight uses it if its state (:mod:`megalight.ops.parameter`) has a :class:`LowPrecision`. The forward product, input
gradient and weight gradient then use its methods; everything else about the layer stays the same. Tensors between
layers and main gradients keep their dtypes. If an input has no recipe, its cast is saved for the backward.

GEMMs in 8 bits take multiples of 16 (microscaling: 32). Where a side of a weight is none, as the 3,420 features in
the tower of Qwen2.5-VL, the quantized values of weight, inputs and gradients get zeros up to the next multiple. Zeros
add nothing to a sum, and what is computed of them is cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import BackendError, ConfigurationError
from megalight.ops.autograd import Casts, Saveable, annotate, elided_output_of, without_values
from megalight.ops.linear.aligned import cut, filled
from megalight.ops.parameter import ParameterState, WeightCast, put
from megalight.ops.quantize import Cast, Quantized, Scheme, cast, tile_amax, transpose
from megalight.ops.quantize.amax_history import (
    GRADIENT,
    INPUT,
    STEPS,
    WEIGHT,
    AmaxHistory,
    known_amax,
    magnitudes_of,
    rows_of,
)
from megalight.ops.quantize.formats import DTYPES, LARGEST, Format
from megalight.ops.quantize.recipes import QuantizationRecipe
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, scaled_accumulate
from megalight.ops.scaled_mm import SCALED_MM, ScaledMatmulSpec, scaled_mm
from megalight.registry import Registry

Reduce = Callable[[Tensor], None]
"""All-reduces the maximum over some ranks, in place."""


class Session:
    """State that all low-precision layers of a model share.

    Args:
        seed: seed of stochastic rounding.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.layers: list[LowPrecision] = []
        self.inside = False
        self.generators: dict[torch.device, torch.Generator] = {}
        self._number = 0

    def begin(self, number: int) -> None:
        """Begin optimizer step ``number``, which seeds stochastic rounding, so that a resumed run draws the same."""
        self._number = number
        for generator in self.generators.values():
            self._seed(generator)

    @contextmanager
    def step(self, number: int | None = None, last: bool = True) -> Iterator[None]:
        """Run micro-batches between two updates of the weights inside; each weight is cast only once there.

        Args:
            number: if given, :meth:`begin` this step.
            last: whether the update follows. If not, the histories of past steps wait: scales stay the same from one
                update to the next.
        """
        if number is not None:
            self.begin(number)
        with self._casting():
            yield
        if last:
            self._roll()

    @contextmanager
    def _casting(self) -> Iterator[None]:
        """Let layers keep casts of their weights. At the end none may stay: the weights are about to change."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            for layer in self.layers:
                layer.forget()

    def _roll(self) -> None:
        """End an optimizer step in the histories of all layers."""
        self._record_stored()
        # Ranks of one group have the same layers in the same order, so one all-reduce serves all layers of a group.
        groups: dict[Reduce | None, dict[AmaxHistory, None]] = {}
        for layer in self.layers:
            if layer.history is not None:
                groups.setdefault(layer.reduce_history, {})[layer.history.stack] = None
        for reduce, histories in groups.items():
            AmaxHistory.roll(list(histories), reduce)

    def _record_stored(self) -> None:
        """Record the magnitudes of weights that were cast before the step, if it has multiplied with them."""
        kept, seen = [], []
        for layer in self.layers:
            if layer.met and layer.largest is not None and layer.history is not None:
                assert layer.history.current is not None
                kept.append(layer.history.current[WEIGHT])
                seen.append(layer.largest)
            layer.met = False
        if kept:
            torch._foreach_maximum_(kept, seen)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Like :meth:`step`, but for trial passes: histories are restored afterwards."""
        histories = {layer.history.stack: None for layer in self.layers if layer.history is not None}
        # Restored by copy, not by replacing the tensor: recorded graphs hold its address.
        kept = [(history.current, history.current.clone()) for history in histories if history.current is not None]
        try:
            with self._casting():
                yield
        finally:
            for layer in self.layers:
                layer.met = False
            for current, before in kept:
                current.copy_(before)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of stochastic rounding: one object for all steps, as a graph may have captured it."""
        if device not in self.generators:
            self.generators[device] = self._seed(torch.Generator(device))
        return self.generators[device]

    def _seed(self, generator: torch.Generator) -> torch.Generator:
        # The seed depends on the step alone: a resumed run rounds as the run without a stop would have.
        return generator.manual_seed(self.seed * 1_000_003 + self._number)


class LowPrecision(WeightCast):
    """Products of one weight ``[out, in]`` in low precision; the weight's state refers to it.

    Args:
        recipe: how matrices are cast.
        session: shared by all layers of the model.
        emulate: compute products in float64 from the decoded values.
        margin: scales leave room for values ``2 ** margin`` times as large; for recipes with one scale per matrix.
        history: number of past steps that a delayed scale uses; or the history itself, of one expert of a stack.
        reduce_amax: two functions that reduce over the ranks with the other input features, and with the other output
            features. They are used for scales that span these. None: each rank scales its own part.
        reduce_history: reduces magnitudes of past steps, once a step, over the ranks that hold the weight or a part of
            it. Layers with the same function share a call. None: one rank.
        primary: the weight is quantized; the code that does so must scale them to :attr:`covers`, and set
            :attr:`scale`, and :attr:`largest` if there is a history. None: it may be, where that changes no value.

    Attributes:
        scale: scale ``[1, 1]`` of a weight that is quantized.
        largest: its largest magnitude, 0-dim, or that of the part that this rank casts.
        met: whether a step has multiplied with such a weight since the last update.
        wants_magnitudes: whether casts by current values use magnitudes that the maker of a tensor has recorded.
        reads_quantized: whether products can read weights that are quantized.
        takes_any_size: whether weights may have sides that are no multiples of what products take.
        multiple: what products take.

    Raises:
        ConfigurationError: the recipe needs different quantized values for a weight and for its transpose.
    """

    wants_magnitudes = True
    reads_quantized = True
    takes_any_size = True

    def __init__(
        self,
        recipe: QuantizationRecipe,
        session: Session,
        *,
        emulate: bool = False,
        margin: int = 0,
        history: int | AmaxHistory = STEPS,
        reduce_amax: tuple[Reduce | None, Reduce | None] = (None, None),
        reduce_history: Reduce | None = None,
        primary: bool | None = False,
    ) -> None:
        self.recipe = recipe
        self.one_scale = recipe.one_scale
        self.multiple = recipe.multiple
        self.session = session
        self.backend = "reference" if emulate else "auto"
        self.margin = margin
        self.reduce_in, self.reduce_out = reduce_amax
        self.reduce_history = reduce_history
        self.history: AmaxHistory | None = None
        if recipe.delayed:
            if isinstance(history, int):
                # All zero so far: a scale of 1, with which values up to the largest code are represented.
                x, weight, gradient = (LARGEST[s.format] for s in (recipe.x, recipe.weight, recipe.gradient))
                history = AmaxHistory(history, otherwise=(x, weight, gradient), factor=2.0**margin)
            self.history = history
        if primary and not recipe.one_scale:
            raise ConfigurationError(
                f"primary_weights: recipe {recipe.name!r} casts a weight and its transpose with different scales, so "
                "that one quantized weight cannot be kept; choose 'tensorwise' or 'delayed', or leave "
                "primary_weights out."
            )
        self.primary = primary
        self.scale: Tensor | None = None
        self.largest: Tensor | None = None
        self.met = False
        self._weight: tuple[Quantized, Quantized] | None = None
        self._kept: tuple[Quantized, Quantized] | None = None
        session.layers.append(self)

    def storage_format(self, spared: bool) -> Format | None:
        """Return the format of the quantized weight, if it is kept instead of the weight, or may be and ``spared``."""
        wanted = spared if self.primary is None else self.primary
        return self.recipe.weight.format if wanted else None

    @property
    def reads_elided(self) -> bool:
        """Whether it casts elided outputs (:mod:`megalight.ops.autograd`), as their scales are known beforehand."""
        return self.history is not None and self.history.suffices

    def fills(self, weight: Tensor) -> bool:
        """Return whether a side of the weight is no multiple of what products take, so that casts add zeros to it."""
        return bool((weight.shape[0] | weight.shape[1]) % self.multiple)

    @property
    def covers(self) -> Tensor | None:
        """The magnitude that the weight's scale must cover, 0-dim, if past steps set it; None: its values now do."""
        return self.history.covers[WEIGHT] if self.history is not None and self.history.suffices else None

    @property
    def reduce_weight(self) -> Reduce | None:
        """The reduction over the ranks that hold the rest of a weight with one scale."""
        return self.reduce_in or self.reduce_out

    @staticmethod
    def check_products(weight: Tensor, recipe: QuantizationRecipe) -> None:
        """Check that the weight's device supports all three products.

        Raises:
            BackendError: it does not; the message gives the reason of each backend.
        """
        # Weight gradients are asked for in float32: the dtype of main gradients, to which they are added.
        wide = torch.promote_types(weight.dtype, torch.float32)
        for a, b, dtype in (
            (recipe.x, recipe.weight, weight.dtype),
            (recipe.gradient, recipe.weight_t, weight.dtype),
            (recipe.gradient_t, recipe.x_t, wide),
        ):
            spec = ScaledMatmulSpec(weight.device.type, a, b, dtype)
            if SCALED_MM.select(spec).name == "reference":
                rows = SCALED_MM.table(spec)
                reasons = "; ".join(f"{backend.name}: {reason}" for backend, reason in rows if reason is not None)
                raise BackendError(
                    f"recipe {recipe.name!r} has no products here ({reasons}). Choose another recipe, or emulate=True, "
                    "which is exact and slow."
                )
        SCALED_ACCUMULATE.select(
            ScaledMatmulSpec(weight.device.type, recipe.gradient_t, recipe.x_t, wide)
        )  # raises now, not later

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., in] -> x W^T + b [..., out]``, in the dtype of ``x``."""
        rows = self._cast_input(x, None)[0]
        assert rows is not None
        return _shaped(self.multiply(rows, weight, bias, x.dtype), x)

    def product_and_cast(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saveable]:
        """Return the product, and a cast of half the size for :meth:`weight_gradient` to use instead of ``x``."""
        rows, x_t = self._cast_input(x, self.recipe.x_t)
        assert rows is not None and x_t is not None
        return _shaped(self.multiply(rows, weight, bias, x.dtype), x), x_t

    def multiply(self, rows: Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``x W^T + b [T, out]`` for an input that is already cast.

        With a bias, rows of the result may have gaps between them where features are filled up: a copy without them
        would take half as long as the product, and what follows reads rows.
        """
        quantized = self._held(weight) or self._cast_weight(weight)[0]
        # Sums with fewer bits do a forward pass no harm. Gradients get sums in full float32.
        features, more = weight.shape[0], quantized.data.shape[0] - weight.shape[0]
        if bias is None:
            y = scaled_mm(rows, quantized, dtype, fast=True, backend=self.backend)
            # Here and below in place: every layer comes here several times.
            return cut(y, features) if more else y
        added = bias.detach().to(dtype)
        if more:
            added = F.pad(added, (0, more))
        y = scaled_mm(rows, quantized, dtype, bias=added, fast=True, backend=self.backend)
        return y[:, :features] if more else y

    @property
    def casts_shards(self) -> bool:
        """Whether ranks can cast their shares of the tokens separately, and get parts of the whole input's cast."""
        return self.recipe.one_scale

    def cast_share(self, x: Tensor, role: int, reduce: Reduce) -> Quantized:
        """Cast a share ``x [..., f]`` of the tokens of a matrix with the scale of all tokens: quantized ``[T, f]``.

        Args:
            role: :data:`INPUT` or :data:`GRADIENT`.
            reduce: over the ranks with the other tokens. Their histories agree between steps.
        """
        flat, scheme = rows_of(x), self.recipe.x if role == INPUT else self.recipe.gradient
        if (found := self._cast_by_history(flat, role, scheme, None)) is not None:
            rows, _ = found
        else:
            rows, _ = cast(flat, scheme, None, amax=self._amax(flat, scheme, role, reduce), fill=self.multiple)
        assert rows is not None
        return rows

    def for_weight_gradient(self, rows: Quantized) -> Quantized:
        """Return a factor of the weight gradient, from a whole quantized input or output gradient ``[T, f]``."""
        # Tensor cores contract multiples of 16 tokens. Zeros add nothing; uint8, because 8-bit floats have no padding
        # kernel.
        x_t, missing = transpose(rows), -len(rows.data) % rows.scheme.multiple
        if not missing:
            return x_t
        return replace(x_t, data=F.pad(x_t.data.view(torch.uint8), (0, missing)).view(x_t.data.dtype))

    def whole_gradient(self, rows: Quantized, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an output gradient that is there only quantized, for :meth:`input_gradient` and the others.

        Args:
            rows: quantized values ``[T, out]`` of all its tokens.
            shape: ``[..., out]``.
            like: has its dtype and device.
        """
        grad_y = without_values(shape, like)
        annotate(grad_y).casts = Casts(self, rows, self.for_weight_gradient(rows))
        return grad_y

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """``grad_y [..., out] -> grad_y W [..., in]``, in the dtype of ``grad_y``; with gaps as :meth:`multiply`."""
        rows, _ = self._cast_gradient(grad_y)
        grad_x = scaled_mm(rows, self._cast_weight(weight)[1], grad_y.dtype, backend=self.backend)
        return _shaped(grad_x if grad_x.shape[1] == weight.shape[1] else grad_x[:, : weight.shape[1]], grad_y)

    def weight_gradient(self, grad_y: Tensor, x: Tensor | Quantized, like: Tensor) -> Tensor:
        """``grad_y [..., out], x [..., in] -> grad_y^T x [out, in]``; ``x`` may be cast already, transposed.

        The result has the shape and dtype of ``like``.
        """
        gradient = scaled_mm(*self._factors(grad_y, x), like.dtype, backend=self.backend)
        rows, columns = like.shape
        return gradient if gradient.shape == like.shape else gradient[:rows, :columns].contiguous()

    def accumulate(self, main_grad: Tensor, grad_y: Tensor, x: Tensor | Quantized, write: bool) -> None:
        """Add :meth:`weight_gradient` to ``main_grad [out, in]``; ``write``: overwrite it instead."""
        gradient_t, x_t = self._factors(grad_y, x)
        rows, columns = gradient_t.data.shape[0], x_t.data.shape[0]
        if (rows, columns) == main_grad.shape:
            scaled_accumulate(main_grad, gradient_t, x_t, write=write, backend=self.backend)
            return
        whole = main_grad.new_empty(rows, columns)
        scaled_accumulate(whole, gradient_t, x_t, write=True, backend=self.backend)
        put(main_grad, whole[: main_grad.shape[0], : main_grad.shape[1]], write)

    def _factors(self, grad_y: Tensor, x: Tensor | Quantized) -> tuple[Quantized, Quantized]:
        x_t = x if isinstance(x, Quantized) else self._cast_input(x, self.recipe.x_t, rows=False)[1]
        assert x_t is not None
        return self._cast_gradient(grad_y)[1], x_t

    def forget(self) -> None:
        """Drop the weight's cast, because the weight may change."""
        self._weight = None

    def refresh(self, weight: Tensor) -> None:
        """Cast the weight, once a step, into fixed memory, where recorded graphs read it."""
        made = self._cast_weight(weight)
        # The first cast's memory is kept for good; later casts are copied into it by `_cast_weight`.
        self._kept = self._kept or made

    def release(self) -> None:
        """Free that memory; no graph reads it any more."""
        self._kept = None

    def _cast_input(self, x: Tensor, columns: Scheme | None, rows: bool = True) -> Cast:
        scheme = self.recipe.x
        flat = rows_of(x)
        if (found := self._cast_by_history(flat, INPUT, scheme if rows else None, columns)) is not None:
            return found
        amax = self._amax(flat, scheme, INPUT, self.reduce_in) if rows or self.one_scale else None
        amax_t = amax if self.one_scale else None
        return cast(flat, scheme if rows else None, columns, amax=amax, amax_t=amax_t, fill=self.multiple)

    def _held(self, weight: Tensor) -> Quantized | None:
        """Return the weight if it is quantized, else None."""
        if weight.dtype != DTYPES[self.recipe.weight.format]:
            return None
        assert self.scale is not None, "code that stores a quantized weight must set their scale"
        self.met |= self.session.inside
        quantized = weight.detach()
        if (weight.shape[0] | weight.shape[1]) % self.multiple:
            quantized = filled(quantized.view(torch.uint8), rows=True, multiple=self.multiple).view(quantized.dtype)
        return Quantized(quantized, self.scale, self.recipe.weight)

    def _cast_weight(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        if self._weight is not None:
            return self._weight
        if (held := self._held(weight)) is not None:
            # One scale holds for both orientations, so the transpose moves bytes and rounds nothing.
            rows, columns = held, transpose(held)
        else:
            rows, columns = self._cast_both(weight.detach())
        if self._kept is not None:  # recorded graphs read this memory, so its address must not change
            rows, columns = self._kept[0].copy_(rows), self._kept[1].copy_(columns)
        # Outside a step (evaluation), weights may change between two calls unseen, so each call casts again.
        if self.session.inside:
            self._weight = rows, columns
        return rows, columns

    def _cast_both(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        recipe = self.recipe
        weight = filled(weight, rows=True, multiple=self.multiple)
        if (found := self._cast_by_history(weight, WEIGHT, recipe.weight, recipe.weight_t)) is not None:
            rows, columns = found
            assert rows is not None and columns is not None
            return rows, columns
        if recipe.one_scale:
            amax = amax_t = self._amax(weight, recipe.weight, WEIGHT, self.reduce_weight)
        else:
            amax = self._amax(weight, recipe.weight, WEIGHT, self.reduce_in)
            # Split output features for the forward's scales are split input features for the transpose: another group
            # of ranks.
            amax_t = self._amax(weight.t(), recipe.weight_t, WEIGHT, self.reduce_out)
        rows, columns = cast(weight, recipe.weight, recipe.weight_t, amax=amax, amax_t=amax_t)
        assert rows is not None and columns is not None
        return rows, columns

    def _cast_gradient(self, grad_y: Tensor) -> tuple[Quantized, Quantized]:
        """Return both casts of a gradient, made once: both products of the backward pass get the same tensor."""
        note = annotate(grad_y)
        if note.casts is None or note.casts.owner is not self:  # a sum's backward gives one tensor to several layers
            flat, scheme, scheme_t = rows_of(grad_y), self.recipe.gradient, self.recipe.gradient_t
            if (found := self._cast_by_history(flat, GRADIENT, scheme, scheme_t)) is not None:
                rows, columns = found
            else:
                amax = self._amax(flat, scheme, GRADIENT, self.reduce_out)
                rows, columns = cast(
                    flat,
                    scheme,
                    scheme_t,
                    amax=amax,
                    amax_t=amax if self.one_scale else None,
                    generator=self.session.generator(flat.device) if scheme.stochastic else None,
                    fill=self.multiple,
                )
            # The note makes both products use the same quantized values, and rounds stochastically only once.
            note.casts = Casts(self, rows, columns)
            # What an elided gradient would be made of may be freed.
            note.elided = None
        return note.casts.rows, note.casts.columns

    def _cast_by_history(self, x: Tensor, role: int, rows: Scheme | None, columns: Scheme | None) -> Cast | None:
        """Cast in one pass with past steps' magnitudes, and record this step's; None if these do not suffice."""
        scheme, history = rows or columns, self.history
        if history is None or not history.suffices or scheme is None:
            return None
        inside, amax = self.session.inside, history.covers[role]
        if (make := elided_output_of(x)) is not None:
            found, told = make(rows, columns, amax)
            if inside:
                history.record(role, told)
            return found
        found = cast(x, rows, columns, amax=amax, amax_t=amax, tell=inside, fill=self.multiple)
        if inside:
            # After the cast, which notes magnitudes in its own pass: another pass over x would cost what delayed
            # scaling saves.
            history.record(role, magnitudes_of(x))
        return found

    def _amax(self, x: Tensor, scheme: Scheme, role: int, reduce: Reduce | None) -> Tensor | None:
        """Return the magnitudes that set the scales, or None if the cast finds them in ``x`` alone."""
        if not self.one_scale:
            # Only scales that span the split features must agree between ranks. Smaller tiles are each rank's own.
            if reduce is None or scheme.tile != (1, 0):
                return None
            amax = tile_amax(x, scheme.tile)
            reduce(amax)
            return amax
        amax = known_amax(x)
        if reduce is not None:
            # Before the history, so that all ranks of a split matrix record the same value and scale alike.
            reduce(amax)
        if self.history is not None:
            amax = self.history.allow(role, amax, record=self.session.inside)
        return amax * 2.0**self.margin if self.margin else amax


def _shaped(y: Tensor, like: Tensor) -> Tensor:
    """View rows ``[T, n]`` with the leading dims of a tensor."""
    return y if like.dim() == 2 else y.view(*like.shape[:-1], -1)


LOW_PRECISION: Registry[type[LowPrecision]] = Registry("implementation of low precision")
"""Implementations of low precision by name; plugins add theirs."""
LOW_PRECISION.register("own")(LowPrecision)


def precision_of(parameter: Tensor) -> LowPrecision | None:
    """Return the precision of products with a parameter; None: its own dtype."""
    state: ParameterState | None = getattr(parameter, "megalight", None)
    return None if state is None else state.precision

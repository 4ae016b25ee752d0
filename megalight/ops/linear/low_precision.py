"""Linear layers whose products are formed in 8 or 4 bits.

A weight asks for it by a :class:`LowPrecision` in its state (:mod:`megalight.ops.parameter`): forward product, input
gradient and weight gradient then go through its methods, and everything else about the layer stays as it is. Tensors
between layers and main gradients keep their types. Of an input without a recipe, the cast is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import BackendError, ConfigurationError
from megalight.ops.linear.inputs import Saveable
from megalight.ops.note import Casts, annotate
from megalight.ops.quantize import Cast, Quantized, Scheme, cast, tile_amax, transpose
from megalight.ops.quantize.formats import DTYPES, LARGEST
from megalight.ops.quantize.history import GRADIENT, INPUT, STEPS, WEIGHT, AmaxHistory
from megalight.ops.quantize.known import known_amax, rows_of
from megalight.ops.quantize.recipes import Recipe
from megalight.ops.scaled_accumulate import SCALED_ACCUMULATE, scaled_accumulate
from megalight.ops.scaled_mm import SCALED_MM, Spec, scaled_mm
from megalight.registry import Registry

Reduce = Callable[[Tensor], None]
"""Maximum over some ranks, in place."""


class Session:
    """What all low-precision layers of a model share.

    Args:
        seed: of stochastic rounding.
        reduce_history: for scales from past steps: once a step, over all ranks that share a layer or feed it.
    """

    def __init__(self, seed: int = 0, reduce_history: Reduce | None = None) -> None:
        self.seed = seed
        self.reduce_history = reduce_history
        self.layers: list[LowPrecision] = []
        self.inside = False
        self.generators: dict[torch.device, torch.Generator] = {}
        self._number = 0

    def begin(self, number: int) -> None:
        """Optimizer step ``number`` begins: stochastic rounding draws by it, so that a resumed run draws the same."""
        self._number = number
        for generator in self.generators.values():
            self._seed(generator)

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Around all micro-batches between two updates of the weights: each weight is cast once inside.

        Args:
            number: given, the step :meth:`begin`s here.
        """
        if number is not None:
            self.begin(number)
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            for layer in self.layers:
                layer.forget()
        AmaxHistory.roll([layer.history for layer in self.layers if layer.history is not None], self.reduce_history)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """As inside :meth:`step`, for passes of which nothing may be remembered."""
        histories = [layer.history for layer in self.layers if layer.history is not None]
        kept = [(history.current, history.current.clone()) for history in histories if history.current is not None]
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            for layer in self.layers:
                layer.forget()
            for current, before in kept:
                current.copy_(before)

    def generator(self, device: torch.device) -> torch.Generator:
        """Draws for stochastic rounding in this step. The same object in every step: a recorded graph may know it."""
        if device not in self.generators:
            self.generators[device] = self._seed(torch.Generator(device))
        return self.generators[device]

    def _seed(self, generator: torch.Generator) -> torch.Generator:
        return generator.manual_seed(self.seed * 1_000_003 + self._number)


class LowPrecision:
    """How one weight ``[out, in]`` is multiplied; its state refers to it.

    Args:
        recipe: how matrices are cast.
        session: shared by the model.
        emulate: form products in float64 from what the codes stand for.
        margin: scales leave room for values ``2 ** margin`` times as large; for recipes with one scale per matrix.
        history: steps that a delayed scale looks back.
        reduce_amax: over the ranks that hold the other input features, and the other output features, wherever a scale
            spans them. None: each rank scales its own part.
        primary: the weight may be kept as codes; whoever does so sets :attr:`scale`.

    Attributes:
        scale: of a weight that is held as codes, ``[1, 1]``.
        wants_magnitudes: whether casts by the values that are there read what makers of tensors tell of them.
        refreshes: whether :meth:`refresh` keeps a weight's casts in one place, so that recorded layers can read them.

    Raises:
        ConfigurationError: codes of this recipe's weights are not those of their transposes.
    """

    wants_magnitudes = True
    refreshes = True

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        *,
        emulate: bool = False,
        margin: int = 0,
        history: int = STEPS,
        reduce_amax: tuple[Reduce | None, Reduce | None] = (None, None),
        primary: bool = False,
    ) -> None:
        self.recipe = recipe
        self.session = session
        self.backend = "reference" if emulate else "auto"
        self.margin = margin
        self.reduce_in, self.reduce_out = reduce_amax
        self.history = AmaxHistory(history) if recipe.delayed else None
        if primary and not recipe.one_scale:
            raise ConfigurationError(
                f"primary_weights: recipe {recipe.name!r} casts a weight and its transpose with different scales, so "
                "that one set of codes cannot be kept; choose 'tensorwise' or 'delayed', or leave primary_weights out."
            )
        self.primary = primary
        self.scale: Tensor | None = None
        self._weight: tuple[Quantized, Quantized] | None = None
        self._kept: tuple[Quantized, Quantized] | None = None
        session.layers.append(self)

    @property
    def reduce_weight(self) -> Reduce | None:
        """Over the ranks that hold the rest of a weight with one scale."""
        return self.reduce_in or self.reduce_out

    @staticmethod
    def check_products(weight: Tensor, recipe: Recipe) -> None:
        """Whether the weight's device has all three products.

        Raises:
            BackendError: it has not; the message says what each backend lacks.
        """
        wide = torch.promote_types(weight.dtype, torch.float32)
        for a, b, dtype in (
            (recipe.x, recipe.weight, weight.dtype),
            (recipe.gradient, recipe.weight_t, weight.dtype),
            (recipe.gradient_t, recipe.x_t, wide),
        ):
            spec = Spec(weight.device.type, a, b, dtype)
            if SCALED_MM.select(spec).name == "reference":
                rows = SCALED_MM.table(spec)
                reasons = "; ".join(f"{backend.name}: {reason}" for backend, reason in rows if reason is not None)
                raise BackendError(
                    f"recipe {recipe.name!r} has no products here ({reasons}). Choose another recipe, or emulate=True, "
                    "which is exact and slow."
                )
        SCALED_ACCUMULATE.select(Spec(weight.device.type, recipe.gradient_t, recipe.x_t, wide))  # tried now, not later

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., in] -> x W^T + b [..., out]``, in the type of ``x``."""
        rows = self._cast_input(x, None)[0]
        assert rows is not None
        return self.multiply(rows, weight, bias, x.dtype).view(*x.shape[:-1], -1)

    def product_and_cast(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Saveable]:
        """The same, and what :meth:`weight_gradient` can be handed in place of ``x``: half its size, made in one go."""
        rows, x_t = self._cast_input(x, self.recipe.x_t)
        assert rows is not None and x_t is not None
        return self.multiply(rows, weight, bias, x.dtype).view(*x.shape[:-1], -1), x_t

    def multiply(self, rows: Quantized, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``x W^T + b [T, out]`` of an input that is cast already."""
        codes = self._held(weight)
        y = scaled_mm(rows, codes or self._cast_weight(weight)[0], dtype, fast=True, backend=self.backend)
        return y if bias is None else y + bias.to(dtype)

    @property
    def casts_shares(self) -> bool:
        """Whether ranks that hold some tokens each can cast them, and have parts of what the whole is cast to."""
        return self.recipe.one_scale

    def cast_share(self, x: Tensor, reduce: Reduce) -> Quantized:
        """Some tokens ``x [..., in]`` of an input, cast with the scale of all: codes ``[T, in]``.

        Args:
            reduce: over the ranks that have the other tokens, whose histories agree between steps.
        """
        flat = rows_of(x)
        if (found := self._cast_by_history(flat, INPUT, self.recipe.x, None)) is not None:
            rows, _ = found
        else:
            rows, _ = cast(flat, self.recipe.x, None, amax=self._amax(flat, self.recipe.x, INPUT, reduce, always=True))
        assert rows is not None
        return rows

    def for_weight_gradient(self, rows: Quantized) -> Quantized:
        """What :meth:`weight_gradient` takes, from a whole input's codes ``[T, in]``."""
        x_t, missing = transpose(rows), -len(rows.data) % rows.scheme.multiple
        if not missing:
            return x_t
        return replace(x_t, data=F.pad(x_t.data.view(torch.uint8), (0, missing)).view(x_t.data.dtype))

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """``grad_y [..., out] -> grad_y W [..., in]``, in the type of ``grad_y``."""
        rows, _ = self._cast_gradient(grad_y)
        grad_x = scaled_mm(rows, self._cast_weight(weight)[1], grad_y.dtype, backend=self.backend)
        return grad_x.view(*grad_y.shape[:-1], -1)

    def weight_gradient(self, grad_y: Tensor, x: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
        """``grad_y [..., out], x [..., in] -> grad_y^T x [out, in]``; ``x`` may be cast already, transposed."""
        gradient_t, x_t = self._factors(grad_y, x)
        return scaled_mm(gradient_t, x_t, dtype, backend=self.backend)

    def accumulate(self, main_grad: Tensor, grad_y: Tensor, x: Tensor | Quantized, write: bool) -> None:
        """Add :meth:`weight_gradient` to ``main_grad [out, in]``; ``write``: whatever that holds is written over."""
        scaled_accumulate(main_grad, *self._factors(grad_y, x), write=write, backend=self.backend)

    def _factors(self, grad_y: Tensor, x: Tensor | Quantized) -> tuple[Quantized, Quantized]:
        x_t = x if isinstance(x, Quantized) else self._cast_input(x, self.recipe.x_t, rows=False)[1]
        assert x_t is not None
        return self._cast_gradient(grad_y)[1], x_t

    def forget(self) -> None:
        """The weight may change: cast it again when it is needed."""
        self._weight = None

    def refresh(self, weight: Tensor) -> None:
        """Cast the weight, once a step, to one place in memory, where recorded graphs read it."""
        made = self._cast_weight(weight)
        self._kept = self._kept or made

    def release(self) -> None:
        """Nobody reads that place any more."""
        self._kept = None

    def _cast_input(self, x: Tensor, columns: Scheme | None, rows: bool = True) -> Cast:
        scheme = self.recipe.x
        flat = rows_of(x)
        if (found := self._cast_by_history(flat, INPUT, scheme if rows else None, columns)) is not None:
            return found
        amax = self._amax(flat, scheme, INPUT, self.reduce_in) if rows or self.recipe.one_scale else None
        return cast(flat, scheme if rows else None, columns, amax=amax, amax_t=amax if self.recipe.one_scale else None)

    def _held(self, weight: Tensor) -> Quantized | None:
        """A weight that is held as codes."""
        if weight.dtype != DTYPES[self.recipe.weight.format]:
            return None
        assert self.scale is not None, "whoever keeps codes sets their scale"
        return Quantized(weight.detach(), self.scale, self.recipe.weight)

    def _cast_weight(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        if self._weight is not None:
            return self._weight
        if (held := self._held(weight)) is not None:
            rows, columns = held, transpose(held)
        else:
            rows, columns = self._cast_both(weight.detach())
        if self._kept is not None:
            rows, columns = self._kept[0].copy_(rows), self._kept[1].copy_(columns)
        if self.session.inside:
            self._weight = rows, columns
        return rows, columns

    def _cast_both(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        recipe = self.recipe
        if (found := self._cast_by_history(weight, WEIGHT, recipe.weight, recipe.weight_t)) is not None:
            rows, columns = found
            assert rows is not None and columns is not None
            return rows, columns
        if recipe.one_scale:
            amax = amax_t = self._amax(weight, recipe.weight, WEIGHT, self.reduce_weight)
        else:
            amax = self._amax(weight, recipe.weight, WEIGHT, self.reduce_in)
            amax_t = self._amax(weight.t(), recipe.weight_t, WEIGHT, self.reduce_out)
        rows, columns = cast(weight, recipe.weight, recipe.weight_t, amax=amax, amax_t=amax_t)
        assert rows is not None and columns is not None
        return rows, columns

    def _cast_gradient(self, grad_y: Tensor) -> tuple[Quantized, Quantized]:
        """Both casts of a gradient, made once: the two products of the backward pass are handed the same tensor."""
        note = annotate(grad_y)
        if note.casts is None or note.casts.owner is not self:  # a sum hands one tensor to several layers
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
                    amax_t=amax if self.recipe.one_scale else None,
                    generator=self.session.generator(flat.device) if scheme.stochastic else None,
                )
            note.casts = Casts(self, rows, columns)
        return note.casts.rows, note.casts.columns

    def _cast_by_history(self, x: Tensor, role: int, rows: Scheme | None, columns: Scheme | None) -> Cast | None:
        """A cast by past steps' magnitudes alone, in one pass, in which this step's are found; None: there are none."""
        scheme, history = rows or columns, self.history
        if history is None or not history.rolled or scheme is None:
            return None
        amax = history.known(role, LARGEST[scheme.format]) * 2.0**self.margin
        inside = self.session.inside
        found = cast(x, rows, columns, amax=amax, amax_t=amax, tell=inside)
        if inside:
            history.record(role, known_amax(x))
        return found

    def _amax(self, x: Tensor, scheme: Scheme, role: int, reduce: Reduce | None, always: bool = False) -> Tensor | None:
        """The magnitudes that scales must allow for, where casting cannot find them in ``x`` alone.

        Args:
            always: reduce what a history is told, too: ranks must allow for the same even while it is empty.
        """
        if not self.recipe.one_scale:
            if reduce is None or scheme.tile != (1, 0):
                return None
            amax = tile_amax(x, scheme.tile)
            reduce(amax)
            return amax
        amax = known_amax(x)
        if reduce is not None and (always or self.history is None):
            reduce(amax)
        if self.history is not None:
            amax = self.history.allow(role, amax, record=self.session.inside)
        return amax * 2.0**self.margin if self.margin else amax


LOW_PRECISION: Registry[type[LowPrecision]] = Registry("implementation of low precision")
"""Who casts and multiplies, by name; plugins add theirs."""
LOW_PRECISION.register("own")(LowPrecision)

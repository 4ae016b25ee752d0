"""Linear layers whose products are formed in 8 or 4 bits.

A weight with the attribute ``precision``, a :class:`LowPrecision`, asks for it: forward product, input gradient and
weight gradient then go through its methods, and everything else about the layer stays as it is. Tensors between layers
and main gradients keep their types; of an input that has no recipe, the cast is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megalight.ops.quantize import Cast, Quantized, Scheme, amax_of, cast, tile_amax
from megalight.ops.quantize.history import GRADIENT, INPUT, WEIGHT, AmaxHistory
from megalight.ops.quantize.recipes import Recipe
from megalight.ops.scaled_mm import scaled_mm

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
    """How one weight ``[out, in]`` is multiplied; sits in its attribute ``precision``.

    Args:
        recipe: how matrices are cast.
        session: shared by the model.
        emulate: form products in float64 from what the codes stand for.
        margin: scales leave room for values ``2 ** margin`` times as large; for recipes with one scale per matrix.
        history: steps that a delayed scale looks back.
        reduce_amax: over the ranks that hold the other input features, and the other output features, wherever a scale
            spans them. None: each rank scales its own part.
    """

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        *,
        emulate: bool = False,
        margin: int = 0,
        history: int = 16,
        reduce_amax: tuple[Reduce | None, Reduce | None] = (None, None),
    ) -> None:
        self.recipe = recipe
        self.session = session
        self.backend = "reference" if emulate else "auto"
        self.margin = margin
        self.reduce_in, self.reduce_out = reduce_amax
        self.history = AmaxHistory(history) if recipe.delayed else None
        self._weight: tuple[Quantized, Quantized] | None = None
        self._kept: tuple[Quantized, Quantized] | None = None
        session.layers.append(self)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., in] -> x W^T + b [..., out]``, in the type of ``x``."""
        return self._multiply(self._cast_input(x, None)[0], x, weight, bias)

    def product_and_cast(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Quantized]:
        """The same, and what :meth:`weight_gradient` can be handed in place of ``x``: half its size, made in one go."""
        rows, x_t = self._cast_input(x, self.recipe.x_t)
        assert x_t is not None
        return self._multiply(rows, x, weight, bias), x_t

    def _multiply(self, rows: Quantized | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert rows is not None
        y = scaled_mm(rows, self._cast_weight(weight)[0], x.dtype, fast=True, backend=self.backend)
        y = y if bias is None else y + bias.to(y.dtype)
        return y.view(*x.shape[:-1], -1)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """``grad_y [..., out] -> grad_y W [..., in]``, in the type of ``grad_y``."""
        rows, _ = self._cast_gradient(grad_y)
        grad_x = scaled_mm(rows, self._cast_weight(weight)[1], grad_y.dtype, backend=self.backend)
        return grad_x.view(*grad_y.shape[:-1], -1)

    def weight_gradient(self, grad_y: Tensor, x: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
        """``grad_y [..., out], x [..., in] -> grad_y^T x [out, in]``; ``x`` may be cast already, transposed."""
        x_t = x if isinstance(x, Quantized) else self._cast_input(x, self.recipe.x_t, rows=False)[1]
        assert x_t is not None
        _, gradient_t = self._cast_gradient(grad_y)
        return scaled_mm(gradient_t, x_t, dtype, backend=self.backend)

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
        flat = x.reshape(-1, x.shape[-1])
        amax = self._amax(flat, scheme, INPUT, self.reduce_in) if rows or self.recipe.one_scale else None
        return cast(flat, scheme if rows else None, columns, amax=amax, amax_t=amax if self.recipe.one_scale else None)

    def _cast_weight(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        if self._weight is not None:
            return self._weight
        weight = weight.detach()
        recipe = self.recipe
        if recipe.one_scale:
            amax = amax_t = self._amax(weight, recipe.weight, WEIGHT, self.reduce_in or self.reduce_out)
        else:
            amax = self._amax(weight, recipe.weight, WEIGHT, self.reduce_in)
            amax_t = self._amax(weight.t(), recipe.weight_t, WEIGHT, self.reduce_out)
        rows, columns = cast(weight, recipe.weight, recipe.weight_t, amax=amax, amax_t=amax_t)
        assert rows is not None and columns is not None
        if self._kept is not None:
            rows, columns = self._kept[0].copy_(rows), self._kept[1].copy_(columns)
        if self.session.inside:
            self._weight = rows, columns
        return rows, columns

    def _cast_gradient(self, grad_y: Tensor) -> tuple[Quantized, Quantized]:
        """Both casts of a gradient, made once: the two products of the backward pass are handed the same tensor."""
        owner, rows, columns = getattr(grad_y, "casts", (None, None, None))
        if owner is not self:  # a sum hands one tensor to several layers
            flat = grad_y.reshape(-1, grad_y.shape[-1])
            amax = self._amax(flat, self.recipe.gradient, GRADIENT, self.reduce_out)
            rows, columns = cast(
                flat,
                self.recipe.gradient,
                self.recipe.gradient_t,
                amax=amax,
                amax_t=amax if self.recipe.one_scale else None,
                generator=self.session.generator(flat.device) if self.recipe.gradient.stochastic else None,
            )
            grad_y.casts = self, rows, columns  # type: ignore[attr-defined]
        assert rows is not None and columns is not None
        return rows, columns

    def _amax(self, x: Tensor, scheme: Scheme, role: int, reduce: Reduce | None) -> Tensor | None:
        """The magnitudes that scales must allow for, where casting cannot find them in ``x`` alone."""
        if not self.recipe.one_scale:
            if reduce is None or scheme.tile != (1, 0):
                return None
            amax = tile_amax(x, scheme.tile)
            reduce(amax)
            return amax
        amax = amax_of(x)
        if self.history is not None:
            amax = self.history.allow(role, amax, record=self.session.inside)
        elif reduce is not None:
            reduce(amax)
        return amax * 2.0**self.margin if self.margin else amax

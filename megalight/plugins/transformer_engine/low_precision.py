"""Linear layers in 8 and 4 bits with TransformerEngine: its recipes, casts and products in our layers.

We call its functions directly instead of its modules with ``autocast``. So weights, main gradients, collectives,
recompute and deferred weight gradients are those of our layers. Its quantizers, made from its recipe, cast a matrix and
its transpose in one kernel, and its ``general_gemm`` multiplies the results. The product's epilogue adds the weight
gradient to the main gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.errors import BackendError, ConfigurationError, MissingPackageError
from megalight.ops.autograd import Casts, annotate
from megalight.ops.linear.low_precision import LowPrecision
from megalight.ops.quantize import TINY, Scheme
from megalight.ops.quantize.amax_history import GRADIENT, INPUT, WEIGHT
from megalight.ops.quantize.formats import LARGEST
from megalight.ops.quantize.recipes import QuantizationRecipe
from megalight.plugins.transformer_engine.kernels import GEMM, PACKAGE, workspace
from megalight.plugins.transformer_engine.kernels import why_not as package_why_not

RECIPES = "transformer_engine.common.recipe"
KINDS = {
    "tensorwise": ("Float8CurrentScaling", "2.2", "check_fp8_support", 16),
    "delayed": ("DelayedScaling", "2.1", "check_fp8_support", 16),
    "blockwise": ("Float8BlockScaling", "2.3", "check_fp8_block_scaling_support", 16),
    "mxfp8": ("MXFP8BlockScaling", "2.1", "check_mxfp8_support", 32),
    "nvfp4": ("NVFP4BlockScaling", "2.8", "check_nvfp4_support", 128),
}
"""Our recipe -> its class, the first release with it, the device check, and the multiple to which tokens are padded."""


# Old releases and new ones are both in use, and differ only in this path.
def _find(name: str) -> Any:
    """Load a name from a module that has moved: the new path, or else the old one."""
    try:
        return PACKAGE.load(f"transformer_engine.pytorch.quantization:{name}")
    except MissingPackageError:
        return PACKAGE.load(f"transformer_engine.pytorch.fp8:{name}")


def why_not(device: str, recipe: QuantizationRecipe) -> str | None:
    """Return why a recipe cannot be used, or None."""
    if recipe.name not in KINDS:
        return f"has no recipe {recipe.name!r}; it has {', '.join(KINDS)}"
    name, minimum, check, _ = KINDS[recipe.name]
    if (reason := package_why_not(device, name, minimum, f"{RECIPES}:{name}", GEMM)) is not None:
        return reason
    # The device says it by itself: recipes depend on its generation.
    try:
        able, reason = _find(check)()
    except MissingPackageError as error:
        return str(error)
    return None if able else reason


class SavedInput:
    """A cast input between forward and backward. Autograd saves its tensors."""

    def __init__(self, cast: Any) -> None:
        # Autograd saves tensors only, so the object is taken apart; it is put together again in the backward.
        tensors, self._shell = cast.prepare_for_saving()
        self.tensors = tuple(tensors)

    @property
    def restore(self) -> Callable[..., Any]:
        """A function that restores the cast input from the saved tensors."""
        shell = self._shell

        def restored(*tensors: Tensor | None) -> Any:
            shell.restore_from_saved(list(tensors))
            return shell

        return restored


class TransformerEngineProducts(LowPrecision):
    """The products of one weight with TransformerEngine. It has the arguments of its base class.

    Raises:
        ConfigurationError: TransformerEngine's recipes do not have an option.
    """

    wants_magnitudes = False  # its quantizers find magnitudes themselves
    reads_elided = False  # they cast values
    reads_quantized = False
    takes_any_size = False

    def __init__(self, recipe: QuantizationRecipe, session: Any, **options: Any) -> None:
        # Named one by one, so that an option without effect is never taken.
        for name, asked in (
            ("emulate", options.get("emulate", False)),
            ("primary_weights", options.get("primary", False)),
            ("reduce_amax", any(options.get("reduce_amax", ())) and not recipe.delayed),
            ("margin for this recipe", options.get("margin", 0) and not recipe.delayed),
            ("power_of_two", recipe.x.scale == "power"),
        ):
            if asked:
                raise ConfigurationError(
                    f"implementation='transformer_engine' has no {name}; leave it out, or take implementation='own'."
                )
        super().__init__(recipe, session, **options)
        self._quantizers: list[Any] = []
        self._quantized: Any = None
        self._fixed: Any = None

    @staticmethod
    def check_products(weight: Tensor, recipe: QuantizationRecipe) -> None:
        """Raise unless package and device support the recipe."""
        if (reason := why_not(weight.device.type, recipe)) is not None:
            raise BackendError(f"transformer_engine: {reason}. Choose another recipe, or implementation='own'.")
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise BackendError(f"transformer_engine casts bfloat16, float16 and float32 weights, not {weight.dtype}.")

    @property
    def casts_shards(self) -> bool:
        """False: quantized values stay on the rank that made them."""
        return False

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x W^T + b``."""
        return self._forward(self._cast(x, INPUT, columns=False), x, weight, bias)

    def product_and_cast(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, SavedInput]:
        """Return ``x W^T + b``, and the column-wise quantized values of the input for the weight gradient."""
        quantized = self._cast(x, INPUT)
        y = self._forward(quantized, x, weight, bias)
        # Frees the row-wise quantized values: the weight gradient contracts tokens, and reads the column-wise ones
        # only.
        quantized.update_usage(rowwise_usage=False, columnwise_usage=True)
        return y, SavedInput(quantized)

    def input_gradient(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """Return ``grad_y W``."""
        # cuBLAS is column-major: our `grad_y W` is its `W^T grad_y^T`, so the weight comes first.
        out = self._gemm(self._quantized_weight(weight), self._gradient(grad_y), "NN", grad_y.dtype, grad=True)
        # The tokens were padded to a multiple: the rows of padding are cut off.
        return out[: grad_y.numel() // grad_y.shape[-1]].view(*grad_y.shape[:-1], -1)

    def weight_gradient(self, grad_y: Tensor, x: Any, like: Tensor) -> Tensor:
        """Return ``grad_y^T x``. ``x`` is a tensor, or the result of :meth:`product_and_cast` after restoring."""
        return self._gemm(self._input(x), self._gradient(grad_y), "NT", like.dtype, grad=True)

    def accumulate(self, main_grad: Tensor, grad_y: Tensor, x: Any, write: bool) -> None:
        """Add ``grad_y^T x`` to ``main_grad``, or with ``write`` overwrite it, inside the product."""
        self._gemm(
            self._input(x),
            self._gradient(grad_y),
            "NT",
            main_grad.dtype,
            grad=True,
            out=main_grad,
            accumulate=not write,
        )

    def forget(self) -> None:
        """Drop the quantized values of the weight, which may change now."""
        super().forget()
        self._quantized = None

    def refresh(self, weight: Tensor) -> None:
        """Cast the weight, once a step, into fixed memory, where recorded graphs read it."""
        quantized = self._quantized_weight(weight)
        self._fixed = quantized if self._fixed is None else self._fixed

    def release(self) -> None:
        """Free that memory."""
        self._fixed = None

    def _forward(self, quantized: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._gemm(self._quantized_weight(weight), quantized, "TN", x.dtype)[: x.numel() // x.shape[-1]]
        y = y if bias is None else y + bias.to(y.dtype)
        return y.view(*x.shape[:-1], -1)

    def _gemm(self, a: Any, b: Any, layout: str, dtype: torch.dtype, grad: bool = False, **options: Any) -> Tensor:
        """Multiply. As in cuBLAS, the weight or the input comes first. Gradients accumulate in full precision."""
        gemm = PACKAGE.load(GEMM)
        options |= workspace(gemm)
        # A split accumulator adds partial sums in float32. Gradients need it; the forward does
        # without, and is faster.
        out: Tensor = gemm(a, b, out_dtype=dtype, layout=layout, grad=grad, use_split_accumulator=grad, **options)[0]
        return out

    def _quantized_weight(self, weight: Tensor) -> Any:
        if self._quantized is not None:
            return self._quantized
        quantized = self._cast(weight.detach(), WEIGHT)
        if self._fixed is not None:
            quantized = _overwrite(self._fixed, quantized)
        # Kept within a step only: weights change between steps.
        if self.session.inside:
            self._quantized = quantized
        return quantized

    def _input(self, x: Any) -> Any:
        return self._cast(x, INPUT, rows=False) if isinstance(x, Tensor) else x

    def _gradient(self, grad_y: Tensor) -> Any:
        """Cast once for both products of the backward pass."""
        # Noted on the gradient itself: both products of the backward get this very tensor.
        note = annotate(grad_y)
        if note.casts is None or note.casts.owner is not self:
            quantized = self._cast(grad_y, GRADIENT)
            note.casts = Casts(self, quantized, quantized)
        return note.casts.rows

    @torch.no_grad()
    def _cast(self, x: Tensor, role: int, rows: bool = True, columns: bool = True) -> Any:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        scheme = (self.recipe.x, self.recipe.weight, self.recipe.gradient)[role]
        quantizer = self._quantizer(role, x.device)
        past = self.history if self.history is not None and self.history.suffices else None
        if past is not None:
            self._scale(quantizer, scheme, past.covers[role])
            quantizer.amax.zero_()  # casts accumulate the largest magnitude in it
        elif self.history is not None:
            amax = self._amax(flat, scheme, role, (self.reduce_in, self.reduce_weight, self.reduce_out)[role])
            assert amax is not None
            self._scale(quantizer, scheme, amax)
        # its products need a multiple of tokens; the callers cut off the rows of padding
        if role != WEIGHT and (missing := -len(flat) % KINDS[self.recipe.name][3]):
            flat = F.pad(flat, (0, 0, 0, missing))
        # With one scale, the column-wise quantized values are made by transposing the row-wise ones.
        quantizer.set_usage(rowwise=rows or self.recipe.one_scale, columnwise=columns)
        quantized = quantizer(flat)
        # Not outside of a step: evaluation must not change the history.
        if past is not None and self.session.inside:
            past.record(role, quantizer.amax.reshape(()))
        return quantized

    @staticmethod
    def _scale(quantizer: Any, scheme: Scheme, amax: Tensor) -> None:
        quantizer.scale.copy_(LARGEST[scheme.format] / amax.clamp(min=TINY))

    def _quantizer(self, role: int, device: torch.device) -> Any:
        if not self._quantizers:
            state, recipe = _find("RecipeState"), _recipe(self.recipe.name, self.recipe.gradient.format == "e5m2")
            forward = state.create(recipe, mode="forward", num_quantizers=3, device=device).make_quantizers()
            backward = state.create(recipe, mode="backward", num_quantizers=2, device=device).make_quantizers()
            self._quantizers = [forward[0], forward[1], backward[0]]  # in the order of roles
            for quantizer in self._quantizers:
                quantizer.internal = True  # plain storage instead of a tensor subclass with autograd
        return self._quantizers[role]


@torch.no_grad()
def _overwrite(quantized: Any, new: Any) -> Any:
    """Copy new quantized values of the same form into ``quantized``, whose tensors keep their addresses; return it."""
    # A quantizer could write there itself, but only into the tensor subclass, not into plain storage.
    (into, _), (values, _) = quantized.prepare_for_saving(), new.prepare_for_saving()
    for target, value in zip(into, values, strict=True):
        if target is not None:
            target.copy_(value)
    quantized.restore_from_saved(into)
    return quantized


def _recipe(name: str, hybrid: bool) -> Any:
    """Make TransformerEngine's recipe. For delayed scaling, the history of scales is ours."""
    make = PACKAGE.load(f"{RECIPES}:{KINDS[name][0]}")
    # It has one format, so its recipe takes no other.
    if name == "nvfp4":
        return make()
    form = PACKAGE.load(f"{RECIPES}:Format")
    return make(fp8_format=form.HYBRID if hybrid else form.E4M3)

"""Choose the linear layers of a model that multiply in 8 or 4 bits, and the ranks over which their scales agree."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError, nearest
from megalight.nn import Activation, LayerNorm, Linear, RMSNorm, Rotary
from megalight.ops.common import measuring
from megalight.ops.linear.low_precision import LowPrecision, Reduce, Session
from megalight.ops.parameter import known_state, state_of
from megalight.ops.quantize.history import STEPS
from megalight.ops.quantize.recipes import Recipe, recipe
from megalight.parallel.layers import layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.column import ColumnLinear
from megalight.parallel.tensor.row import RowLinear

MAX_MARGIN = 14
"""Largest margin: 448 / 2^14 is the smallest such quotient that e4m3 holds with all its bits."""

DENSE = ShardSpec((), ())
"""The spec of a weight that nothing else is known of: its axes are those of dense layers."""


@dataclass(frozen=True)
class LowPrecisionOptions:
    """User options for products in 8 or 4 bits.

    Args:
        recipe: ``tensorwise``, ``delayed``, ``rowwise``, ``blockwise``, ``mxfp8`` or ``nvfp4``; see
            :mod:`megalight.ops.quantize.recipes`.
        formats: ``hybrid`` (gradients e5m2) or ``e4m3``; None: the usual one for the recipe.
        power_of_two: scales are powers of two.
        margin: scales leave room for values ``2 ** margin`` times as large, up to 14; for ``tensorwise`` and
            ``delayed``.
        history: number of past steps that ``delayed`` uses; None: 16.
        first_layers: number of layers at the beginning that keep the weights' own dtype.
        last_layers: number of layers at the end that do.
        modules: patterns of linear layers inside a layer that use low precision (``mlp.*``). Embeddings and the output
            layer never do.
        reduce_amax: scales that span features of several ``tp`` ranks agree, so that results do not depend on ``tp``.
            This costs one small all-reduce per cast. For ``tensorwise`` and ``rowwise``; ``delayed`` always agrees: in
            the first step per cast, later once a step over all ranks that hold the weight or a part of it.
        primary_weights: store weights of these layers as 8-bit codes during training. The optimizer's masters are cast
            with the scale of the whole weight, the codes are sent to the data-parallel ranks, and no rank holds the
            weights in their own dtype. For ``tensorwise`` and ``delayed``; their weights are then scaled by the current
            values.
        emulate: compute products in float64 from the decoded values, on machines without the real products.

    Raises:
        ConfigurationError: a value is not allowed, or has no effect for the recipe.
    """

    recipe: str = "tensorwise"
    formats: Literal["hybrid", "e4m3"] | None = None
    power_of_two: bool = False
    margin: int = 0
    history: int | None = None
    first_layers: int = 0
    last_layers: int = 0
    modules: Sequence[str] = ("*",)
    reduce_amax: bool = False
    primary_weights: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        self.schemes()
        self._check_numbers()
        self._check_modules()
        one_scale = self.recipe in ("tensorwise", "delayed")
        if self.margin and not one_scale:
            raise ConfigurationError(f"margin={self.margin} does nothing for recipe {self.recipe!r}; leave it out.")
        if self.history is not None and self.recipe != "delayed":
            raise ConfigurationError(
                f"history={self.history} does nothing for recipe {self.recipe!r}; leave it out, or choose 'delayed'."
            )
        if self.reduce_amax and self.recipe not in ("tensorwise", "rowwise"):
            raise ConfigurationError(f"reduce_amax does nothing for recipe {self.recipe!r}; leave it out.")
        if self.primary_weights and not one_scale:
            raise ConfigurationError(
                f"primary_weights=True keeps one set of codes of each weight, and recipe {self.recipe!r} needs two, as "
                "a weight and its transpose have different scales; choose 'tensorwise' or 'delayed', or leave it out."
            )

    def schemes(self) -> Recipe:
        """Return the recipe."""
        return recipe(self.recipe, self.formats, self.power_of_two)

    def _check_numbers(self) -> None:
        for name, least in (("margin", 0), ("history", 1), ("first_layers", 0), ("last_layers", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ConfigurationError(f"{name}={value!r}; give a whole number, at least {least}.")
        if self.margin > MAX_MARGIN:
            raise ConfigurationError(
                f"margin={self.margin}; with more than {MAX_MARGIN} even the largest value is below e4m3's normal "
                "numbers. Lower it; 0 leaves no room."
            )

    def _check_modules(self) -> None:
        if isinstance(self.modules, str):
            raise ConfigurationError(f"modules={self.modules!r} is one string; give a list: [{self.modules!r}].")
        if not self.modules:
            raise ConfigurationError(
                f"modules={self.modules!r} names no layer, so that none would multiply in low precision; give patterns "
                "such as 'mlp.*', leave modules out for all layers, or choose another precision."
            )


def apply_low_precision(
    model: nn.Module,
    options: LowPrecisionOptions,
    mesh: ParallelMesh,
    num_layers: int | None = None,
    kind: type[LowPrecision] = LowPrecision,
    specs: Mapping[str, ShardSpec] | None = None,
    seed: int = 0,
) -> Session:
    """Give the weights of linear layers a low precision.

    Args:
        model: this rank's part, on its device; its ``layers`` are named by global index.
        num_layers: number of layers of the whole model; None: those of ``model``.
        kind: the class that casts and multiplies.
        specs: what the parameters of ``model`` hold, by name. Those without a spec are split by the mesh's dense view.
        seed: seed of stochastic rounding, equal on all ranks.

    Returns:
        the session that the layers share; run steps inside its
        :meth:`~megalight.ops.linear.low_precision.Session.step`.

    Raises:
        ConfigurationError: no layer is left, a pattern matches nothing, or sizes are not divisible.
        BackendError: the device has no such products.
    """
    # An earlier run may have chosen other layers.
    remove_low_precision(model)
    layers = layers_of(model, "low precision")
    total = len(layers) if num_layers is None else num_layers
    kept = options.first_layers + options.last_layers
    if kept >= total:
        raise ConfigurationError(
            f"first_layers={options.first_layers} and last_layers={options.last_layers} leave none of {total} layers; "
            "lower them."
        )
    _check_patterns(layers, options.modules)
    schemes = options.schemes()
    session = Session(seed)
    # The first step of delayed scaling has no past, so each cast agrees like one by current values.
    reduce = _maximum(mesh.group("tp")) if options.reduce_amax or schemes.delayed else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    histories: dict[tuple[str, ...], Reduce | None] = {}
    checked: set[tuple[torch.device, torch.dtype]] = set()
    # Their backward writes the gradients of queries and keys, which are cast for the products that made these.
    rotations = [module for module in model.modules() if isinstance(module, Rotary)]
    for index, layer in layers.items():
        if not options.first_layers <= index < total - options.last_layers:
            continue
        # What makes an input also measures its largest magnitude. The cast then reads the input
        # once instead of twice.
        if kind.wants_magnitudes and schemes.one_scale and not schemes.delayed:
            for maker in [*_makers(layer), *rotations]:
                maker.backend = measuring(maker.backend)
        for name, module in _linears(layer):
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.modules):
                continue
            weight = module.weight
            _check_sizes(f"layers.{index}.{name}", weight, schemes)
            # Once per device and dtype: the answer depends on nothing else.
            if not options.emulate and (weight.device, weight.dtype) not in checked:
                kind.check_products(weight, schemes)
                checked.add((weight.device, weight.dtype))
            holders = (specs or {}).get(names[id(weight)], DENSE).holders
            if schemes.delayed and holders not in histories:
                # One function per set of ranks: layers that share it share one all-reduce per step.
                histories[holders] = _maximum(mesh.group(*holders))
            state_of(weight).precision = precision = kind(
                schemes,
                session,
                emulate=options.emulate,
                margin=options.margin,
                history=options.history or STEPS,
                primary=options.primary_weights,
                reduce_amax=(
                    # A row-split layer divides the input features: magnitudes over these need its peers. A column-split
                    # one divides the output features.
                    reduce if isinstance(module, RowLinear) else None,
                    reduce if isinstance(module, ColumnLinear) else None,
                ),
                reduce_history=histories.get(holders),
            )
            if precision.history is not None:
                # Memory now, on all ranks: an expert that gets no tokens must still take part in the all-reduce.
                precision.history.place(weight.device)
    return session


def remove_low_precision(model: nn.Module) -> None:
    """Let every weight multiply in its own dtype again, also if an earlier run has changed that."""
    for parameter in model.parameters():
        if (state := known_state(parameter)) is not None:
            state.precision = None
    # Modules that measured would go on for nobody.
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm | Activation | Rotary):
            module.backend = measuring(module.backend, wanted=False)


def _makers(layer: nn.Module) -> list[RMSNorm | LayerNorm | Activation]:
    """Return the modules that produce the inputs of a layer's linear layers.

    Norms of queries and keys are not included; they lie deeper in the layer.
    """
    norms = [module for module in layer.children() if isinstance(module, RMSNorm | LayerNorm)]
    return norms + [module for module in layer.modules() if isinstance(module, Activation)]


def _linears(layer: nn.Module) -> list[tuple[str, Linear | ColumnLinear | RowLinear]]:
    modules = layer.named_modules()
    return [(name, module) for name, module in modules if isinstance(module, Linear | ColumnLinear | RowLinear)]


def _check_patterns(layers: dict[int, nn.Module], patterns: Sequence[str]) -> None:
    names = dict.fromkeys(name for layer in layers.values() for name, _ in _linears(layer))
    for pattern in patterns:
        if layers and not fnmatch.filter(names, pattern):
            raise ConfigurationError(
                f"pattern {pattern!r} matches no linear layer inside a layer; there are {', '.join(names) or 'none'}."
                + nearest(pattern, names)
            )


def _check_sizes(name: str, weight: Tensor, schemes: Recipe) -> None:
    multiple = max(schemes.weight.multiple, schemes.weight_t.multiple)
    if any(size % multiple for size in weight.shape):
        raise ConfigurationError(
            f"{name} has a weight of {tuple(weight.shape)} on this rank, and recipe {schemes.name!r} needs multiples "
            f"of {multiple}. Change the sizes or tp, or leave the layer out with modules=..."
        )


def _maximum(group: ProcessGroup | None) -> Reduce | None:
    if group is None:
        return None

    def reduce(amax: Tensor) -> None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)

    return reduce

"""Choose the linear layers of a model that multiply in 8 or 4 bits, and the ranks over which their scales agree."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError, nearest
from megalight.nn import Activation, LayerNorm, Linear, RMSNorm, Rotary
from megalight.nn.moe import Dispatcher, Experts, MoE
from megalight.ops.common import measuring
from megalight.ops.fp8_attention import Spec as AttentionSpec
from megalight.ops.grouped_linear.low_precision import OneByOne, StackPrecision
from megalight.ops.grouped_linear.together import Together
from megalight.ops.linear.low_precision import LowPrecision, Reduce, Session
from megalight.ops.parameter import known_state, stack_precision_of, state_of
from megalight.ops.quantize.history import STEPS, AmaxHistory
from megalight.ops.quantize.recipes import Recipe, recipe
from megalight.parallel.attention_precision import check_fp8_attention, give_fp8_attention, remove_fp8_attention
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.column import ColumnLinear
from megalight.parallel.tensor.row import RowLinear

MAX_MARGIN = 14
"""Largest margin: 448 / 2^14 is the smallest such quotient that e4m3 holds with all its bits."""

TOWERS = ("language", "vision")
TOWER = "embed.tower."
"""What names of the layers of a vision tower begin with."""

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
            layer never do, nor does a router. Experts are ``mlp.experts.up`` and ``mlp.experts.down``; the matrices of
            each are cast on their own. Layers of a vision tower begin with ``tower.`` (``tower.mlp.*``).
        towers: which layers of a model that reads images use low precision: ``language``, ``vision`` (the vision
            tower), or both. ``first_layers`` and ``last_layers`` are of the language model.
        reduce_amax: scales that span features of several ``tp`` (experts: ``etp``) ranks agree, so that results do not
            depend on it.
            This costs one small all-reduce per cast. For ``tensorwise`` and ``rowwise``; ``delayed`` always agrees: in
            the first step per cast (experts: in every step), later once a step over all ranks that hold the weight or a
            part of it.
        primary_weights: store weights of these layers as 8-bit codes during training. The optimizer's masters are cast
            with the scale of the whole weight, the codes are sent to the data-parallel ranks, and no rank holds the
            weights in their own dtype. For ``tensorwise`` and ``delayed``; their weights are then scaled by the current
            values. Not for experts. None: data-parallel ranks that gather weights gather codes, where ``tensorwise`` is
            the recipe of our own products; masters are then rounded to the dtype of the weights first, so that no value
            differs from False. Experts keep their dtype, and so do all weights where hooks may read them. False:
            weights keep their dtype.
        experts_together: run all experts of a stack in one product, also large ones, which are faster one by one. The
            host then never waits for their numbers of rows: so recorded steps need it. For ``tensorwise``, ``delayed``
            and ``rowwise``.
        router_padding_for_quantization: fill up the tokens of each expert with zeros to a multiple of 16 (``mxfp8``:
            32, ``nvfp4``: 128) when they are brought to it. Casts then need no padding of their own.
        moe_router_padding_for_fp8: the old name. It acts, with a warning.
        fp8_attention: attention of these layers multiplies in 8 bits, too: queries, keys, values and weights in e4m3,
            the gradient of the output and of the scores in the format of gradients (e5m2, or with ``formats="e4m3"``
            e4m3). Each tensor has one scale, by its current values, of each rank's own heads, whatever the recipe. For
            equally long sequences without windows, soft caps, sinks, dropout or context parallelism, and heads of a
            multiple of 16 up to 128. Its kernels are TransformerEngine's, from Blackwell on; elsewhere it is emulated.
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
    towers: Sequence[str] = ("language",)
    reduce_amax: bool = False
    primary_weights: bool | None = None
    experts_together: bool = False
    router_padding_for_quantization: bool = False
    moe_router_padding_for_fp8: bool | None = None
    fp8_attention: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        self._take_old_names()
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
        if self.fp8_attention and self.reduce_amax:
            raise ConfigurationError(
                "fp8_attention=True: the scales of attention are of each rank's own heads, and reduce_amax=True asks "
                "for results that do not depend on tp; leave one of the two out."
            )
        if self.experts_together and self.recipe not in ("tensorwise", "delayed", "rowwise"):
            raise ConfigurationError(
                f"experts_together=True: recipe {self.recipe!r} has products of one expert only; leave it out, or "
                "choose 'tensorwise', 'delayed' or 'rowwise'."
            )

    def _take_old_names(self) -> None:
        if (old := self.moe_router_padding_for_fp8) is None:
            return
        warnings.warn(
            f"LowPrecisionOptions: moe_router_padding_for_fp8={old} is an old name; write "
            f"router_padding_for_quantization={old}.",
            FutureWarning,
            stacklevel=4,
        )
        object.__setattr__(self, "router_padding_for_quantization", old)
        object.__setattr__(self, "moe_router_padding_for_fp8", None)

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
        if isinstance(self.towers, str) or not self.towers or set(self.towers) - set(TOWERS):
            raise ConfigurationError(
                f"towers={self.towers!r}; give a list of {' and '.join(TOWERS)}, or one of them in a list."
            )
        if "language" not in self.towers and (self.first_layers or self.last_layers):
            raise ConfigurationError(
                f"first_layers={self.first_layers} and last_layers={self.last_layers} are of the language model, and "
                f"towers={list(self.towers)}; leave them out."
            )
        if isinstance(self.modules, str):
            raise ConfigurationError(f"modules={self.modules!r} is one string; give a list: [{self.modules!r}].")
        if not self.modules:
            raise ConfigurationError(
                f"modules={self.modules!r} names no layer, so that none would multiply in low precision; give patterns "
                "such as 'mlp.*', leave modules out for all layers, or choose another precision."
            )


def check_low_precision(model: nn.Module, options: LowPrecisionOptions) -> None:
    """Check that a model fits, before there are processes.

    Args:
        model: the whole model, split as one rank would; without values.

    Raises:
        ConfigurationError: as for :func:`apply_low_precision`.
    """
    layers = _language_layers(model, options)
    if "vision" in options.towers and not tower_layers_of(model):
        raise ConfigurationError(
            f"towers={list(options.towers)}, and {type(model).__name__} has no vision tower; leave out 'vision'."
        )
    chosen = _chosen(model, layers, options, len(layers))
    _check_names(_own_names(model, layers, options), options)
    if options.fp8_attention:
        check_fp8_attention(chosen)
    schemes = options.schemes()
    for path, layer in chosen.items():
        for name, weight, *_ in _weights_of(path, layer):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.modules):
                _check_sizes(_place(path, name), weight, schemes)


def options_of_part(model: nn.Module, options: LowPrecisionOptions, part: str) -> LowPrecisionOptions | None:
    """Return the options of a part of a model whose parts have layouts of their own; None: its layers keep their dtype.

    Args:
        model: the whole model, before it is divided or split.
        options: those of the whole.
        part: ``language``, or ``vision`` (the vision tower).

    Raises:
        ConfigurationError: as :func:`apply_low_precision` for the whole model.
    """
    names = _own_names(model, _language_layers(model, options), options)
    _check_names(names, options)
    own = [name for name in names if name.startswith("tower.") == (part == "vision")]
    modules = tuple(pattern for pattern in options.modules if fnmatch.filter(own, pattern))
    if not modules:
        return None
    found = replace(options, towers=(part,), modules=modules)
    if part == "vision":  # without experts, and without the language model's first and last layers
        return replace(
            found, first_layers=0, last_layers=0, experts_together=False, router_padding_for_quantization=False
        )
    return found


def _language_layers(model: nn.Module, options: LowPrecisionOptions) -> dict[int, nn.Module]:
    """Return the layers of the language model. Where only the tower is chosen, there may be none."""
    return layers_of(model, "low precision" if "language" in options.towers else None)


def _chosen(
    model: nn.Module, layers: Mapping[int, nn.Module], options: LowPrecisionOptions, total: int
) -> dict[str, nn.Module]:
    """Return the layers that use low precision by name; ``total``: number of layers of the whole model."""
    tower = tower_layers_of(model) if "vision" in options.towers else {}
    if "language" not in options.towers:
        return tower
    if options.first_layers + options.last_layers >= total:
        raise ConfigurationError(
            f"first_layers={options.first_layers} and last_layers={options.last_layers} leave none of {total} layers; "
            "lower them."
        )
    chosen = {
        f"layers.{index}": layer
        for index, layer in layers.items()
        if options.first_layers <= index < total - options.last_layers
    }
    # layers of multi-token prediction are neither the first nor the last of the model
    return {**tower, **chosen, **depth_layers_of(model)}


def apply_low_precision(
    model: nn.Module,
    options: LowPrecisionOptions,
    mesh: ParallelMesh,
    num_layers: int | None = None,
    kind: type[LowPrecision] = LowPrecision,
    specs: Mapping[str, ShardSpec] | None = None,
    seed: int = 0,
    tower_mesh: ParallelMesh | None = None,
) -> Session:
    """Give the weights of linear layers a low precision.

    Args:
        model: this rank's part, on its device; its ``layers`` are named by global index.
        num_layers: number of layers of the whole model; None: those of ``model``.
        kind: the class that casts and multiplies.
        specs: what the parameters of ``model`` hold, by name. Those without a spec are split by the mesh's dense view.
        seed: seed of stochastic rounding, equal on all ranks.
        tower_mesh: the mesh of the layers of a vision tower. None: ``mesh``.

    Returns:
        the session that the layers share; run steps inside its
        :meth:`~megalight.ops.linear.low_precision.Session.step`.

    Raises:
        ConfigurationError: no layer is left, a pattern matches nothing, sizes are not divisible, or an option does not
            go with experts.
        BackendError: the device has no such products.
    """
    # An earlier run may have chosen other layers.
    remove_low_precision(model)
    layers = _language_layers(model, options)
    chosen = _chosen(model, layers, options, len(layers) if num_layers is None else num_layers)
    _check_names(_names(_own_names(model, layers, options), mesh), options)
    schemes = options.schemes()
    session = Session(seed)
    # The first step of delayed scaling has no past, so each cast agrees like one by current values.
    agrees = options.reduce_amax or schemes.delayed
    meshes = {False: mesh, True: tower_mesh or mesh}  # of the language model, and of the tower
    reduce = {
        (tower, axis): _maximum(own.group(axis)) if agrees else None
        for tower, own in meshes.items()
        for axis in ("tp", "etp")
    }
    primary = options.primary_weights
    if primary is None and (kind is not LowPrecision or schemes.delayed or not schemes.one_scale):
        primary = False  # scales of past steps are not those of codes; of two sets of codes neither could be sent alone
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    histories: dict[tuple[bool, tuple[str, ...]], Reduce | None] = {}
    checked: set[tuple[torch.device, torch.dtype]] = set()
    # Their backward writes the gradients of queries and keys, which are cast for the products that made these.
    rotations: dict[bool, list[Rotary]] = {True: [], False: []}
    for name, module in model.named_modules():
        if isinstance(module, Rotary):
            rotations[name.startswith(TOWER)].append(module)
    for path, layer in chosen.items():
        in_tower = path.startswith(TOWER)
        # What makes an input also measures its largest magnitude. The cast then reads the input
        # once instead of twice.
        if kind.wants_magnitudes and schemes.one_scale and not schemes.delayed:
            for maker in [*_makers(layer), *rotations[in_tower]]:
                maker.backend = measuring(maker.backend)
        for name, weight, splits_in, splits_out in _weights_of(path, layer):
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.modules):
                continue
            _check_sizes(_place(path, name), weight, schemes)
            # Once per device and dtype: the answer depends on nothing else.
            if not options.emulate and (weight.device, weight.dtype) not in checked:
                kind.check_products(weight, schemes)
                checked.add((weight.device, weight.dtype))
            holders = (specs or {}).get(names[id(weight)], DENSE).holders
            if schemes.delayed and (in_tower, holders) not in histories:
                # One function per set of ranks: layers that share it share one all-reduce per step.
                histories[in_tower, holders] = _maximum(meshes[in_tower].group(*holders))
            shared: dict[str, Any] = {
                "emulate": options.emulate,
                "margin": options.margin,
                # A row-split layer divides the input features: magnitudes over these need its peers. A column-split one
                # divides the output features.
                "reduce_amax": (
                    None if splits_in is None else reduce[in_tower, splits_in],
                    None if splits_out is None else reduce[in_tower, splits_out],
                ),
                "reduce_history": histories.get((in_tower, holders)),
            }
            state, steps = state_of(weight), options.history or STEPS
            if weight.dim() == 3:
                state.stack_precision = _stack(kind, schemes, session, weight, steps, options.experts_together, shared)
            else:
                state.precision = kind(schemes, session, history=steps, primary=primary, **shared)
            history = (state.precision or state.stack_precision).history  # type: ignore[union-attr]
            if history is not None:
                # Memory now, on all ranks: an expert that gets no tokens must still take part in the all-reduce.
                history.place(weight.device)
        for experts in layer.modules():
            if isinstance(experts, Experts):
                _tell(experts, schemes.alignment if options.router_padding_for_quantization else 1)
    if options.fp8_attention:
        give_fp8_attention(chosen, _attention(chosen, options), emulate=options.emulate)
    return session


def _attention(layers: Mapping[str, nn.Module], options: LowPrecisionOptions) -> AttentionSpec:
    """Return what is asked of the attention of these layers, without what each layer says itself."""
    weight = next(weight for path, layer in layers.items() for _, weight, *_ in _weights_of(path, layer))
    return AttentionSpec(
        weight.device.type,
        weight.dtype,
        0,
        gradient="e4m3" if options.formats == "e4m3" else "e5m2",
        power=options.power_of_two,
    )


def _tell(experts: Experts, alignment: int) -> None:
    """Tell the dispatcher what the products of these experts need."""
    stacks = [(weight, found) for weight in (experts.up, experts.down) if (found := stack_precision_of(weight))]
    if stacks:
        experts.dispatcher.alignment = alignment
        experts.dispatcher.tells_sizes = any(precision.wants_sizes(weight) for weight, precision in stacks)


def _stack(
    kind: type[LowPrecision],
    schemes: Recipe,
    session: Session,
    weight: Tensor,
    steps: int,
    together: bool,
    shared: Mapping[str, Any],
) -> StackPrecision:
    """Return the precision of a stack of experts: all at once if our own products serve the recipe."""
    count = len(weight)
    if kind is LowPrecision and Together.why_not(weight, schemes, shared["emulate"]) is None:
        return Together(schemes, session, count=count, history=steps, always=together, **shared)
    if together:
        raise ConfigurationError(
            f"experts_together=True: the products of {kind.__name__} on {weight.device.type} take one expert at a "
            "time; leave it out."
        )
    if not schemes.delayed:
        return OneByOne([kind(schemes, session, **shared) for _ in range(count)])
    history = AmaxHistory(steps, count)
    history.place(weight.device)
    return OneByOne([kind(schemes, session, history=part, **shared) for part in history.weights], history)


def remove_low_precision(model: nn.Module) -> None:
    """Let every weight multiply in its own dtype again, also if an earlier run has changed that."""
    remove_fp8_attention(model)
    for parameter in model.parameters():
        if (state := known_state(parameter)) is not None:
            state.precision = state.stack_precision = None
    # Modules that measured would go on for nobody.
    for module in model.modules():
        if isinstance(module, Dispatcher):
            module.alignment, module.tells_sizes = 1, False
        if isinstance(module, RMSNorm | LayerNorm | Activation | Rotary):
            module.backend = measuring(module.backend, wanted=False)


def _makers(layer: nn.Module) -> list[RMSNorm | LayerNorm | Activation]:
    """Return the modules that produce the inputs of a layer's linear layers.

    Norms of queries and keys are not included; they lie deeper in the layer.
    """
    norms = [module for module in layer.children() if isinstance(module, RMSNorm | LayerNorm)]
    return norms + [module for module in layer.modules() if isinstance(module, Activation)]


class _Weight(NamedTuple):
    """A weight that can multiply in low precision.

    Attributes:
        name: its name inside the layer, as patterns see it.
        weight: ``[out, in]``, or ``[E, out, in]`` of experts.
        splits_in, splits_out: mesh axis over which its input or output features are divided.
    """

    name: str
    weight: Tensor
    splits_in: str | None = None
    splits_out: str | None = None


def _weights(layer: nn.Module) -> Iterator[_Weight]:
    # A shared expert's gate has one output feature. No product in 8 bits has so few.
    gates = [module.shared_gate for module in layer.modules() if isinstance(module, MoE)]
    for name, module in layer.named_modules():
        if isinstance(module, Experts):
            yield _Weight(f"{name}.up", module.up, splits_out="etp")
            yield _Weight(f"{name}.down", module.down, splits_in="etp")
        elif isinstance(module, ColumnLinear):
            yield _Weight(name, module.weight, splits_out="tp")
        elif isinstance(module, RowLinear):
            yield _Weight(name, module.weight, splits_in="tp")
        elif isinstance(module, Linear) and not any(module is gate for gate in gates):
            yield _Weight(name, module.weight)


def _weights_of(path: str, layer: nn.Module) -> Iterator[_Weight]:
    """Yield the weights of a layer, with ``tower.`` before the names of those of a vision tower."""
    for each in _weights(layer):
        yield each._replace(name=f"tower.{each.name}") if path.startswith(TOWER) else each


def _place(path: str, name: str) -> str:
    """Return the name of a weight in the model."""
    return f"{path}.{name.removeprefix('tower.') if path.startswith(TOWER) else name}"


def _own_names(model: nn.Module, layers: Mapping[int, nn.Module], options: LowPrecisionOptions) -> dict[str, bool]:
    """Return the names of weights in the layers of the towers, and whether they are of experts."""
    every = {f"layers.{index}": layer for index, layer in layers.items()} if "language" in options.towers else {}
    if "vision" in options.towers:
        every |= tower_layers_of(model)
    return {name: weight.dim() == 3 for path, layer in every.items() for name, weight, *_ in _weights_of(path, layer)}


def _names(own: dict[str, bool], mesh: ParallelMesh) -> dict[str, bool]:
    """Return the names of weights in the layers of all pipeline stages, and whether they are of experts."""
    stages = [own]
    # Dense layers and layers with experts may be on different stages: all must come to the same answer.
    if (group := mesh.group("pp")) is not None:
        stages = [own] * group.size()
        dist.all_gather_object(stages, own, group=group)
    return {name: stacked for stage in stages for name, stacked in stage.items()}


def _check_names(names: Mapping[str, bool], options: LowPrecisionOptions) -> None:
    chosen: set[str] = set()
    for pattern in options.modules:
        if not (matching := fnmatch.filter(names, pattern)):
            raise ConfigurationError(
                f"pattern {pattern!r} matches no linear layer inside a layer; there are {', '.join(names) or 'none'}."
                + nearest(pattern, names)
            )
        chosen.update(matching)
    experts = [name for name in names if names[name] and name in chosen]
    if options.primary_weights and experts:
        raise ConfigurationError(
            f"primary_weights=True stores a weight as codes with one scale, and {', '.join(experts)} have one for each "
            "expert. Leave the experts out with modules=..., or leave out primary_weights."
        )
    for option in ("router_padding_for_quantization", "experts_together"):
        if getattr(options, option) and not experts:
            raise ConfigurationError(
                f"{option}=True, but no experts multiply in low precision here. Leave it out, or add their layers to "
                "modules=..."
            )


def _check_sizes(name: str, weight: Tensor, schemes: Recipe) -> None:
    multiple = max(schemes.weight.multiple, schemes.weight_t.multiple)
    if any(size % multiple for size in weight.shape[-2:]):
        raise ConfigurationError(
            f"{name} has a weight of {tuple(weight.shape[-2:])} on this rank, and recipe {schemes.name!r} needs "
            f"multiples of {multiple}. Change the sizes or tp (experts: etp), or leave the layer out with modules=..."
        )


def _maximum(group: ProcessGroup | None) -> Reduce | None:
    if group is None:
        return None

    def reduce(amax: Tensor) -> None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)

    return reduce

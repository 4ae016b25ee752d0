"""GEMMs in 8 or 4 bits: what users choose, which weights have them, and the ranks over which scales agree."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError, nearest, nearest_pattern
from megalight.nn import MLP, Activation, Attention, InnerAttention, LayerNorm, Linear, RMSNorm, Rotary
from megalight.nn.linear import Fusion
from megalight.nn.moe import Dispatcher, Experts, MoE
from megalight.ops.common import measuring
from megalight.ops.fp8_attention import FP8Attention, FP8AttentionSpec, sizes_why_not
from megalight.ops.fp8_attention import FP8AttentionSpec as AttentionSpec
from megalight.ops.grouped_linear.low_precision import OneByOne, StackPrecision, stack_precision_of
from megalight.ops.grouped_linear.low_precision_stacks import Together
from megalight.ops.linear.low_precision import LowPrecision, Reduce, Session
from megalight.ops.parameter import known_state, state_of
from megalight.ops.quantize.amax_history import STEPS, AmaxHistory
from megalight.ops.quantize.recipes import QuantizationRecipe, recipe
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear

MAX_MARGIN = 14
"""Largest margin: 448 / 2^14 is the smallest such quotient that e4m3 holds with all its bits."""

TOWERS = ("language", "vision")


@dataclass(frozen=True)
class LowPrecisionOptions:
    """User options for GEMMs in 8 or 4 bits.

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
        primary_weights: store weights of these layers as 8-bit values during training. The optimizer's masters are cast
            with the scale of the whole weight, the quantized values are sent to the data-parallel ranks, and no rank
            holds the weights in their own dtype. For ``tensorwise`` and ``delayed``. Not for experts. None: with these
            recipes of our own products, quantized values where they spare messages or memory: ranks gather weights, or
            masters are wider copies. Masters are then rounded to the dtype of the weights first, so that no value
            differs from False. Experts keep their dtype, and so do all weights where hooks may read them. False:
            weights keep their dtype.
        experts_together: run all experts of a stack in one product, also large ones, which are faster one by one. The
            host then never waits for their numbers of rows: so recorded steps need it. For ``tensorwise``, ``delayed``
            and ``rowwise``.
        router_padding_for_quantization: fill up the tokens of each expert with zeros to a multiple of 16 (``mxfp8``:
            32, ``nvfp4``: 128) when they are brought to it. Casts then need no padding of their own.
        fp8_attention: attention of these layers multiplies in 8 bits, too. Queries, keys, values and weights are in
            e4m3. The gradients of the output and of the scores are in the format of gradients: e5m2, or e4m3 with
            ``formats="e4m3"``. Whatever the recipe, each tensor has one scale, by the current values of each rank's
            own heads. It needs equally long sequences without windows, soft caps, sinks, dropout or context
            parallelism, and heads of a multiple of 16 features up to 128. Its kernels are TransformerEngine's, from
            Blackwell on; elsewhere it is emulated.
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
    fp8_attention: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        schemes = self.schemes()
        self._check_numbers()
        self._check_modules()
        if self.margin and not schemes.one_scale:
            raise ConfigurationError(f"margin={self.margin} does nothing for recipe {self.recipe!r}; leave it out.")
        if self.history is not None and not schemes.delayed:
            raise ConfigurationError(
                f"history={self.history} does nothing for recipe {self.recipe!r}; leave it out, or choose 'delayed'."
            )
        if self.reduce_amax and not schemes.agrees:
            raise ConfigurationError(f"reduce_amax does nothing for recipe {self.recipe!r}; leave it out.")
        if self.primary_weights and not schemes.one_scale:
            raise ConfigurationError(
                f"primary_weights=True keeps each weight quantized once, and recipe {self.recipe!r} needs two, as a "
                "weight and its transpose have different scales; choose 'tensorwise' or 'delayed', or leave it out."
            )
        if self.fp8_attention and self.reduce_amax:
            raise ConfigurationError(
                "fp8_attention=True: the scales of attention are of each rank's own heads, and reduce_amax=True asks "
                "for results that do not depend on tp; leave one of the two out."
            )
        if self.experts_together and not schemes.whole_rows:
            raise ConfigurationError(
                f"experts_together=True: recipe {self.recipe!r} has products of one expert only; leave it out, or "
                "choose 'tensorwise', 'delayed' or 'rowwise'."
            )

    def schemes(self) -> QuantizationRecipe:
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
        words = [self.towers] if isinstance(self.towers, str) else list(self.towers)
        unknown = [word for word in words if word not in TOWERS]
        if unknown or not words or isinstance(self.towers, str):
            wrong = f"; {unknown[0]!r} is no tower" if unknown else ""
            raise ConfigurationError(
                f"towers={self.towers!r}{wrong}. Give a list of {' and '.join(TOWERS)}, or one of them in a list."
                + (nearest(str(unknown[0]), TOWERS) if unknown else "")
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


TOWER = "embed.tower."
"""What names of the layers of a vision tower begin with."""


def language_layers(model: nn.Module, options: LowPrecisionOptions) -> dict[int, nn.Module]:
    """Return the layers of the language model. Where only the tower is chosen, there may be none."""
    return layers_of(model, "low precision" if "language" in options.towers else None)


def chosen_layers(
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


class Weight(NamedTuple):
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


def _weights(layer: nn.Module) -> Iterator[Weight]:
    # A shared expert's gate has one output feature. No GEMM in 8 bits has so few.
    gates = [module.shared_gate for module in layer.modules() if isinstance(module, MoE)]
    for name, module in layer.named_modules():
        if isinstance(module, Experts):
            yield Weight(f"{name}.up", module.up, splits_out="etp")
            yield Weight(f"{name}.down", module.down, splits_in="etp")
        elif isinstance(module, ColumnLinear):
            yield Weight(name, module.weight, splits_out="tp")
        elif isinstance(module, RowLinear):
            yield Weight(name, module.weight, splits_in="tp")
        elif isinstance(module, Linear) and not any(module is gate for gate in gates):
            yield Weight(name, module.weight)


def weights_of(path: str, layer: nn.Module) -> Iterator[Weight]:
    """Yield the weights of a layer, with ``tower.`` before the names of those of a vision tower."""
    for each in _weights(layer):
        yield each._replace(name=f"tower.{each.name}") if path.startswith(TOWER) else each


def weights_to_cast(
    path: str, layer: nn.Module, options: LowPrecisionOptions, kind: type[LowPrecision]
) -> Iterator[Weight]:
    """Yield the weights of a layer that patterns of the options name; ``kind`` will cast them.

    Raises:
        ConfigurationError: it cannot cast one of this size.
    """
    schemes = options.schemes()
    for each in weights_of(path, layer):
        if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in options.modules):
            if each.weight.dim() == 3:
                _check_sizes(_place(path, each.name), each.weight, schemes, "etp")
            elif not kind.takes_any_size:
                _check_sizes(_place(path, each.name), each.weight, schemes, "tp, take implementation='own'")
            yield each


def _place(path: str, name: str) -> str:
    """Return the name of a weight in the model."""
    return f"{path}.{name.removeprefix('tower.') if path.startswith(TOWER) else name}"


def own_names(model: nn.Module, layers: Mapping[int, nn.Module], options: LowPrecisionOptions) -> dict[str, bool]:
    """Return the names of weights in the layers of the towers, and whether they are of experts."""
    every = {f"layers.{index}": layer for index, layer in layers.items()} if "language" in options.towers else {}
    if "vision" in options.towers:
        every |= tower_layers_of(model)
    return {name: weight.dim() == 3 for path, layer in every.items() for name, weight, *_ in weights_of(path, layer)}


def names_of_stages(own: dict[str, bool], mesh: ParallelMesh) -> dict[str, bool]:
    """Return the names of weights in the layers of all pipeline stages, and whether they are of experts."""
    stages = [own]
    # Dense layers and layers with experts may be on different stages: all must come to the same answer.
    if (group := mesh.group("pp")) is not None:
        stages = [own] * group.size()
        dist.all_gather_object(stages, own, group=group)
    return {name: stacked for stage in stages for name, stacked in stage.items()}


def check_names(names: Mapping[str, bool], options: LowPrecisionOptions) -> None:
    """Check that patterns and options find what they act on among the names of weights.

    Raises:
        ConfigurationError: one does not.
    """
    chosen: set[str] = set()
    for pattern in options.modules:
        if not (matching := fnmatch.filter(names, pattern)):
            raise ConfigurationError(
                f"pattern {pattern!r} matches no linear layer inside a layer; there are {', '.join(names) or 'none'}."
                + nearest_pattern(pattern, names)
            )
        chosen.update(matching)
    experts = [name for name in names if names[name] and name in chosen]
    if options.primary_weights and experts:
        raise ConfigurationError(
            f"primary_weights=True stores a weight quantized with one scale, and {', '.join(experts)} have one for "
            "each expert. Leave the experts out with modules=..., or leave out primary_weights."
        )
    for option in ("router_padding_for_quantization", "experts_together"):
        if getattr(options, option) and not experts:
            raise ConfigurationError(
                f"{option}=True, but no experts multiply in low precision here. Leave it out, or add their layers to "
                "modules=..."
            )


def _check_sizes(name: str, weight: Tensor, schemes: QuantizationRecipe, change: str) -> None:
    multiple = schemes.multiple
    if any(size % multiple for size in weight.shape[-2:]):
        raise ConfigurationError(
            f"{name} has a weight of {tuple(weight.shape[-2:])} on this rank, and recipe {schemes.name!r} needs "
            f"multiples of {multiple} there. Change the sizes or {change}, or leave the layer out with modules=..."
        )


KERNELS = "transformer_engine"
"""The backend with real products, from Blackwell on. There is none of our own."""


def check_fp8_attention(layers: Mapping[str, nn.Module]) -> None:
    """Check that the attention of all layers can have 8-bit GEMMs.

    Args:
        layers: name -> layer.

    Raises:
        ConfigurationError: one cannot, or there is none.
    """
    found = 0
    for name, module in _cores(layers):
        found += 1
        reason = _why_not(module)
        if reason is not None:
            raise ConfigurationError(
                f"fp8_attention=True, and {name} {reason}; leave fp8_attention out, or leave these layers in their own "
                "dtype with first_layers and last_layers."
            )
    if not found:
        raise ConfigurationError(
            "fp8_attention=True, and no layer that multiplies in 8 bits has attention; leave it out."
        )


def give_fp8_attention(layers: Mapping[str, nn.Module], spec: FP8AttentionSpec, *, emulate: bool) -> None:
    """Let the attention of all layers multiply in 8 bits.

    Args:
        layers: name -> layer, which :func:`check_fp8_attention` found to fit.
        spec: device, dtype and format of gradients; the rest comes from each layer.
        emulate: compute in float64 from the decoded values.

    Raises:
        ConfigurationError: as for :func:`check_fp8_attention`.
        BackendError: the device has no such products.
    """
    check_fp8_attention(layers)
    for name, module in _cores(layers):
        assert isinstance(module, Attention) and isinstance(module.inner, InnerAttention)
        inner = module.inner
        asked = spec._replace(head_dim=module.head_dim, causal=inner.causal, scale=inner.scale)
        inner.fp8 = FP8Attention(name, asked, "reference" if emulate else KERNELS)


def remove_fp8_attention(model: nn.Module) -> None:
    """Let every attention multiply in the dtype of its queries again."""
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.fp8 = None


def _cores(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that holds an attention core, with its name in the model."""
    for path, layer in layers.items():
        for name, module in layer.named_modules():
            # Whatever has a core is looked at, also kinds of attention that are unknown here: none is passed over.
            if isinstance(getattr(module, "inner", None), nn.Module) and not isinstance(module.inner, Attention):
                yield f"{path}.{name}", module


def _why_not(module: nn.Module) -> str | None:
    inner = module.inner
    if type(module) is not Attention:
        return f"is {type(module).__name__}, which has products of its own"
    if type(inner) is not InnerAttention:
        return f"attends through {type(inner).__name__}, which divides sequences over ranks or has no 8-bit form"
    for name in ("window", "chunk", "softcap", "dropout", "mutual"):
        if value := getattr(inner, name):
            return f"has {name}={value!r}, which 8-bit attention lacks"
    if inner.softmax != "vanilla":
        return f"has softmax={inner.softmax!r}, and 8-bit attention has no sinks"
    return sizes_why_not(FP8AttentionSpec("cpu", torch.float32, module.head_dim))


DENSE = ShardSpec((), ())
"""The spec of a weight that nothing else is known of: its axes are those of dense layers."""


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
    layers = language_layers(model, options)
    chosen = chosen_layers(model, layers, options, len(layers) if num_layers is None else num_layers)
    check_names(names_of_stages(own_names(model, layers, options), mesh), options)
    session, alignment = Session(seed), options.schemes().alignment
    # The language model, and the tower.
    casts = {
        tower: _WeightCasts(options, kind, own, session) for tower, own in ((False, mesh), (True, tower_mesh or mesh))
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, layer in chosen.items():
        for each in weights_to_cast(path, layer, options, kind):
            spec = (specs or {}).get(names[id(each.weight)], DENSE)
            casts[path.startswith(TOWER)].give(each, spec.holders)
        for experts in layer.modules():
            if isinstance(experts, Experts):
                _tell(experts, alignment if options.router_padding_for_quantization else 1)
    _measure(model, chosen, options, kind)
    if options.schemes().delayed:
        for layer in chosen.values():
            _join(layer)
    if options.fp8_attention:
        give_fp8_attention(chosen, _attention(chosen, options), emulate=options.emulate)
    return session


class _WeightCasts:
    """What casts the weights of layers on one mesh. Layers share what their ranks do together.

    Args:
        kind: the class that casts and multiplies.
        session: that of all layers of the model.
    """

    def __init__(
        self, options: LowPrecisionOptions, kind: type[LowPrecision], mesh: ParallelMesh, session: Session
    ) -> None:
        self.options, self.kind, self.mesh, self.session = options, kind, mesh, session
        schemes = self.schemes = options.schemes()
        # The first step of delayed scaling has no past, so each cast agrees like one by current values.
        agrees = options.reduce_amax or schemes.delayed
        self._amax: dict[str | None, Reduce | None] = {None: None}
        """Axis over which features are divided -> what makes magnitudes over them agree."""
        for axis in ("tp", "etp"):
            self._amax[axis] = _maximum(mesh.group(axis)) if agrees else None
        self._histories: dict[tuple[str, ...], Reduce | None] = {}
        """Axes -> one function, with one all-reduce per step for all layers that share these ranks."""
        self._checked: set[tuple[torch.device, torch.dtype]] = set()
        self._primary = options.primary_weights
        if self._primary is None and not (kind.reads_quantized and schemes.one_scale):
            self._primary = False  # of two sets of quantized values, neither could be kept or sent alone

    def give(self, each: Weight, holders: tuple[str, ...]) -> None:
        """Let a weight be cast from now on.

        Args:
            holders: the axes along which ranks hold the weight, or a part of it.

        Raises:
            BackendError: its device has no such products.
        """
        weight, state, steps = each.weight, state_of(each.weight), self.options.history or STEPS
        self._check_products(weight)
        if self.schemes.delayed and holders not in self._histories:
            self._histories[holders] = _maximum(self.mesh.group(*holders))
        shared: dict[str, Any] = {
            "emulate": self.options.emulate,
            "margin": self.options.margin,
            # A row-split layer divides the input features: magnitudes over these need its peers. A column-split one
            # divides the output features.
            "reduce_amax": (self._amax[each.splits_in], self._amax[each.splits_out]),
            "reduce_history": self._histories.get(holders),
        }
        made: LowPrecision | StackPrecision
        if weight.dim() == 3:
            made = state.stack_precision = self._stack(weight, steps, shared)
        else:
            options = {"history": steps, "primary": self._primary, **shared}
            made = state.precision = self.kind(self.schemes, self.session, **options)
        if made.history is not None:
            # Memory now, on all ranks: an expert that gets no tokens must still take part in the all-reduce.
            made.history.place(weight.device)

    def _check_products(self, weight: Tensor) -> None:
        # Once per device and dtype: the answer depends on nothing else.
        key = weight.device, weight.dtype
        if not self.options.emulate and key not in self._checked:
            self.kind.check_products(weight, self.schemes)
            self._checked.add(key)

    def _stack(self, weight: Tensor, steps: int, shared: Mapping[str, Any]) -> StackPrecision:
        """Return the precision of a stack of experts: all at once if our own products serve the recipe."""
        count, together = len(weight), self.options.experts_together
        if self.kind is LowPrecision and Together.why_not(weight, self.schemes, shared["emulate"]) is None:
            return Together(self.schemes, self.session, count=count, history=steps, always=together, **shared)
        if together:
            raise ConfigurationError(
                f"experts_together=True: the products of {self.kind.__name__} on {weight.device.type} take one expert "
                "at a time; leave it out."
            )
        if not self.schemes.delayed:
            return OneByOne([self.kind(self.schemes, self.session, **shared) for _ in range(count)])
        history = AmaxHistory(steps, count)
        history.place(weight.device)
        parts = [self.kind(self.schemes, self.session, history=part, **shared) for part in history.weights]
        return OneByOne(parts, history)


def _attention(layers: Mapping[str, nn.Module], options: LowPrecisionOptions) -> AttentionSpec:
    """Return what is asked of the attention of these layers, without what each layer says itself."""
    weight = next(weight for path, layer in layers.items() for _, weight, *_ in weights_of(path, layer))
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


def _measure(
    model: nn.Module, chosen: Mapping[str, nn.Module], options: LowPrecisionOptions, kind: type[LowPrecision]
) -> None:
    """Let what makes an input also measure its largest magnitude: the cast then reads the input once, not twice."""
    schemes = options.schemes()
    if not kind.wants_magnitudes or not schemes.one_scale or schemes.delayed:
        return
    # Their backward writes the gradients of queries and keys, which are cast for the products that made these.
    rotations = [(name, module) for name, module in model.named_modules() if isinstance(module, Rotary)]
    for path, layer in chosen.items():
        beside = [module for name, module in rotations if name.startswith(TOWER) == path.startswith(TOWER)]
        for maker in [*_makers(layer), *beside]:
            maker.backend = measuring(maker.backend)


def _join(layer: nn.Module) -> None:
    """Tell activations which linear layers are beside them: where both cast, they may write quantized values only."""
    for module in layer.modules():
        if isinstance(module, MLP):
            module.act.fusion = Fusion(module.gate_up if module.act.gated else module.up, module.down)


def _makers(layer: nn.Module) -> list[RMSNorm | LayerNorm | Activation]:
    """Return the modules that produce the inputs of a layer's linear layers.

    Norms of queries and keys are not included; they lie deeper in the layer.
    """
    norms = [module for module in layer.children() if isinstance(module, RMSNorm | LayerNorm)]
    return norms + [module for module in layer.modules() if isinstance(module, Activation)]


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
        if isinstance(module, Activation):
            module.fusion = None


def _maximum(group: ProcessGroup | None) -> Reduce | None:
    if group is None:
        return None

    def reduce(amax: Tensor) -> None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)

    return reduce


def check_low_precision(
    model: nn.Module, options: LowPrecisionOptions, kind: type[LowPrecision] = LowPrecision
) -> None:
    """Check that a model fits, before there are processes.

    Args:
        model: the whole model, split as one rank would; without values.
        options: what a user chose.
        kind: the class that casts and multiplies.

    Raises:
        ConfigurationError: as for :func:`~.apply.apply_low_precision`.
    """
    layers = language_layers(model, options)
    if "vision" in options.towers and not tower_layers_of(model):
        raise ConfigurationError(
            f"towers={list(options.towers)}, and {type(model).__name__} has no vision tower; leave out 'vision'."
        )
    chosen = chosen_layers(model, layers, options, len(layers))
    check_names(own_names(model, layers, options), options)
    if options.fp8_attention:
        check_fp8_attention(chosen)
    for path, layer in chosen.items():
        list(weights_to_cast(path, layer, options, kind))  # it raises what is wrong with a weight


def options_of_part(model: nn.Module, options: LowPrecisionOptions, part: str) -> LowPrecisionOptions | None:
    """Return the options of a part of a model whose parts have layouts of their own; None: its layers keep their dtype.

    Args:
        model: the whole model, before it is divided or split.
        options: those of the whole.
        part: ``language``, or ``vision`` (the vision tower).

    Raises:
        ConfigurationError: as :func:`~.apply.apply_low_precision` for the whole model.
    """
    names = own_names(model, language_layers(model, options), options)
    check_names(names, options)
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

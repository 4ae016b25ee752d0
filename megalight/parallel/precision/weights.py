"""The weights that multiply in low precision: those of linear layers inside the layers that the options choose."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError, nearest_pattern
from megalight.nn import Linear
from megalight.nn.moe import Experts, MoE
from megalight.ops.linear.low_precision import LowPrecision
from megalight.ops.quantize.recipes import QuantizationRecipe
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision.options import LowPrecisionOptions
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear

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

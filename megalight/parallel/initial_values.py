"""Initial values of a parallel model, bitwise equal to the single-device model's in every layout.

Modules with ``initializers`` are drawn locally: only the tiles that this rank's pieces touch. Other modules are drawn
whole, one at a time, by their own methods, with a generator seeded by their name; the result is sliced. Everything is
drawn in float32, so that masters keep more precision than a half-precision parameter.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.errors import ConfigurationError
from megalight.nn.canonical import CanonicalPart, joined
from megalight.nn.init import draw, initializers, key
from megalight.parallel.shard import ShardSpec, take


@dataclass(frozen=True)
class SplitOrigin:
    """The single-device module that a parallel one replaces; initial values are drawn with it.

    Attributes:
        module: its parameters are on meta.
        parts: the canonical tensors of each parameter, by the parameter's own name.
    """

    module: nn.Module
    parts: Mapping[str, Sequence[CanonicalPart]]


@dataclass(frozen=True)
class Elsewhere:
    """The place of a parameter in the whole model, of a tied one whose own place is on another pipeline stage.

    Initial values are drawn there. A module that holds such a parameter has a dict ``elsewhere`` of them, by the
    parameter's name in it.

    Attributes:
        path: name of the module in the whole model.
        module: its parameters are on meta.
        local: name of the parameter in it.
    """

    path: str
    module: nn.Module
    local: str


def on_meta(module: nn.Module) -> nn.Module:
    """Copy a module's shell (without children), with its own parameters and buffers on meta."""
    shell = copy.copy(module)
    shell._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    shell._buffers = {
        name: None if b is None else torch.empty_like(b, device="meta") for name, b in module._buffers.items()
    }
    return shell


def unmaterialized(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype on ``device`` that uses the memory of one element.

    Such a parameter has its shape, dtype and device, so that optimizers can be created for it. All its elements are
    one NaN in memory.
    """
    # Strides of 0: one element serves the whole shape. A single element has its memory anyway.
    return unknown(like, device) if like.numel() < 2 else _fill(like, (), device).expand(like.shape)


def is_materialized(tensor: Tensor) -> bool:
    """Whether a tensor has memory for all its elements; a meta tensor has none."""
    return not tensor.is_meta and tensor.untyped_storage().nbytes() >= prod(tensor.shape) * tensor.element_size()


def unknown(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype on ``device`` without chosen values: NaN, or zero for integers."""
    return _fill(like, like.shape, device)


def _fill(like: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan if like.is_floating_point() else 0, dtype=like.dtype, device=device)


def materialize(model: nn.Module, device: torch.device | str, *, memory: bool = True) -> None:
    """Move a model to ``device`` in place. Meta tensors become NaN there; tied parameters stay tied.

    Args:
        memory: False: parameters on meta get the device, but no memory yet.
    """
    device = torch.empty(0, device=device).device  # adds the index of the current device
    moved: dict[int, nn.Parameter] = {}
    kept = []  # keeps replaced parameters alive: a freed one's id could be used again
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.device == device:
                continue
            kept.append(parameter)
            if id(parameter) not in moved:
                data = _on(device, parameter) if memory or not parameter.is_meta else unmaterialized(parameter, device)
                moved[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _on(device, buffer)


@torch.no_grad()
def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Copy rank 0's parameters and buffers to all ranks, as each process may have drawn its own. Meta tensors stay.

    Args:
        device: device from which tensors are sent, one at a time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            # A copy: `broadcast` overwrites it on other ranks, and needs contiguous memory.
            traveling = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            dist.broadcast(traveling, 0)
            tensor.copy_(traveling)


@torch.no_grad()
def initialize(
    model: nn.Module,
    specs: Mapping[str, ShardSpec],
    seed: int,
    *,
    on_values: Callable[[str, Tensor], None] | None = None,
    only: Collection[str] | None = None,
    later: Collection[str] = (),
) -> None:
    """Give every parameter and buffer of a materialized model its initial value.

    A module that cannot draw its values keeps those that it had.

    Args:
        model: parallel or not, on a real device.
        specs: the result of :func:`megalight.parallel.apply.parallelize` for it.
        seed: seed of the run.
        on_values: called with each parameter's name and its local values in float32, before they are rounded to the
            parameter's dtype. It fills the masters. A parameter without memory is not filled otherwise.
        only: canonical names; other tensors keep their values.
        later: local names of tensors that get their values from somebody else.

    Raises:
        ConfigurationError: a module has no values and no method to draw them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stated = {name: initializer for name, _, _, initializer in initializers(model)}
    away = _away(model)
    for name, place in away.items():
        stated.pop(name, None)
        if (initializer := getattr(place.module, "initializers", {}).get(place.local)) is not None:
            stated[name] = initializer
    give = on_values or (lambda name, values: None)
    for name, parameter in model.named_parameters():
        # A parameter with pieces of several tensors (q, k, v) is drawn if any of them is wanted.
        if name in stated and (only is None or any(piece.name in only for piece in specs[name].pieces)):
            # Zeros first: padding, which no piece covers, stays zero.
            values = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for piece in specs[name].pieces:
                # By canonical name and place in the whole tensor: every layout draws the same bits.
                box = draw(stated[name], piece.name, piece.shape, piece.offset, piece.size, seed, parameter.device)
                piece.view(values).copy_(box)
            _set(parameter, values)
            # Before rounding, so that masters of half-precision parameters begin with all bits of the draw.
            give(name, values)
    if only is not None:
        return
    drawn = {*stated, *later}
    parameters = dict(model.named_parameters())
    for name, place in away.items():
        if name not in drawn:
            found = _parts(place.module, place.local, specs[name])
            seeded = key(seed, found[0].name.rpartition(".")[0])
            whole = _drawn_whole(model, place.path, place.module, seeded, parameters[name].device)
            _take_drawn(name, parameters[name], whole._parameters[place.local], found, specs[name], give)
            drawn.add(name)
    for path, module in model.named_modules():
        mine = {local: names[id(p)] for local, p in module._parameters.items() if p is not None}
        wanted = {local: name for local, name in mine.items() if name not in drawn}
        if not wanted and not any(buffer is not None for buffer in module._buffers.values()):
            continue
        parts = {local: _parts(module, local, specs[name]) for local, name in wanted.items()}
        # The seed must be equal on all ranks: it follows from the whole module's first tensor, held here or not.
        first = next((found[0].name.rpartition(".")[0] for found in parts.values() if found), path)
        device = next(t.device for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        whole = _drawn_whole(model, path, module, key(seed, first), device)
        for local, name in wanted.items():
            _take_drawn(name, module._parameters[local], whole._parameters[local], parts[local], specs[name], give)
        for local, buffer in module._buffers.items():
            name = joined(path, local)
            if buffer is not None and name not in later:
                _copy_known(name, buffer, whole._buffers[local])
        drawn.update(wanted.values())


@torch.no_grad()
def compute_buffers(model: nn.Module) -> None:
    """Give buffers that checkpoints do not hold, such as frequencies of angles, the values of their module's method.

    Raises:
        ConfigurationError: a module has no method that computes them.
    """
    for path, module in model.named_modules():
        mine = {local: module._buffers[local] for local in module._non_persistent_buffers_set}
        unknown = {local: buffer for local, buffer in mine.items() if buffer is not None and _unknown(buffer)}
        if unknown:
            device = next(iter(unknown.values())).device
            whole = _drawn_whole(model, path, module, 0, device)
            for local, buffer in unknown.items():
                _copy_known(joined(path, local), buffer, whole._buffers[local])


def _away(model: nn.Module) -> dict[str, Elsewhere]:
    """Return the place in the whole model of each tied parameter that has another one on this pipeline stage."""
    found: dict[str, Elsewhere] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for local, place in getattr(module, "elsewhere", {}).items():
            found[names[id(module._parameters[local])]] = place
    return found


def _drawn_whole(model: nn.Module, path: str, module: nn.Module, seed: int, device: torch.device) -> nn.Module:
    """Return a whole copy of a module, drawn by its own methods: float32, NaN where they draw nothing."""
    origin = getattr(module, "origin", None)
    # The single-device module, as its own method draws shapes that only the whole module has.
    shell = on_meta(origin.module if isinstance(origin, SplitOrigin) else module)
    # Drawn where the model lives. Generators of other devices give other bits for the same seed.
    for local, parameter in shell._parameters.items():
        if parameter is not None:
            # In float32 for every dtype: a float32 and a bfloat16 model begin from the same draws.
            shell._parameters[local] = nn.Parameter(_on(device, parameter.detach().float()), requires_grad=False)
    for local, buffer in shell._buffers.items():
        if buffer is not None:
            shell._buffers[local] = _on(device, buffer)
    # The run's own random numbers must not change: values depend on the seed and the module's name only.
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=_accelerator(device)):
        torch.manual_seed(seed)
        for draws in _ways(model, path, shell):
            draws()
            # NaN marks what no method has filled: then the next method is tried.
            if not any(_unknown(t) for t in (*shell._parameters.values(), *shell._buffers.values())):
                break
    return shell


def _ways(model: nn.Module, path: str, shell: nn.Module) -> list[Callable[[], object]]:
    """Return functions that may draw a module: ``_init_weights`` of the nearest parent, then ``reset_parameters``."""
    ways: list[Callable[[], object]] = []
    steps = path.split(".") if path else []
    for end in range(len(steps), -1, -1):
        try:
            parent = model.get_submodule(".".join(steps[:end]))
        except AttributeError:  # on another pipeline stage
            continue
        around = getattr(parent, "_init_weights", None)
        # The nearest parent wins, as its method knows the type of this module best.
        if callable(around):
            ways.append(functools.partial(around, shell))
            break
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(shell, name, None)
        if callable(own):
            ways.append(own)
            break
    return ways


def _take_drawn(
    name: str,
    parameter: nn.Parameter | None,
    whole: nn.Parameter | None,
    parts: Sequence[CanonicalPart],
    spec: ShardSpec,
    give: Callable[[str, Tensor], None],
) -> None:
    """Keep this rank's part of a whole drawn parameter; a parameter that was not drawn keeps its value."""
    assert parameter is not None
    assert whole is not None
    if _unknown(whole):
        _copy_known(name, parameter, whole)
        give(name, parameter.detach().float())
        return
    # Every element is overwritten: `take` fills padding with zeros.
    values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    take(whole.detach(), parts, spec, values)
    _set(parameter, values)
    give(name, values)


def _set(parameter: nn.Parameter, values: Tensor) -> None:
    """Set a parameter. One without memory is sharded: its values go to ``on_values`` alone."""
    if is_materialized(parameter):
        parameter.copy_(values)


def _parts(module: nn.Module, local: str, spec: ShardSpec) -> Sequence[CanonicalPart]:
    """Return the canonical tensors of the whole parameter; a module that was not replaced holds them whole."""
    origin = getattr(module, "origin", None)
    if isinstance(origin, SplitOrigin):
        return origin.parts[local]
    return [CanonicalPart(local, piece.name, piece.shape, piece.start) for piece in spec.pieces]


def _copy_known(name: str, tensor: Tensor, drawn: Tensor | None) -> None:
    """Copy a drawn tensor. If it was not drawn, the target must have a value already."""
    assert drawn is not None
    if not _unknown(drawn):
        tensor.copy_(drawn)
    elif _unknown(tensor):
        raise ConfigurationError(
            f"{name} has no value and its module no way to make one; give the module a method reset_parameters() that "
            "fills its parameters and buffers, or a dict initializers from name to Normal, Uniform or Constant of "
            "megalight.nn.init, or build the model off the meta device."
        )


def _unknown(tensor: Tensor | None) -> bool:
    # Memory that nobody has filled is NaN on purpose; a count of 0 or an id cannot be told from a real value.
    return tensor is not None and tensor.is_floating_point() and bool(tensor.isnan().any())


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return unknown(tensor, device) if tensor.is_meta else tensor.detach().to(device)


def _accelerator(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type

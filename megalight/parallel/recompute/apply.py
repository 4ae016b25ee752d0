"""Apply activation recompute to a model chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from torch import nn

from megalight.errors import ConfigurationError
from megalight.parallel.layers import Override, depth_layers_of, layers_of, stacks_of, tower_layers_of
from megalight.parallel.recompute.options import DISCARDED, Layer, RecomputeOptions, check_pattern, selected
from megalight.parallel.recompute.regions import Discarding, RecomputeRegion, make_group


def check_recompute(model: nn.Module, recompute: RecomputeOptions, chunks: Iterable[Sequence[int]] = ()) -> None:
    """Check that ``recompute`` makes sense for a whole model, before it is cut into chunks.

    Its layers are those in ``layers``, or those of the models of ``transformers`` in it, towers included.

    Args:
        chunks: indices of the layers of each chunk, if the model will be cut.

    Raises:
        ConfigurationError: the model has no layers; a pattern matches nothing, or only modules for which recompute
            saves no memory; there are fewer layers than requested; layers of ``transformers`` recompute already.
    """
    if recompute.vision is not None:
        tower = list(tower_layers_of(model).items())
        if not tower:
            raise ConfigurationError(
                f"recompute.vision is set, and {type(model).__name__} has no vision tower; leave it out."
            )
        _check([tower], [], recompute.vision, "recompute.vision.modules")
    if recompute.granularity != "none":
        stacks, depths = _layers(model)
        _check(stacks, depths, recompute, "recompute.modules", chunks)


def _check(
    stacks: list[list[Layer]],
    depths: list[Layer],
    recompute: RecomputeOptions,
    option: str,
    chunks: Iterable[Sequence[int]] = (),
) -> None:
    chunks = list(chunks)
    layers = [layer for stack in stacks for layer in stack]
    for name, layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            raise ConfigurationError(
                f"{name} recomputes itself (gradient_checkpointing_enable), and would run three times with {option}. "
                "Call gradient_checkpointing_disable() on its model, or leave recompute out."
            )
    for stack in stacks if recompute.granularity == "full" else ():
        _check_number(stack, recompute)
        if sum(map(len, chunks)) == len(stack):  # the one that is cut; a tower is not
            for chunk in chunks:
                # Each chunk by itself: groups of layers do not reach over the edge of a chunk.
                _check_number([stack[index] for index in chunk], recompute)
    for pattern in recompute.modules:
        check_pattern(layers + depths, pattern, recompute.modules, option)


def apply_recompute(chunk: nn.Module, recompute: RecomputeOptions, *, whole: bool = True) -> None:
    """Apply recompute to one model chunk, in place; an earlier recompute is removed first.

    It acts only while gradients are enabled and the module is in training mode, so evaluation and generation do not
    change. Call it when modules are final (after ``parallelize``).

    Args:
        chunk: a model with ``layers``, a ``ModuleDict`` or ``ModuleList``, or one around models of ``transformers``.
        whole: the chunk is the whole model, so it must pass :func:`check_recompute`. A part of a model that was checked
            before may lack modules that a pattern names.

    Raises:
        ConfigurationError: as :func:`check_recompute`; more layers than the chunk has; a group of layers with forward
            hooks; a module whose ``forward`` other code has replaced.
    """
    # Removed first, as an override refuses a module whose forward is already replaced.
    for module in chunk.modules():
        # A forward on the instance hides that of the class; deleting it brings the class's back.
        if isinstance(module.__dict__.get("forward"), Override):
            del module.forward
    if whole:
        check_recompute(chunk, recompute)
    if recompute.vision is not None:
        _apply([list(tower_layers_of(chunk).items())], [], recompute.vision)
    if recompute.granularity != "none":
        _apply(*_layers(chunk), recompute)


def _apply(stacks: list[list[Layer]], depths: list[Layer], recompute: RecomputeOptions) -> None:
    if recompute.granularity == "full":
        for stack in stacks:
            _apply_full(stack, recompute)
        if recompute.method == "uniform":
            for name, module in depths:
                RecomputeRegion(name, module)  # alone: a projection lies between two of them
        return
    for layer in chain(*stacks, depths):
        for name, module in selected(layer, recompute.modules):
            kind = Discarding if isinstance(module, DISCARDED) else RecomputeRegion
            kind(layer[0] + (f".{name}" if name else ""), module)


def _layers(model: nn.Module) -> tuple[list[list[Layer]], list[Layer]]:
    """Return the stacks of layers of a model or a chunk of one, and the layers of its multi-token prediction."""
    if not hasattr(model, "layers") and (foreign := stacks_of(model)):
        return [list(stack.items()) for stack in foreign], []
    layers = [(f"layers.{index}", layer) for index, layer in layers_of(model, "recompute").items()]
    return [layers], list(depth_layers_of(model).items())


def redrawing(chunk: nn.Module) -> list[str]:
    """Return names of recomputed modules that draw random numbers; for them the host resets generators."""
    found = []
    for module in chunk.modules():
        override = module.__dict__.get("forward")
        # A member of a group asks the group.
        draws = getattr(override, "draws", None) or getattr(getattr(override, "group", None), "draws", None)
        if isinstance(override, Override) and draws is not None and draws():
            found.append(override.name)
    return found


def _apply_full(layers: list[Layer], recompute: RecomputeOptions) -> None:
    assert recompute.num_layers is not None
    _check_number(layers, recompute)
    if recompute.method == "block":
        # "block": the first layers of a chunk, because their activations live longest.
        groups = [[layer] for layer in layers[: recompute.num_layers]]
    else:
        # "uniform": every layer belongs to a region, and a region keeps only its first input.
        groups = [layers[i : i + recompute.num_layers] for i in range(0, len(layers), recompute.num_layers)]
    for group in groups:
        if len(group) == 1:
            RecomputeRegion(*group[0])
        else:
            make_group(group)


def _check_number(layers: list[Layer], recompute: RecomputeOptions) -> None:
    assert recompute.num_layers is not None
    # Not chunks without layers, such as one with the embedding alone.
    if 0 < len(layers) < recompute.num_layers:
        raise ConfigurationError(
            f"recompute.num_layers={recompute.num_layers}, but a model chunk has {len(layers)} layers "
            f"({layers[0][0]} to {layers[-1][0]}); choose at most that many."
        )

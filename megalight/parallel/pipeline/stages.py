"""Cut a model into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from megalight.attachments import STAGE, shadow_of
from megalight.errors import LayoutError
from megalight.parallel.layers import layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.declared_stages import (
    DeclaredParts,
    DeclaredStage,
    declared_parts,
    parts_of,
    put,
    with_parts,
)
from megalight.parallel.pipeline.layout import PipelineLayout, Stage
from megalight.parallel.shard import ShardSpec
from megalight.parallel.splitter import Elsewhere, on_meta

ENDS = {"embed": "embed", "head": "head", "mtp": "mtp", "distillation": "head"}
"""Part of a model -> attribute of the stages that hold it. A student's part for its teacher goes with the head."""
PARTS = ("embed", "layers", "head")


def check_protocol(model: nn.Module) -> int:
    """Return the number of layers of a model that can be cut.

    Raises:
        LayoutError: the model is not ``embed | layers | head`` and declares no other parts; the message names what is
            missing. Or its attribute ``uncut`` says why it has no stages.
    """
    if (declared := _declared(model)) is not None:
        return declared.count
    name = type(model).__name__
    if (reason := getattr(model, "uncut", None)) is not None:
        raise LayoutError(
            f"{name} has no pipeline stages: {reason}. Leave pipeline_parallel of the strategy out; a base that it "
            "learns from has a degree of its own (model.pipeline_parallel)."
        )
    missing = [part for part in PARTS if not hasattr(model, part)]
    if missing:
        raise LayoutError(
            f"{name} has no attribute {missing[0]!r}: a pipeline cuts models made of embed | layers | head. Give it "
            "these three (embed and head may be None), or wrap it in a module that has them."
        )
    indices = list(layers_of(model))
    if not isinstance(model.layers, nn.ModuleDict) or indices != list(range(len(model.layers))):
        keys = f" with keys {list(model.layers)[:4]}" if isinstance(model.layers, nn.ModuleDict) else ""
        raise LayoutError(
            f"{name}.layers is a {type(model.layers).__name__}{keys}; a pipeline needs an nn.ModuleDict keyed "
            "'0', '1', ... by global index, so that names stay the same."
        )
    return len(indices)


def _declared(model: nn.Module) -> DeclaredParts | None:
    return None if all(hasattr(model, part) for part in PARTS) else declared_parts(model)


def shell(model: nn.Module) -> nn.Module:
    """Return a second object of the same model, which shares everything except the dict of children."""
    # Chunks must stay callable as the user's own class, so they are shells of it instead of a class of ours.
    found: nn.Module = shadow_of(model, dict(model._modules))
    return found


def cut(
    model: nn.Module, specs: Mapping[str, ShardSpec], layout: PipelineLayout, mesh: ParallelMesh
) -> tuple[dict[str, ShardSpec], list[nn.Module]]:
    """Keep in ``model`` only the modules of this pipeline rank, and make its chunks.

    If several ranks hold a parameter (a tied embedding, or one outside of embed, layers and head), the first of them
    owns it, and its gradient is summed over all of them.

    Args:
        model: already split over the other axes, on meta or not.
        specs: the result of :func:`megalight.parallel.apply.parallelize` for it.

    Returns:
        the specs of the remaining parameters and buffers, by their unchanged names; and one callable model per stage on
        this rank, in model order. The chunks share their modules with ``model``, which has the modules of all of them.

    Raises:
        LayoutError: the model is not ``embed | layers | head``, or the layout has another number of layers.
    """
    num_layers = check_protocol(model)
    if num_layers != layout.num_layers:
        raise LayoutError(
            f"the layout places {layout.num_layers} layers and {type(model).__name__} has {num_layers}; give a layout "
            f"for {num_layers} layers.\n{layout.draw()}"
        )
    declared = _declared(model)
    by_tensor = {id(tensor): specs[name] for name, tensor in _tensors(model).items() if name in specs}
    holders: dict[int, set[int]] = {}
    for stage in layout.stages:
        for tensor in _tensors(_part(model, [stage], declared)).values():
            # By identity of the tensor, so that tied weights count as one that several stages hold.
            holders.setdefault(id(tensor), set()).add(stage.rank)
    here = layout.of_rank(mesh.rank("pp"))
    chunks = [_part(model, [stage], declared) for stage in here]
    places = _places(model)
    # Only now: tied ends are visible only while the whole model is there.
    if declared is None:
        model._modules.update(_part(model, here)._modules)
    else:
        for chunk, stage in zip(chunks, here, strict=True):
            before = sum(len(each.layers) for each in layout.stages[: stage.index])
            STAGE.set(chunk, DeclaredStage(model, declared, stage, before))
        put(model, parts_of(model, declared, here))
    _remember(model, places)
    kept = {name: tensor for name, tensor in _tensors(model).items() if id(tensor) in by_tensor}
    # Create the groups of shared tensors now, in the same order on all ranks.
    for ranks in sorted({tuple(sorted(ranks)) for ranks in holders.values() if len(ranks) > 1}):
        if mesh.rank("pp") in ranks:
            mesh.group(_axis(ranks, mesh))
    return {n: _shared(by_tensor[id(t)], sorted(holders[id(t)]), mesh) for n, t in kept.items()}, chunks


def _places(model: nn.Module) -> dict[int, tuple[str, nn.Module, str]]:
    """Return the first place of each parameter: the module's name and itself, and the parameter's name in it."""
    places: dict[int, tuple[str, nn.Module, str]] = {}
    for path, module in model.named_modules():
        for local, parameter in module._parameters.items():
            places.setdefault(id(parameter), (path, module, local))
    return places


def _remember(model: nn.Module, places: Mapping[int, tuple[str, nn.Module, str]]) -> None:
    """Let the modules that are left know where the whole model has the parameters that they share with others."""
    held = set(model.modules())
    for module in held:
        first = {local: places[id(p)] for local, p in module._parameters.items() if p is not None}
        elsewhere = {
            local: Elsewhere(path, on_meta(owner), name)
            for local, (path, owner, name) in first.items()
            if owner not in held
        }
        if elsewhere:
            module.elsewhere = elsewhere  # type: ignore[assignment]


def _part(model: nn.Module, stages: Sequence[Stage], declared: DeclaredParts | None = None) -> nn.Module:
    """Return the model with only the parts of some stages."""
    if declared is not None:
        return with_parts(model, parts_of(model, declared, stages))
    part = shell(model)
    layers = layers_of(model)
    part._modules["layers"] = nn.ModuleDict({str(i): layers[i] for stage in stages for i in stage.layers})
    for name, end in ENDS.items():
        if not any(getattr(stage, end) for stage in stages) and name in part._modules:
            # None instead of nothing: the model's forward asks whether it has this end.
            part._modules[name] = None
    return part


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _axis(ranks: Sequence[int], mesh: ParallelMesh) -> str:
    return "pp" if len(ranks) == mesh.pp else f"pp:{'+'.join(map(str, ranks))}"


def _shared(spec: ShardSpec, ranks: Sequence[int], mesh: ParallelMesh) -> ShardSpec:
    """Return the spec of a tensor that several pipeline ranks hold."""
    if len(ranks) < 2:
        return spec
    # One rank counts the tensor in norms and writes it to checkpoints. All of them sum their gradients of it.
    first = mesh.rank("pp") == ranks[0]
    axis = _axis(ranks, mesh)
    pieces = (replace(p, partial=(axis, *p.partial), owner=p.owner and first) for p in spec.pieces)
    return replace(spec, pieces=tuple(pieces))

"""Parallelize a model: split a single-device model in place by its plan, as the options of a run ask."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megalight.errors import BackendError, ConfigurationError, LayoutError, nearest
from megalight.first_rank import only_first
from megalight.nn.moe import MoE
from megalight.parallel.context.attention import ContextAttention, ContextOptions
from megalight.parallel.context.divided_calls import interfaces_of, why_not
from megalight.parallel.expert.dispatch import ExpertOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import context_plan, plan_for, why_no_plan
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.recompute import check_recompute
from megalight.parallel.shard import ShardSpec
from megalight.parallel.shared_state import SharedState
from megalight.parallel.styles import InterfaceRegion, Style
from megalight.parallel.styles.style import Splitter
from megalight.parallel.tensor.linear import ColumnLinear, RowLinear
from megalight.parallel.tensor.overlap.spec import TensorOptions
from megalight.parallel.transform import apply_transforms

log = logging.getLogger(__name__)
log.addFilter(only_first)


def parallelize(
    model: nn.Module,
    plan: ParallelizePlan,
    mesh: ParallelMesh,
    *,
    sequence_parallel: bool = False,
    context: ContextOptions | None = None,
    tensor: TensorOptions | None = None,
    expert: ExpertOptions | None = None,
    prefix: str = "",
) -> dict[str, ShardSpec]:
    """Split a single-device model in place: layers over ``tp``, attention over ``cp``, experts over ``ep`` and ``etp``.

    Modules that the plan names are replaced by parallel ones with the same name. Their parameters also keep their
    names, and hold this rank's part. Real values are sliced; meta parameters stay meta.

    Args:
        model: on the meta device or with values, which must be equal on all ranks.
        plan: how its modules are split. Modules that no rule matches are replicated.
        mesh: the mesh of ranks.
        sequence_parallel: each rank holds a share of the tokens of hidden states between split layers; token counts
            must then be multiples of ``tp``.
        context: the kind of attention that its layers use under context parallelism; None is ``auto``.
        tensor: how its split layers hide their communication; None is ``auto``.
        expert: how copies of tokens get to their experts; None: by all-to-all.
        prefix: put before every canonical name.

    Returns:
        name of each parameter and persistent buffer -> the parts of canonical tensors that it holds. A tied parameter
        appears once, under its first name.

    Raises:
        LayoutError: the model is parallel already, a size is not divisible, a pattern matches nothing, or a style does
            not fit its module. Under sequence parallelism: a module with parameters has no rule. Under context
            parallelism: the plan names no attention, or a kind cannot serve a layer. With ``ep`` or ``etp``: the plan
            names no experts. Also if options of ``tensor`` or ``expert`` have no effect.
    """
    # A list of the model before the split: modules are replaced while it is walked through.
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, ContextAttention) or isinstance(getattr(module, "shared", None), SharedState):
            raise LayoutError(f"{name} ({type(module).__name__}) is parallel already; parallelize a model once.")
    styles = styles_for(model, plan, mesh)
    shared = SharedState(
        mesh,
        sequence_parallel and mesh.tp > 1,
        plan.sequence_dim,
        context or ContextOptions(),
        tensor or TensorOptions(),
        expert or ExpertOptions(),
    )
    _check_context(shared, styles)
    _check_tensor(shared, styles)
    # Checks come before: nothing has changed in the model if one of them raises.
    splitter = Splitter(model, shared, prefix)
    unknown = []
    for name, module in modules.items():
        # A style of an enclosing module has split it already (an adapter, the layer inside a head).
        if id(module) in splitter.done:
            continue
        if not styles[name] and any(parameter is not None for parameter in module._parameters.values()):
            unknown.append(f"{name or 'the model'} ({type(module).__name__})")
        splitter.apply(name, module, styles[name])
    if unknown and shared.sequence_parallel:
        raise LayoutError(
            f"sequence parallelism needs a rule for every module with parameters, and the plan has none for "
            f"{', '.join(unknown[:5])}{' ...' if unknown[5:] else ''}. Add SequenceRegion() for those that see a share "
            "of the tokens, Replicated() for those that see all, or turn sequence parallelism off."
        )
    # Only now, because styles have put the dispatchers in place.
    _check_padding(model, shared)
    if shared.expert.shared_expert_overlap:
        _set_overlap(model, mesh)
    return splitter.specs


def styles_for(model: nn.Module, plan: ParallelizePlan, mesh: ParallelMesh) -> dict[str, Sequence[Style]]:
    """Return the rules of a plan for each module.

    Raises:
        LayoutError: a pattern of the plan matches no module; or it names no experts to divide over ``ep`` and ``etp``.
    """
    modules = dict(model.named_modules())
    for pattern in plan.unmatched(modules):
        raise LayoutError(
            f"pattern {pattern!r} of the plan matches no module of {type(model).__name__}; correct or remove it."
            + nearest(pattern, modules)
        )
    styles: dict[str, Sequence[Style]] = {name: plan.styles_of(name, each) for name, each in modules.items()}
    divided = any(style.axis == "ep" for found in styles.values() for style in found)
    for axis, degree in {"ep": mesh.ep, "etp": mesh.etp}.items():
        if degree > 1 and not divided:
            raise LayoutError(
                f"{axis}={degree} divides experts over ranks, but the plan has Expert() for no module, so there are "
                f"none. Add the rule, or set {axis}=1."
            )
    return styles


def _check_padding(model: nn.Module, shared: SharedState) -> None:
    """Check that dispatchers can pad experts to their capacity where a router wants that."""
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.router.rows(1) is not None and not module.experts.dispatcher.pads:
            raise LayoutError(
                f"{name}: moe.capacity.pad=true with dispatcher={shared.expert.dispatcher!r}, which sends as many rows "
                "as there are. Leave pad out, or set dispatcher='all_to_all'."
            )


def _set_overlap(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let shared experts compute beside the dispatch of tokens to experts."""
    layers = [module for module in model.modules() if isinstance(module, MoE) and module.shared is not None]
    if not layers or mesh.ep * mesh.etp == 1:
        reason = f"ep={mesh.ep} and etp={mesh.etp}, so no tokens travel" if layers else "no layer has a shared expert"
        raise LayoutError(
            f"ExpertOptions: shared_expert_overlap=True computes shared experts while tokens travel, but {reason}. "
            "Leave it out."
        )
    for layer in layers:
        layer.shared_expert_overlap = True


def _check_context(shared: SharedState, styles: Mapping[str, Sequence[Style]]) -> None:
    """Check that the plan names attention for ``cp``, and that the context options match some of it."""
    regions = [name for name, found in styles.items() if any(style.axis == "cp" for style in found)]
    if shared.mesh.cp > 1 and not regions:
        raise LayoutError(
            f"cp={shared.mesh.cp} gives each rank a share of every sequence, but the plan has ContextRegion() for no "
            "attention, so none would look at the other shares. Add the rule, or set cp=1."
        )
    shared.context.check(regions)


def _check_tensor(shared: SharedState, styles: Mapping[str, Sequence[Style]]) -> None:
    """Check that the tensor options have an effect on some split layers."""
    split = [name for name, found in styles.items() if any(style.overlaps for style in found)]
    if shared.mesh.tp > 1:
        shared.tensor.check(split, shared.mesh.tp, shared.sequence_parallel)


def check_overlap(model: nn.Module, device: torch.device) -> None:
    """Raise, before a parallel model runs on ``device``, if an overlap backend cannot serve one of its layers.

    Raises:
        LayoutError: names the layer, and gives the reason of each backend.
    """
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear) and module.shared.mesh.tp > 1:
            module.shared.check_overlap(module.name, module.weight, device)


def check_backends(model: nn.Module, device: torch.device) -> None:
    """Raise, before a model runs on ``device``, if a backend that was named for one of its modules cannot serve.

    Modules that can answer have a method ``check_backend(device)``.

    Raises:
        BackendError: names the module, and gives the reason of each backend.
    """
    for name, module in model.named_modules():
        if hasattr(module, "check_backend"):
            try:
                module.check_backend(device)
            except BackendError as error:
                raise BackendError(f"{name}: {error}") from error


@contextmanager
def whole_tokens(model: nn.Module) -> Iterator[None]:
    """Switch sequence parallelism off inside the context: for decoding, where there are few tokens of any number."""
    # All split layers of a model share one object.
    candidates = {id(shared): shared for module in model.modules() if (shared := getattr(module, "shared", None))}
    active = [x for x in candidates.values() if isinstance(x, SharedState) and x.sequence_parallel]
    try:
        for shared in active:
            shared.sequence_parallel = False
        yield
    finally:
        for shared in active:
            shared.sequence_parallel = True


def find_plan(root: nn.Module, mesh: ParallelMesh, layout: Layout) -> ParallelizePlan:
    """Return the plan by which a whole model is split: the user's, or the one registered for its class.

    Raises:
        ConfigurationError: ``tp > 1``, but no plan says what to split.
    """
    try:
        plan = layout.plan or plan_for(root) or ParallelizePlan(sequence_dim=1)
    except LayoutError:
        # A declaration that is wrong or unknown is in the way of those alone who split by it.
        if mesh.tp > 1 or mesh.ep > 1 or mesh.etp > 1:
            raise
        plan = ParallelizePlan(sequence_dim=1)
    if mesh.cp > 1 and layout.plan is None:
        for name in interfaces_of(root):
            plan |= _plan_over_cp(name, root.get_submodule(name), plan.sequence_dim)
    if mesh.tp > 1 and plan.axes <= {"cp"}:
        raise ConfigurationError(
            f"tensor_parallel={mesh.tp}, but there is {why_no_plan(root)}: nothing would be split. Pass plan=..., or "
            "define plan(model) on your MegalightModule."
        )
    return plan


def _plan_over_cp(name: str, model: nn.Module, sequence_dim: int) -> ParallelizePlan:
    """Return how a model of ``transformers`` is divided over ``cp``: by our attention, or else layer by layer.

    Raises:
        LayoutError: in neither way.
    """
    reason = why_not(model) or _why_no_sum(model)
    if reason is None:
        return ParallelizePlan({name: InterfaceRegion()}, sequence_dim)
    try:
        return context_plan(model).under(name) if name else context_plan(model)
    except LayoutError as error:
        raise LayoutError(
            f"{name or 'the model'} ({type(model).__name__}) {reason}, and {error}. Set context_parallel=1."
        ) from error


def _why_no_sum(model: nn.Module) -> str | None:
    """Return why the loss of a model is no sum over shares of its tokens; None: it is, or a call will tell."""
    name = getattr(getattr(model, "loss_function", None), "__name__", "")
    if name != "ForCausalLMLoss":
        return f"has the loss {name!r}, and shares of sequences are summed for that of the next token only"
    if "loss_function" not in inspect.unwrap(type(model).forward).__code__.co_names:
        return "computes its loss by itself, as a mean over the tokens that it gets"
    return None


def check_split(root: nn.Module, mesh: ParallelMesh, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    """Check that a model on meta can be split, by splitting it as one rank would. No process group is needed.

    Raises:
        BackendError: a backend that was named for a module cannot serve on ``device``.
        LayoutError: its sizes are not divisible, or it cannot run on ``device``.
        ConfigurationError: no plan says what to split; or recompute of a layer or module that does not exist.
    """
    # No mesh is asked for a group here, so this runs before there are processes.
    apply_transforms(root, layout.transforms)
    split(root, mesh, layout, "")
    check_backends(root.to(dtype=dtype), device)
    check_overlap(root, device)


def split(
    root: nn.Module, mesh: ParallelMesh, layout: Layout, prefix: str
) -> tuple[ParallelizePlan, dict[str, ShardSpec], PipelineLayout]:
    """Split the modules, but not the list of layers; return the plan, the specs, and the stages for the later cut."""
    plan = find_plan(root, mesh, layout)
    for transform in layout.transforms:
        plan = transform.plan(root, plan)
    # Stages are decided on the whole model, and cut later: rules of the plan name modules of the whole model.
    stages = layout.stages(root, mesh)
    if layout.pipeline.schedule == "combined" and mesh.ep * mesh.etp == 1:
        raise LayoutError(
            "pipeline.schedule='combined' hides the messages of experts, and with ep=1 and etp=1 there are none. Raise "
            "expert_parallel, or choose another schedule."
        )
    # Checked before anything is split, so that an error leaves the model as it was.
    check_recompute(root, layout.recompute, [stage.layers for stage in stages.stages if mesh.pp > 1])
    specs = parallelize(
        root,
        plan,
        mesh,
        sequence_parallel=layout.sequence_parallel,
        context=layout.context,
        expert=layout.expert,
        tensor=layout.tensor,
        prefix=prefix,
    )
    return plan, specs, stages


def warn_of_undeferred(root: nn.Module, schedule: str) -> None:
    """Warn of linear layers of the whole model whose weight gradients cannot be delayed: those of torch."""
    names = [
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module.weight.requires_grad
    ]
    if names:
        log.warning(
            "schedule %r: %d linear layer%s weight gradients at once, where they fill no pause: %s%s; use "
            "megalight.nn.Linear, or another schedule",
            schedule,
            len(names),
            "s compute" if len(names) > 1 else " computes",
            ", ".join(names[:3]),
            " ..." if names[3:] else "",
        )

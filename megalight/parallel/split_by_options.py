"""Split the modules of a model as the options of a run ask, or check that this can be done.

The plan, transforms and recompute are those of the options. The list of layers is cut into stages later
(:mod:`megalight.parallel.pipeline.stages`).
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.first_rank import only_first
from megalight.parallel.apply import check_backends, check_overlap, parallelize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.options import ParallelOptions
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.plan import Plan
from megalight.parallel.plans import plan_for
from megalight.parallel.recompute import check_recompute
from megalight.parallel.shard import ShardSpec
from megalight.parallel.transform import apply_transforms

log = logging.getLogger(__name__)
log.addFilter(only_first)


def find_plan(root: nn.Module, mesh: ParallelMesh, options: ParallelOptions) -> Plan:
    """Return the plan by which a whole model is split: the user's, or the one registered for its class.

    Raises:
        ConfigurationError: ``tp > 1``, but no plan says what to split.
    """
    plan = options.plan or plan_for(root) or Plan()
    if mesh.tp > 1 and not plan.rules:
        raise ConfigurationError(
            f"tensor_parallel={mesh.tp}, but there is no plan for {type(root).__name__}, so nothing would be split. "
            "Pass plan=..., or define plan(model) on your MegalightModule."
        )
    return plan


def check_split(
    root: nn.Module, mesh: ParallelMesh, options: ParallelOptions, dtype: torch.dtype, device: torch.device
) -> None:
    """Check that a model on meta can be split, by splitting it as one rank would. No process group is needed.

    Raises:
        BackendError: a backend that was named for a module cannot serve on ``device``.
        LayoutError: its sizes are not divisible, or it cannot run on ``device``.
        ConfigurationError: no plan says what to split; or recompute of a layer or module that does not exist.
    """
    # No mesh is asked for a group here, so this runs before there are processes.
    apply_transforms(root, options.transforms)
    split(root, mesh, options, "")
    check_backends(root.to(dtype=dtype), device)
    check_overlap(root, device)


def split(
    root: nn.Module, mesh: ParallelMesh, options: ParallelOptions, prefix: str
) -> tuple[Plan, dict[str, ShardSpec], PipelineLayout]:
    """Split the modules, but not the list of layers; return the plan, the specs, and the stages for the later cut."""
    plan = find_plan(root, mesh, options)
    for transform in options.transforms:
        plan = transform.plan(root, plan)
    # Stages are decided on the whole model, and cut later: rules of the plan name modules of the whole model.
    layout = options.layout(root, mesh)
    if options.pipeline.schedule == "combined" and mesh.ep * mesh.etp == 1:
        raise LayoutError(
            "pipeline.schedule='combined' hides the messages of experts, and with ep=1 and etp=1 there are none. Raise "
            "expert_parallel, or choose another schedule."
        )
    # Checked before anything is split, so that an error leaves the model as it was.
    check_recompute(root, options.recompute, [stage.layers for stage in layout.stages if mesh.pp > 1])
    specs = parallelize(
        root,
        plan,
        mesh,
        sequence_parallel=options.sequence_parallel,
        context=options.context,
        expert=options.expert,
        tensor=options.tensor,
        prefix=prefix,
    )
    return plan, specs, layout


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

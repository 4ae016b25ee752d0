"""The layout of a tower, or of the language model beside it, and the part of the model that a rank holds."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.vlm.model import VLM, TowerPart
from megalight.parallel.layout import Layout
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.transform import share_transforms


def tower_layout(layout: Layout) -> Layout:
    """Return the layout of a tower, whose recompute is that of its own layers."""
    again = None if layout.recompute == RecomputeOptions() else layout.recompute
    return replace(layout, recompute=RecomputeOptions(vision=again))


def check_tower(layout: Layout) -> None:
    """Raise if a vision tower cannot have this layout.

    Raises:
        LayoutError: it has a pipeline, or expert parallelism.
        ConfigurationError: it has a plan, transforms or data-parallel options, which are those of the whole model.
    """
    if layout.pipeline_parallel > 1 or layout.virtual_pipeline > 1 or layout.pipeline_layout is not None:
        raise LayoutError(
            f"the tower has pipeline_parallel={layout.pipeline_parallel}, virtual_pipeline={layout.virtual_pipeline}, "
            f"pipeline_layout={layout.pipeline_layout!r}; it is one stage, which runs before the language model's. Use "
            "tensor_parallel, or more data-parallel replicas."
        )
    if layout.expert_parallel * layout.expert_tensor_parallel > 1:
        raise LayoutError(
            f"the tower has expert_parallel={layout.expert_parallel}, expert_tensor_parallel="
            f"{layout.expert_tensor_parallel}; it has no experts. Leave both out."
        )
    for name in ("plan", "transforms", "data_parallel"):
        if getattr(layout, name):
            raise ConfigurationError(
                f"the tower has {name} of its own, and both models have the same. Set {name} for the whole model."
            )


# The part of a rank


def part_of(whole: nn.Module, tower: bool) -> nn.Module:
    """Return the tower and the projector of a model, or everything else; see :func:`divided`."""
    part, language = divided(whole)
    return part if tower else language


def divided(whole: nn.Module) -> tuple[TowerPart, VLM]:
    """Return the tower and the projector of a model, and the model without them. A model is divided once.

    Transforms have changed the whole before: patterns of adapters may match layers of one part alone.

    Raises:
        ConfigurationError: the model has no vision tower.
    """
    if not isinstance(whole, VLM):
        raise ConfigurationError(
            f"a tower in a layout of its own needs a model with a vision tower, and {type(whole).__name__} has none; "
            "train a VLMModule, or use MegatronStrategy."
        )
    part = whole.without_tower()
    share_transforms(whole, part)
    return part, whole

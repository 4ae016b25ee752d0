"""The canonical tensors of a one-device model: reading and filling them by name."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from megalight.errors import CheckpointError
from megalight.nn.names import parts


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every canonical tensor by name, as a view of its parameter: writing to it changes the model."""
    parameters = dict(model.named_parameters())
    views = {}
    for part in parts(model):
        flat = parameters[part.parameter].detach().view(-1)
        views[part.name] = flat[part.start : part.start + prod(part.shape)].view(part.shape)
    return views


@torch.no_grad()
def load_canonical(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill every parameter of ``model`` from canonical tensors, cast to the parameter's type.

    Raises:
        CheckpointError: a tensor is missing, unknown to the model, or of another shape.
    """
    views = canonical_tensors(model)
    missing, unknown = sorted(views.keys() - tensors.keys()), sorted(tensors.keys() - views.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the tensors are of another model: missing {missing[:5]} ({len(missing)} in all), "
            f"not in the model {unknown[:5]} ({len(unknown)} in all). Build the model with the configuration it had."
        )
    for name, view in views.items():
        if tensors[name].shape != view.shape:
            raise CheckpointError(
                f"{name} is {list(tensors[name].shape)} and must be {list(view.shape)}. "
                "Build the model with the configuration it had."
            )
        view.copy_(tensors[name])

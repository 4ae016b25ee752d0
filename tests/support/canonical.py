"""Fill a model with canonical tensors, as another library's weights map brings them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megalight.nn.canonical import canonical_tensors


@torch.no_grad()
def load_canonical(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy every tensor into the model, cast to the parameter's dtype; names and shapes must be the model's."""
    views = canonical_tensors(model)
    assert views.keys() == tensors.keys()
    for name, view in views.items():
        assert tensors[name].shape == view.shape, name
        view.copy_(tensors[name])

"""Models in single-file checkpoints, which our modules write under Lightning's own strategies."""

from __future__ import annotations

import os

import torch
from torch import nn

from megalight.checkpoint.foreign.single_file import WEIGHTS, read
from megalight.errors import CheckpointError
from megalight.models.family import Family, family
from megalight.models.saved import PREFIX, described_model, saved_config
from megalight.models.transforms import rebuild
from megalight.parallel.transform import apply_transforms


def single_file_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Family, nn.Module]:
    """Build the model that a single-file checkpoint describes, and load its weights.

    Args:
        path: the file.
        device: device of the weights.
        dtype: dtype of the weights. None keeps the saved dtypes.

    Raises:
        CheckpointError: the file is not a checkpoint, does not describe its model, or lacks weights of it.
    """
    entries = read(path)
    described = described_model(entries, path)
    known = family(described["family"])
    # On meta: the values come from the file, and `assign` puts its tensors in place without a copy.
    with torch.device("meta"):
        model = known.model(saved_config(described, path))
        # Before the weights are loaded, because they have names for tensors that transforms made.
        apply_transforms(model, rebuild(described.get("transforms", ())))
    weights = {name.removeprefix(PREFIX): value for name, value in entries[WEIGHTS].items() if name.startswith(PREFIX)}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the model that it describes: {error}") from error
    return known, model.to(device, dtype)

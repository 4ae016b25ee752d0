"""The features of images, from a tower in any layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalight.data.multimodal.patches import Images
from megalight.models.vision.model import Pictures
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.collectives import join
from megalight.parallel.model import ParallelModel
from megalight.towers.shares import features_of


def features(config: VLMConfig, tower: ParallelModel, images: Images) -> Tensor:
    """Return the features ``[P, (1 + N) h]`` of images, without padding; equal on all ranks of a replica.

    Ranks along ``cp`` take a run of the rows each, as long as the others'. Gradients are whole on all of them.
    """
    mesh, device = tower.mesh, tower.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    pictures = task.pictures_of(config, images, nothing, tower.token_multiple * mesh.cp)
    found: Tensor = tower.root(_run(pictures, mesh.rank("cp"), mesh.cp))
    return join(found, mesh.group("cp"), 0)[: features_of(images)]


def _run(pictures: Pictures, rank: int, size: int) -> Pictures:
    """Return a run of the rows; what describes them stays that of all rows."""
    each = len(pictures.pixels) // size
    own = slice(rank * each, (rank + 1) * each)
    return replace(pictures, pixels=pictures.pixels[own], positions=pictures.positions[..., own])

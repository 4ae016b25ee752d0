"""The training step of a language model whose image features come from a tower in another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.data.multimodal.patches import Images
from megalight.models.vision.model import PackedImages
from megalight.models.vlm import task
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import Arrived
from megalight.parallel.collectives import join
from megalight.parallel.model import ParallelModel
from megalight.towers.batch_split import features_of
from megalight.types import Loss


class LanguageTask:
    """The task of a vision-language model without its tower.

    Args:
        features: returns the features ``[P, h]`` of a micro-batch, with padding.
        multiple: tokens are padded to a multiple of this.
    """

    def __init__(self, features: Callable[[ImageTextBatch], Tensor], multiple: int) -> None:
        self.features = features
        self.multiple = multiple

    def forward_step(self, model: nn.Module, batch: ImageTextBatch, carry: dict[str, Any] | None = None) -> Any:
        """Run a chunk. The first one waits for the features of the micro-batch."""
        sequences = batch.sequences.pad_to(self.multiple)
        arrived = None
        if task.has_embedding(model):
            images, _ = batch.parts()
            arrived = Arrived(self.features(batch), task.source_of(model, batch, sequences), images.mixtures)
        return task.forward(model, batch, sequences, carry, arrived, self.multiple)

    def loss_step(self, carry: dict[str, Tensor], batch: ImageTextBatch) -> Loss:
        """Return the sum of the losses."""
        return task.loss(carry, batch)

    def loss_tokens(self, batch: ImageTextBatch) -> Tensor:
        """Return the number of tokens in it."""
        return batch.loss_mask.sum()


def padded(features: Tensor, multiple: int) -> Tensor:
    """Add rows of zeros: at least one row, and whole shares for sequence parallelism."""
    rows = max(1, len(features))
    return F.pad(features, (0, 0, 0, rows + -rows % multiple - len(features)))


# Features of images


def features(config: VLMConfig, tower: ParallelModel, images: Images) -> Tensor:
    """Return the features ``[P, (1 + N) h]`` of images, without padding; equal on all ranks of a replica.

    Ranks along ``cp`` take a run of the rows each, as long as the others'. Gradients are whole on all of them.
    """
    mesh, device = tower.mesh, tower.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    packed_images = task.pack_images(config, images, nothing, tower.token_multiple * mesh.cp)
    found: Tensor = tower.root(_run(packed_images, mesh.rank("cp"), mesh.cp))
    return join(found, mesh.group("cp"), 0)[: features_of(images)]


def _run(packed_images: PackedImages, rank: int, size: int) -> PackedImages:
    """Return a run of the rows; what describes them stays that of all rows."""
    each = len(packed_images.pixels) // size
    own = slice(rank * each, (rank + 1) * each)
    return replace(packed_images, pixels=packed_images.pixels[own], positions=packed_images.positions[..., own])

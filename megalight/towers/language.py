"""What a language model computes in a training step, with features that a tower has made elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.models.vlm import task
from megalight.models.vlm.model import Arrived
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

"""What a vision-language model computes in a training step, without Lightning."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.data.multimodal.patches import Images
from megalight.models.packing import IGNORED, masked_sum, pack, skips
from megalight.models.vision.model import Pictures
from megalight.models.vision.pixels import normalized
from megalight.models.vlm.batches import check_images, check_newlines
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import Arrived
from megalight.ops.rows import put_rows
from megalight.types import Loss, PackedSequences


def pictures_of(config: VLMConfig, images: Images, source: Tensor, multiple: int) -> Pictures:
    """Return images for the tower. Without any, it gets a row that no token reads.

    So the tower runs in every micro-batch: all of its parameters have a gradient. It gets as many rows as the projector
    joins to one, and padding in whole rows of features.

    Args:
        config: the model.
        images: their rows.
        source: ``[T]``, as in :class:`~megalight.models.vision.model.Pictures`.
        multiple: the number of rows of features is a multiple of this.

    Raises:
        DataError: the images were cut for another model.
    """
    check_images(config, images)
    device, joined = images.pixels.device, config.projector.merge**2
    if config.added_rows:
        return _with_added_rows(config, images, source, multiple)
    rows = _sequences_of(images.lengths or (joined,), multiple * joined, device)
    windows = None
    if config.vision.dynamic is not None and config.vision.dynamic.window:
        parts = tuple(rows for each in images.windows for rows in each)
        windows = _sequences_of(parts or (joined,), multiple * joined, device)
    missing = rows.num_tokens - len(images.pixels)
    pixels = F.pad(normalized(images.pixels, config.vision), (0, 0, 0, missing))
    positions = F.pad(images.positions, (0, missing))
    return Pictures(pixels, positions, rows, source, windows, mixtures=images.mixtures)


def _with_added_rows(config: VLMConfig, images: Images, source: Tensor, multiple: int) -> Pictures:
    """Return images of patches alone, with the rows of a class token and of registers before those of each."""
    device, joined, number = images.pixels.device, config.projector.merge**2, len(images.lengths)
    vision, added, each = config.vision, config.added_rows, config.vision.num_patches
    rows = _sequences_of((each + added,) * number or (joined,), multiple * joined, device)
    pixels = normalized(images.pixels, vision).view(number, each, vision.patch_values)
    pixels = F.pad(pixels, (0, 0, added, 0)).flatten(0, 1)
    # The class token has the first place in the table, and registers have those behind it.
    places = torch.arange(added, device=device)
    places = (places + (places >= vision.class_token) * each).expand(number, added)
    positions = torch.cat([places, images.positions.view(number, each) + vision.class_token], dim=1).flatten()
    missing = rows.num_tokens - len(pixels)
    patches = torch.arange(number * (each + added), device=device).view(number, each + added)[:, added:].flatten()
    features = max(len(patches), joined)
    # Any rows, where there is no image, and as padding.
    patches = F.pad(patches, (0, features + -features % (multiple * joined) - len(patches)))
    pixels, positions = F.pad(pixels, (0, 0, 0, missing)), F.pad(positions, (0, missing))
    return Pictures(pixels, positions, rows, source, patches=patches, mixtures=images.mixtures)


def _sequences_of(lengths: tuple[int, ...], multiple: int, device: torch.device) -> PackedSequences:
    """Return how rows divide into images or windows, padded to a multiple.

    Images of the same sizes come again, so what was made of their lengths on the device is kept. A step whose lengths
    are all known copies nothing from the host, and can be recorded.
    """
    # A new object: what is found out about sequences later, maybe in inference mode, is not kept.
    return replace(_kept_sequences(lengths, multiple, device))


@lru_cache(maxsize=64)
def _kept_sequences(lengths: tuple[int, ...], multiple: int, device: torch.device) -> PackedSequences:
    # Tensors that validation made in inference mode could not be saved for a backward pass.
    with torch.inference_mode(False):
        return PackedSequences.of_lengths(lengths, device).pad_to(multiple)


def forward(
    model: nn.Module,
    batch: ImageTextBatch,
    sequences: PackedSequences,
    carry: dict[str, Tensor] | None,
    pictures: Pictures | Arrived | None,
    multiple: int,
) -> dict[str, Tensor]:
    """From tokens ``[b, s]`` and images, or the carry, to ``hidden [T, h]``; last part: to ``losses [T]``.

    Args:
        model: the model, or a part of it.
        batch: the micro-batch.
        sequences: those of the batch, padded as the model needs it.
        carry: what the part before has returned.
        pictures: the images, for the part with the embedding.
        multiple: numbers of tokens are multiples of this.
    """
    rows = batch.rows if skips(batch, multiple) else None
    output = model(
        pack(batch.tokens, sequences, 0),
        sequences,
        labels=pack(batch.labels.masked_fill(batch.loss_mask == 0, IGNORED), sequences, IGNORED),
        hidden=None if carry is None else carry["hidden"],
        rows=rows,
        pictures=pictures,
        memory=None if carry is None else carry.get("memory"),
    )
    if (losses := output.losses) is not None:
        return {"losses": losses if rows is None else put_rows(losses, rows, sequences.num_tokens)}
    return {"hidden": output.hidden} | ({} if output.memory is None else {"memory": output.memory})


def loss(carry: dict[str, Tensor], batch: ImageTextBatch) -> Loss:
    """Return the cross entropy in nats, weighted by the loss mask and summed over the tokens."""
    return Loss(masked_sum(carry["losses"], batch.loss_mask))


def has_embedding(model: nn.Module) -> bool:
    """Return whether a part of a model reads tokens and images."""
    return getattr(model, "embed", None) is not None


def source_of(model: nn.Module, batch: ImageTextBatch, sequences: PackedSequences) -> Tensor:
    """Return the source ``[T]`` of the tokens of a batch.

    Args:
        model: the part of the model that reads tokens and images.
        batch: the micro-batch.
        sequences: those of the batch, padded as the model needs it.

    Raises:
        DataError: a token stands for a learned row, which the model does not have.
    """
    check_newlines(model, batch)
    return pack(batch.parts()[1], sequences, -1)

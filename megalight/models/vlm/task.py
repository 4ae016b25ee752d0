"""What a vision-language model computes in a training step, without Lightning."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.data.multimodal.images import Images
from megalight.errors import ConfigurationError, DataError, nearest_pattern
from megalight.models.batches import IGNORED, masked_sum, pack, skips
from megalight.models.vision.model import PackedImages, normalized
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import RemoteFeatures
from megalight.ops.row_indexing import put_rows
from megalight.types import Loss, PackedSequences


def pack_images(config: VLMConfig, images: Images, source: Tensor, multiple: int) -> PackedImages:
    """Return images for the tower. Without any, it gets a row that no token reads.

    So the tower runs in every micro-batch: all of its parameters have a gradient. It gets as many rows as the projector
    joins to one, and padding in whole rows of features.

    Args:
        config: the model.
        images: their rows.
        source: ``[T]``, as in :class:`~megalight.models.vision.model.PackedImages`.
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
    return PackedImages(pixels, positions, rows, source, windows, mixtures=images.mixtures)


def _with_added_rows(config: VLMConfig, images: Images, source: Tensor, multiple: int) -> PackedImages:
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
    return PackedImages(pixels, positions, rows, source, patches=patches, mixtures=images.mixtures)


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
    packed_images: PackedImages | RemoteFeatures | None,
    multiple: int,
) -> dict[str, Tensor]:
    """From tokens ``[b, s]`` and images, or the carry, to ``hidden [T, h]``; last part: to ``losses [T]``.

    Args:
        model: the model, or a part of it.
        batch: the micro-batch.
        sequences: those of the batch, padded as the model needs it.
        carry: what the part before has returned.
        packed_images: the images, for the part with the embedding.
        multiple: numbers of tokens are multiples of this.
    """
    rows = batch.rows if skips(batch, multiple) else None
    output = model(
        pack(batch.tokens, sequences, 0),
        sequences,
        labels=pack(batch.labels.masked_fill(batch.loss_mask == 0, IGNORED), sequences, IGNORED),
        hidden=None if carry is None else carry["hidden"],
        rows=rows,
        packed_images=packed_images,
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


# Frozen parts


def freeze(model: nn.Module, patterns: Sequence[str], prefix: str = "model.") -> None:
    """Leave the parameters that patterns match without gradients.

    Args:
        model: the whole model.
        patterns: globs over names of parameters.
        prefix: what these names begin with.

    Raises:
        ConfigurationError: a pattern matches no parameter.
    """
    named = {prefix + name: parameter for name, parameter in model.named_parameters()}
    for pattern in patterns:
        found = fnmatch.filter(named, pattern)
        if not found:
            # Layers are alike, and some models have thousands of names.
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in named)
            raise ConfigurationError(
                f"freeze has {pattern!r}, which matches no parameter.{nearest_pattern(pattern, named)} They are "
                f"{', '.join(kinds)}."
            )
        for name in found:
            # A tower without trained parameters then keeps nothing for the backward pass.
            named[name].requires_grad_(False)


# Checks of batches


def check_batch(batch: Any) -> None:
    """Refuse what is no batch of text and images.

    Raises:
        DataError: it is another object.
    """
    if not isinstance(batch, ImageTextBatch) or batch.images is None or batch.source is None:
        raise DataError(
            f"the batch is a {type(batch).__name__}; a vision-language model reads ImageTextBatch, also where a sample "
            "has no image. MultimodalDataModule yields it; by hand, make it with with_images or with_cuts of "
            "megalight.data.multimodal.batch."
        )


def check_images(config: VLMConfig, images: Images) -> None:
    """Refuse images that were cut for another model. Only numbers that the host knows are compared.

    Raises:
        DataError: positions have other axes, or images another number of rows.
    """
    vision = config.vision
    axes = () if vision.dynamic is None else (4,) if vision.dynamic.table else (2,)
    found = tuple(images.positions.shape[:-1])
    if found != axes:
        raise DataError(
            f"positions of patches are {[*found, 'P']}; this tower reads {[*axes, 'P']}. The images were cut for "
            "another model: cut them by form_of(config) of megalight.data.multimodal.resolution."
        )
    places = vision.num_patches if config.added_rows else vision.num_positions
    if vision.dynamic is None and images.highest is not None and images.highest >= places:
        raise DataError(
            f"a patch has position {images.highest}; this tower has a table of {places} places. Cut images by "
            "form_of(config) of megalight.data.multimodal.resolution."
        )
    own = vision.num_patches if config.added_rows else vision.num_rows
    if vision.dynamic is None and (other := [length for length in images.lengths if length != own]):
        raise DataError(
            f"an image has {other[0]} rows of patches; this tower reads {own} of each image or tile of "
            f"{vision.image_size} x {vision.image_size} pixels. Cut images by form_of(config) of "
            "megalight.data.multimodal.resolution."
        )


def check_newlines(model: nn.Module, batch: ImageTextBatch) -> None:
    """Refuse tokens that stand for a learned row, where the model has none. Only what the host knows is looked at.

    Args:
        model: the part of the model that reads tokens and images.
        batch: the micro-batch.

    Raises:
        DataError: the batch has such a token.
    """
    if batch.has_newlines and getattr(model.get_submodule("embed"), "newline", None) is None:
        raise DataError(
            "a token stands for the learned row after an image (NEWLINE), and this model has none (newline: false). "
            "The images were cut for another model: cut them by form_of(config) of "
            "megalight.data.multimodal.resolution, or leave newline out of with_images."
        )

"""Whether a batch is one that a vision-language model can read."""

from __future__ import annotations

from typing import Any

from torch import nn

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.data.multimodal.patches import Images
from megalight.errors import DataError
from megalight.models.vlm.config import VLMConfig


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
            "another model: cut them by form_of(config) of megalight.data.multimodal.models."
        )
    places = vision.num_patches if config.added_rows else vision.num_positions
    if vision.dynamic is None and images.highest is not None and images.highest >= places:
        raise DataError(
            f"a patch has position {images.highest}; this tower has a table of {places} places. Cut images by "
            "form_of(config) of megalight.data.multimodal.models."
        )
    own = vision.num_patches if config.added_rows else vision.num_rows
    if vision.dynamic is None and (other := [length for length in images.lengths if length != own]):
        raise DataError(
            f"an image has {other[0]} rows of patches; this tower reads {own} of each image or tile of "
            f"{vision.image_size} x {vision.image_size} pixels. Cut images by form_of(config) of "
            "megalight.data.multimodal.models."
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
            "The images were cut for another model: cut them by form_of(config) of megalight.data.multimodal.models, "
            "or leave newline out of with_images."
        )

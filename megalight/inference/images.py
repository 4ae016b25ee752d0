"""Images in prompts: each takes the places of its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalight.data.multimodal.batch import document_positions, runs_of
from megalight.data.multimodal.images import Images, Resize, decode
from megalight.data.multimodal.resolution import form_of
from megalight.data.multimodal.template import sources
from megalight.errors import DataError
from megalight.models.vision.model import PackedImages
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.task import pack_images

ImageFile = bytes | str | os.PathLike[str]
"""The bytes of an image file, or its path."""


class ImagePrompts(NamedTuple):
    """Prompts with images, as :func:`~megalight.inference.generate.generate` takes them.

    Attributes:
        tokens: the ids of each prompt, with all tokens of each image.
        packed_images: the images; None if there are none.
        axis_positions: for each prompt ``[3, n]``, of a model whose tokens have positions on several axes; else None.
    """

    tokens: list[list[int]]
    packed_images: PackedImages | None
    axis_positions: list[Tensor] | None


def read(image: ImageFile, place: str) -> bytes:
    """Return the bytes of an image file.

    Raises:
        DataError: the file cannot be read.
    """
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise DataError(f"{place} ({os.fspath(image)}) cannot be read: {error.strerror}.") from error


def prepare_images(
    config: VLMConfig,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[ImageFile]],
    *,
    resize: Resize | None = None,
    device: torch.device | str = "cpu",
) -> ImagePrompts:
    """Prepare prompts with images for :func:`~megalight.inference.generate.generate`.

    Args:
        config: the model.
        prompts: token ids, in which each image is one ``config.image_token``.
        images: the images of each prompt, in the order of these tokens.
        resize: how an image becomes a square; see :class:`~megalight.data.multimodal.images.ImageForm`. Models that
            read images of any size need none.
        device: device of the model.

    Raises:
        DataError: a prompt has another number of image tokens than of images, or an image cannot be read.
    """
    if len(prompts) != len(images):
        raise DataError(f"there are {len(prompts)} prompts and images of {len(images)}; give a list for each.")
    for number, (ids, own) in enumerate(zip(prompts, images, strict=True)):
        if (count := list(ids).count(config.image_token)) != len(own):
            raise DataError(
                f"prompt {number} has {count} image tokens (id {config.image_token}) and {len(own)} images; each image "
                "needs one token."
            )
    form = form_of(config, resize)
    cuts = [
        [
            form.among(len(own)).cut(decode(read(image, place), place))
            for index, image in enumerate(own)
            for place in [f"prompt {number}, image {index}"]
        ]
        for number, own in enumerate(images)
    ]
    long, positions = list[list[int]](), list[Tensor]()
    for ids, held in zip(prompts, cuts, strict=True):
        each, left, grids = list[int](), iter(held), []
        for token in ids:
            if token != config.image_token:
                each.append(token)
                continue
            cut = next(left)
            grids.append((len(each), cut.grid))
            each += [token] * len(cut.source)
        long.append(each)
        positions.append(torch.from_numpy(document_positions([len(each)], grids)))
    axes = positions if form.axes else None
    every = [cut for held in cuts for cut in held]
    if not every:
        return ImagePrompts(long, None, axes)
    tokens = torch.tensor([token for ids in long for token in ids])
    source = torch.full_like(tokens, -1)
    source[tokens == config.image_token] = torch.from_numpy(sources(every))
    rows = Images.of_cuts(cuts, form)
    (runs,) = runs_of(source[None].numpy(), rows)
    packed_images = pack_images(config, rows.to(device), source.to(device), 1)
    return ImagePrompts(long, replace(packed_images, runs=runs), axes)

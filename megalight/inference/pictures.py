"""Images in prompts: each takes the places of its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megalight.data.multimodal.images import ImageForm, Resize, decode
from megalight.errors import DataError
from megalight.models.vision.model import Pictures
from megalight.models.vision.pixels import normalised
from megalight.models.vlm.config import VLMConfig
from megalight.types import PackedSequences

ImageFile = bytes | str | os.PathLike[str]
"""The bytes of an image file, or its path."""


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


def with_pictures(
    config: VLMConfig,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[ImageFile]],
    *,
    resize: Resize = "crop",
    device: torch.device | str = "cpu",
) -> tuple[list[list[int]], Pictures | None]:
    """Prepare prompts with images for :func:`~megalight.inference.generate.generate`.

    Args:
        config: the model.
        prompts: token ids, in which each image is one ``config.image_token``.
        images: the images of each prompt, in the order of these tokens.
        resize: how an image becomes a square; see :class:`~megalight.data.multimodal.images.ImageForm`.
        device: device of the model.

    Returns:
        the prompts with all tokens of each image, and the images; None if there are none.

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
    vision = config.vision
    form = ImageForm.of(config, resize)
    patches = [
        form.patches(decode(read(image, place), place))
        for number, own in enumerate(images)
        for index, image in enumerate(own)
        for place in [f"prompt {number}, image {index}"]
    ]
    long = [
        [token for short in ids for token in [short] * (form.num_tokens if short == config.image_token else 1)]
        for ids in prompts
    ]
    if not patches:
        return long, None
    tokens = torch.tensor([token for ids in long for token in ids])
    source = torch.full_like(tokens, -1)
    source[tokens == config.image_token] = torch.from_numpy(form.sources(len(patches)))
    pixels = torch.from_numpy(np.concatenate(patches)).to(device)
    pictures = Pictures(
        normalised(pixels, vision),
        torch.arange(vision.num_rows, device=device).repeat(len(patches)),
        PackedSequences.of_lengths([vision.num_rows] * len(patches), device),
        source.to(device),
    )
    return long, pictures

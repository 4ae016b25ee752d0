"""The form of images that a model takes."""

from __future__ import annotations

from typing import Any

from megalight.data.multimodal.anyres import AnyResForm
from megalight.data.multimodal.dynamic import DynamicForm
from megalight.data.multimodal.forms import Form
from megalight.data.multimodal.images import ImageForm, Resize


def form_of(config: Any, resize: Resize | None = None) -> Form:
    """Return how images become rows and tokens of a model, whose ``VLMConfig`` is given.

    Args:
        config: the model.
        resize: how an image becomes a square, for a model that reads squares. None: as the model says.
    """
    vision, axes = config.vision, config.position.axes is not None
    if (dynamic := vision.dynamic) is None:
        square = ImageForm(
            size=vision.image_size,
            patch=vision.patch_size,
            channels=vision.channels,
            class_token=vision.class_token and not config.added_rows,
            merge=config.projector.merge,
            tiles=vision.tiles,
            newline=config.newline,
            resize=resize or vision.resize,
            resample=vision.resample,
            border=tuple(int(255 * mean) for mean in vision.mean),
            axes=axes,
            mutual=config.mutual,
        )
        if (anyres := vision.anyres) is None:
            return square
        return AnyResForm(square=square, grids=anyres.grids, most=anyres.most, alone=anyres.alone)
    return DynamicForm(
        patch=vision.patch_size,
        merge=config.projector.merge,
        min_pixels=dynamic.min_pixels,
        max_pixels=dynamic.max_pixels,
        patches=dynamic.patches,
        resample=vision.resample,
        window=dynamic.window,
        channels=vision.channels,
        axes=axes,
        extent=dynamic.table > 0,
    )

"""What stands for an image in texts: ``<image>``, and what models have in its place."""

from __future__ import annotations

from collections.abc import Mapping

from megalight.errors import DataError

IMAGE_TOKEN = "<image>"
"""What stands for an image in the text of LLaVA's files, and in prompts."""

FRAMES = (
    "<|vision_start|><|image_pad|><|vision_end|>",
    "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    "<img><IMG_CONTEXT></img>",
)
"""Published models put tokens around that of an image: Qwen2.5-VL and Qwen3-VL, Gemma-3, InternVL."""


def image_text_of(image_token: str, vocabulary: Mapping[str, int], given: str | None = None) -> str:
    """Return what replaces ``<image>`` in texts: as the published model with this image token writes it.

    Args:
        image_token: the token that stands for an image.
        vocabulary: of the tokenizer. A frame whose tokens it lacks is not used.
        given: the text to take instead.

    Raises:
        DataError: the text that is given does not hold the image token once.
    """
    if given is None:
        whole = (frame for frame in FRAMES if image_token in frame and all(t in vocabulary for t in _tokens(frame)))
        return next(whole, image_token)
    if given.count(image_token) != 1:
        raise DataError(
            f"image_text is {given!r}; it must hold the image token {image_token!r} once (--image-text, --image-token)."
        )
    return given


def _tokens(frame: str) -> list[str]:
    return [f"<{part}" for part in frame.strip().split("<")[1:]]

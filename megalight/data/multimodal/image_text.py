"""What stands for an image in texts: ``<image>``, and what models have in its place."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalight.data.chat.template import Span
from megalight.errors import DataError

IMAGE_TOKEN = "<image>"
"""What stands for an image in the text of LLaVA's files, and in prompts."""


@dataclass(frozen=True)
class ImageText:
    """How the place of an image is written.

    Attributes:
        mark: what chat templates read and write there.
        whole: what the tokenizer reads there, with the image token once. It replaces ``mark`` after a template has
            run, so that none of it is trimmed.
    """

    mark: str
    whole: str

    def marked(self, text: str) -> str:
        """Return a text with the mark for each ``<image>``."""
        return text.replace(IMAGE_TOKEN, self.mark)

    def framed(self, text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span]]:
        """Return a text with the whole for each mark, and spans of the same characters in it.

        Marks that are in a whole already stay.
        """
        pattern = re.compile(f"{re.escape(self.whole.strip())}|({re.escape(self.mark)})")
        found = pattern.sub(lambda match: self.whole if match[1] else match[0], text)
        starts = [match.start() for match in pattern.finditer(text) if match[1]]
        growth = len(self.whole) - len(self.mark)

        def moved(place: int) -> int:
            return place + growth * bisect_left(starts, place)

        return found, [(moved(start), moved(end)) for start, end in spans]


PLAIN = ImageText(IMAGE_TOKEN, IMAGE_TOKEN)
"""A model without tokens around that of an image."""

FRAMES = tuple(
    ImageText(mark, whole)
    for mark, whole in (
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"),
        ("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
        ("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>"),
    )
)
"""Published models put tokens around that of an image: Qwen2.5-VL and Qwen3-VL, Gemma-3, InternVL."""


def image_text_of(image_token: str, vocabulary: Mapping[str, int], given: str | None = None) -> ImageText:
    """Return what replaces ``<image>`` in texts: as the published model with this image token writes it.

    Args:
        image_token: the token that stands for an image.
        vocabulary: of the tokenizer. A frame whose tokens it lacks is not used.
        given: the text to take instead.

    Raises:
        DataError: the text that is given does not hold the image token once.
    """
    if given is None:
        known = (each for each in FRAMES if image_token in each.whole and all(t in vocabulary for t in _tokens(each)))
        return next(known, ImageText(image_token, image_token))
    if given.count(image_token) != 1:
        raise DataError(
            f"image_text is {given!r}; it must hold the image token {image_token!r} once (--image-text, --image-token)."
        )
    return ImageText(given, given)


def _tokens(frame: ImageText) -> list[str]:
    return [f"<{part}" for part in frame.whole.strip().split("<")[1:]]

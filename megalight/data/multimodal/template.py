"""Chat templates of models that read images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megalight.data.chat.template import PROBE, ChatTemplate, Span
from megalight.data.multimodal.image_text import PLAIN, ImageText
from megalight.data.multimodal.rows import is_image

IMAGE = {"type": "image"}
"""A part of a message, as templates know it."""


@dataclass(frozen=True)
class ImageTemplate(ChatTemplate):
    """A chat template whose messages have images: ``<image>`` in their texts, or parts of the type ``image``.

    Parts are written as the template writes them, such as with a line break behind. If it knows none, the text of an
    image takes their place. A template that reads parts alone gets a part for each ``<image>``, and writes the line
    breaks beside it itself.

    Attributes:
        image: how the place of an image is written.
    """

    image: ImageText = PLAIN

    @cached_property
    def writes_images(self) -> bool:
        """Whether it writes the mark of an image for a part of this type."""
        text = self.probe([IMAGE, {"type": "text", "text": PROBE}])
        return text.count(self.image.mark) == 1 and PROBE in text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, **options: Any
    ) -> tuple[str, list[Span]]:
        ready = [
            {**each, "content": self._content(each["content"])} if "content" in each else each for each in messages
        ]
        return self.image.framed(*super()._render(ready, tools, **options))

    def _content(self, content: Any) -> Any:
        """Return the content of a message in the form that the template reads."""
        if isinstance(content, str):
            text = self.image.marked(content)
            return self._divided(text) if self.parts_only and self.writes_images else text
        if not isinstance(content, list):
            return content
        if not self.writes_images:
            return "".join(self.image.mark if is_image(part) else self.image.marked(part["text"]) for part in content)
        return [
            IMAGE if is_image(part) else {"type": "text", "text": self.image.marked(part["text"])} for part in content
        ]

    def _divided(self, text: str) -> list[Mapping[str, Any]]:
        """Return the parts of a text with marks."""
        first, *others = text.split(self.image.mark)
        if not others:
            return [{"type": "text", "text": text}]
        *middle, last = (each.lstrip("\n") for each in others)
        pieces = [each.rstrip("\n") for each in (first, *middle)] + [last]
        found = list[Mapping[str, Any]]()
        for number, piece in enumerate(pieces):
            found += [IMAGE] * (number > 0)
            found += [{"type": "text", "text": piece}] * bool(piece)
        return found

"""Where rows of conversations have their images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megalight.errors import DataError

KEYS = ("images", "image")
"""Keys of rows that hold images. A null is as no key: Parquet fills with it what a row does not have."""
TYPES = ("image", "image_url")
"""Types of parts of messages that are images."""
HOLDERS = ("image", "image_url", "url", "path")
"""Keys of such a part that may hold the image."""


def images_of(record: Mapping[str, Any], place: str) -> list[Any]:
    """Return the images of a row: of its key, or of parts of its messages.

    Raises:
        DataError: it has both.
    """
    given = next((record[key] for key in KEYS if record.get(key) is not None), None)
    own = [held for held in map(_held, _parts(record)) if held is not None]
    if given is not None and own:
        raise DataError(f"{place} has images beside its messages and in them; leave one of them out.")
    return own if given is None else given if isinstance(given, list) else [given]


def with_marks(record: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a row with ``text`` in the place of each part of a message that is an image."""

    def marked(part: Any) -> Any:
        return {"type": "text", "text": text} if _is_image(part) else part

    return {key: value if key in KEYS else _mapped(value, marked) for key, value in record.items()}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in TYPES


def _held(part: Mapping[str, Any]) -> Any:
    found = next((part[key] for key in HOLDERS if part.get(key) is not None), None)
    return found["url"] if isinstance(found, Mapping) and "url" in found else found


def _parts(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    found = list[Any]()
    for key, value in record.items():
        if key not in KEYS:
            _mapped(value, found.append)
    yield from filter(_is_image, found)


def _mapped(messages: Any, change: Callable[[Any], Any]) -> Any:
    """Return messages with each part of their contents changed; anything else as it is."""
    if not isinstance(messages, list):
        return messages
    return [
        {**each, "content": [change(part) for part in each["content"]]}
        if isinstance(each, Mapping) and isinstance(each.get("content"), list)
        else each
        for each in messages
    ]

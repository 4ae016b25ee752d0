"""Where rows of conversations have their images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in TYPES


def _held(part: Mapping[str, Any]) -> Any:
    found = next((part[key] for key in HOLDERS if part.get(key) is not None), None)
    return found["url"] if isinstance(found, Mapping) and "url" in found else found


def _parts(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key, value in record.items():
        for message in value if key not in KEYS and isinstance(value, list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            yield from filter(is_image, content if isinstance(content, list) else ())

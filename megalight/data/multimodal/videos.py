"""Videos, which are not read: how they are recognized, so that they are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEYS = ("video", "videos")
"""Keys of rows that hold videos, and types of parts of a message."""
TOKENS = ("<video>", "<|video_pad|>")
"""Tokens of published models that stand for videos."""
SUFFIXES = ("mp4", "avi", "mov", "mkv", "webm", "mpg", "mpeg")


def is_video(data: bytes) -> bool:
    """Return whether the bytes of a file begin as those of a video: MP4 and MOV, AVI, Matroska and WebM, MPEG."""
    boxes = data[4:8] in (b"ftyp", b"moov", b"mdat")
    return boxes or data[:4] in (b"\x1aE\xdf\xa3", b"\0\0\1\xba", b"\0\0\1\xb3") or data[8:12] == b"AVI "


def videos_of(record: Any) -> str | None:
    """Return where a row of conversations has a video; None: it has none."""
    if not isinstance(record, Mapping):
        return None
    return next((f"key {key!r}" for key in KEYS if record.get(key)), None) or next(_parts(record), None)


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    # Messages may be lists of parts, each of a type.
    for messages in record.values():
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping) and part.get("type") in KEYS:
                    yield f"a message with a part of type {part['type']!r}"

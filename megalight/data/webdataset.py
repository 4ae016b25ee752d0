"""WebDataset shards: tar files in which neighboring files with one name are a sample.

They are those of the package ``webdataset`` (https://github.com/webdataset/webdataset). The name of a file up to the
first dot after its folders is the sample's key, and the rest names the part: ``0001.jpg`` and ``0001.json`` are the
parts ``jpg`` and ``json`` of the sample ``0001``. Shards are not packed by gzip, so that workers read the parts that
they need at their places.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megalight.errors import DataError, decode_utf8

BLOCK = 1 << 20
IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "jp2", "avif"})
"""Last suffixes of parts that are images."""


class TarSample(NamedTuple):
    """The places of a sample's parts in its file.

    Attributes:
        key: what the names of its files begin with.
        parts: name, offset in bytes, and size in bytes of each.
    """

    key: str
    parts: list[tuple[str, int, int]]


def samples(path: Path) -> Iterator[TarSample]:
    """Yield the samples of a shard in order. Only headers are read.

    Raises:
        DataError: it is no tar file, it is packed, cut off or joined from several, or a sample has a part twice.
    """
    size, current = path.stat().st_size, TarSample("", [])
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, name = _named(member.name)
                if not member.isfile() or not name or (key.startswith("__") and key.endswith("__")):
                    continue
                if member.offset_data + member.size > size:
                    raise DataError(f"{path} is cut off inside of {member.name!r}; copy it again.")
                if key != current.key:
                    if current.parts:
                        yield current
                    current = TarSample(key, [])
                if any(name == other for other, *_ in current.parts):
                    raise DataError(f"{path}: the sample {key!r} has the part {name!r} twice.")
                current.parts.append((name, member.offset_data, member.size))
            _check_end(path, tar.offset)
    except tarfile.TarError as error:
        raise DataError(
            f"{path} is no tar file that can be read ({error}). Is it incomplete? Unpack .tar.gz files first."
        ) from error
    if current.parts:
        yield current


def _check_end(path: Path, end: int) -> None:
    """Refuse a shard that does not end where its last file does: tar files say so with a block of zeros."""
    with open(path, "rb") as file:
        file.seek(end)
        found = file.read(tarfile.BLOCKSIZE)
        if len(found) < tarfile.BLOCKSIZE:
            raise DataError(f"{path} is cut off between two of its files; copy it again.")
        while found:
            if found.count(0) < len(found):
                raise DataError(f"{path} goes on after its end, as tar files do that were joined; divide it again.")
            found = file.read(BLOCK)


def _named(path: str) -> tuple[str, str]:
    """Return the key and the part of a file's name."""
    folder, slash, file = path.rpartition("/")
    stem, _, name = file.partition(".")
    return (folder + slash + stem, name.lower()) if stem else ("", "")


def groups(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Yield samples of about a megabyte together: the number of the first, their places as JSON, and bytes of parts."""
    first, held, size = 0, list[TarSample](), 0
    for number, sample in enumerate(samples(path)):
        held.append(sample)
        size += sum(part[2] for part in sample.parts)
        if size >= BLOCK:
            yield first, json.dumps(held).encode(), size
            first, held, size = number + 1, [], 0
    if held:
        yield first, json.dumps(held).encode(), size


def records(path: Path, places: bytes) -> Iterator[tuple[str, Any]]:
    """Yield rows of conversations, each with its place for messages, of samples from :func:`groups`.

    A sample has images, and ``json`` with the row, or ``txt`` with a caption. The row's ``images`` name parts of the
    sample, or its files; without them, all images of the sample are those of the row, in their order. A row that cannot
    be read is yielded as the :class:`~megalight.errors.DataError` that says so.
    """
    with open(path, "rb") as file:
        for key, parts in json.loads(places):
            place = f"{path} sample {key}"
            held = {name: (offset, size) for name, offset, size in parts}

            def read(name: str, held: dict[str, tuple[int, int]] = held) -> bytes:
                file.seek(held[name][0])
                return file.read(held[name][1])

            try:
                yield place, _record(place, key, list(held), read)
            except DataError as error:
                yield place, error


def _record(place: str, key: str, names: list[str], read: Any) -> Any:
    image_names = [name for name in names if name.rpartition(".")[2] in IMAGES]
    if "json" in names:
        text = decode_utf8(read("json"), f"{place}: its json")
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: its json is not JSON ({error}).") from error
        if not isinstance(record, dict):
            raise DataError(f"{place}: its json is a {type(record).__name__}; it must be an object, a row.")
        given = record.pop("image", None)
        given = record.pop("images", given)
        if given is not None:
            image_names = [_part(place, key, each, names) for each in (given if isinstance(given, list) else [given])]
    elif "txt" in names:
        if not image_names:
            raise DataError(
                f"{place} has a caption, and no image; the files of a sample stand next to each other in a shard. A "
                "text without images is a row (json)."
            )
        caption = decode_utf8(read("txt"), f"{place}: its txt")
        record = {"prompt": "<image>" * len(image_names), "completion": caption.strip()}
    else:
        raise DataError(f"{place} has the parts {', '.join(names)}; it needs json, a row, or txt, a caption.")
    return record | ({"images": [{"bytes": read(name)} for name in image_names]} if image_names else {})


def _part(place: str, key: str, given: Any, names: list[str]) -> str:
    """Return the part that a row names: by its name, or by that of its file."""
    file = str(given).rpartition("/")[2]
    own = key.rpartition("/")[2]
    for name in (str(given).lower(), file.removeprefix(f"{own}.").lower()):
        if name in names:
            return name
    raise DataError(f"{place}: the row names the image {str(given)!r}, and the sample has {', '.join(names)}.")

"""Folders of ``transformers`` as files: ``config.json``, and tensors in safetensors. No torch in here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalight.checkpoint.disk.datafile import OpenFile
from megalight.checkpoint.disk.files import MAX_HEADER, PathLike, TensorEntry, blocks, checked_name, parse_header
from megalight.checkpoint.disk.index import Chunk, TensorInfo
from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.inspection import CheckpointReport, floats
from megalight.errors import CheckpointError, hub_hint

CONFIG = "config.json"
IMAGE_PROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
"""Settings of the image processor: in a file of its own, or in newer folders among those of all processors."""
TOKENIZER_SETTINGS = "tokenizer_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` looks like a folder that ``save_pretrained`` wrote."""
    return (place(path) / CONFIG).is_file()


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read ``config.json`` of a folder.

    Raises:
        CheckpointError: there is no such folder, or its configuration is not JSON.
    """
    folder = place(path)
    if not is_folder(folder):
        if not folder.exists():
            raise CheckpointError(
                f"{folder}: nothing is there. Give a checkpoint, a run's folder, or a folder of transformers."
                f"{hub_hint(folder)}"
            )
        raise CheckpointError(f"{folder} holds no {CONFIG}; give the folder that save_pretrained wrote.")
    return json_of(folder / CONFIG)


def image_processor(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the settings of a folder's image processor; none if it has no such file.

    Raises:
        CheckpointError: the file is not JSON.
    """
    folder = place(path)
    if (folder / PROCESSOR).is_file():
        found = json_of(folder / PROCESSOR).get("image_processor")
        if isinstance(found, dict):
            return found
    return json_of(folder / IMAGE_PROCESSOR) if (folder / IMAGE_PROCESSOR).is_file() else {}


def tensor_names(path: str | os.PathLike[str]) -> set[str]:
    """Return the names of all tensors in a folder, as its files spell them.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    folder = place(path)
    return {entry.key for name in files_of(folder) for entry in header(folder, name)}


def files_of(folder: PathLike) -> list[str]:
    """List the names of the weight files. They may be links, as in the cache of the Hugging Face Hub.

    An index beside a single file is an older one, which ``transformers`` does not read either.
    """
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        listed = json_of(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{folder / INDEX} names no files; copy the folder again.")
        names = sorted({checked_name(name) for name in listed.values()})
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / name} does not exist; weights are only read from safetensors files. Load the model with "
                "transformers and save it again with save_pretrained, or copy the folder again."
            )
    return names


def header(folder: PathLike, name: str) -> list[TensorEntry]:
    """Return the entries in the header of one file of tensors.

    Raises:
        CheckpointError: it is no safetensors file, or torn.
    """
    file = folder / name
    size = file.stat().st_size
    try:
        with OpenFile(file, str(file)) as opened:
            start = bytearray(min(8, size))
            opened.read(0, memoryview(start))
            # A damaged length must not fill the memory.
            data = start + bytearray(min(int.from_bytes(start, "little"), MAX_HEADER, size - len(start)))
            opened.read(len(start), memoryview(data)[len(start) :])
        return parse_header(bytes(data), size, str(file))
    except CheckpointError as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error} Copy it again.") from error


def json_of(file: PathLike) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    return json_object(file_of(file), str(file))


def file_of(file: PathLike) -> bytes:
    """Return what is in a file beside the weights.

    Raises:
        CheckpointError: it cannot be read, or is larger than any such file.
    """
    try:
        # The size first: a file that is not what its name says may be larger than memory.
        if (size := file.stat().st_size) > MAX_HEADER:
            raise CheckpointError(f"{file} has {size} bytes; at most {MAX_HEADER} are read. Copy the folder again.")
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy the folder again.") from error


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder.

    Raises:
        CheckpointError: it is something else; the message begins with ``what``.
    """
    try:
        content = json.loads(data)
    # Brackets without end nest deeper than the parser can follow.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error}); copy the folder again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} holds a {type(content).__name__}; a JSON object is expected.")
    return content


def describe(path: str | os.PathLike[str], *, norms: bool = False) -> CheckpointReport:
    """Report what the folder holds, like :func:`megalight.checkpoint.inspection.describe`.

    Tensors have the names and shapes of the files. The files have no checksums: with ``norms`` every byte is read, and
    nothing is verified but its size.

    Raises:
        CheckpointError: a file is missing, incomplete, or no safetensors file.
    """
    folder, config = place(path), read_config(path)
    tensors: dict[str, TensorInfo] = {}
    for name in files_of(folder):
        for entry in header(folder, name):
            if entry.key in tensors:
                first = tensors[entry.key].chunks[0].file
                raise CheckpointError(f"{folder} holds {entry.key} twice, in {first} and {name}; copy it again.")
            whole = Chunk((0,) * len(entry.shape), entry.shape, name, entry.key, entry.start, ())
            tensors[entry.key] = TensorInfo(entry.key, entry.shape, entry.dtype, (whole,))
    names = [*files_of(folder), *(each for each in (CONFIG, INDEX) if (folder / each).is_file())]
    kinds = config.get("architectures") or []
    return CheckpointReport(
        path=folder,
        tensors=tensors,
        norms={key: _norm(folder, info) for key, info in tensors.items()} if norms else {},
        files={name: int((folder / name).stat().st_size) for name in names},
        progress={
            "model_type": str(config.get("model_type")),
            **({"architecture": str(kinds[0])} if isinstance(kinds, list) and kinds else {}),
        },
        saved_at=(folder / CONFIG).stat().st_mtime_ns / 1e9,
        world_size=1,
        versions={"transformers": str(config.get("transformers_version", "of unknown version"))},
        scheme="a folder of transformers",
        layout="",
    )


def values(folder: PathLike, info: TensorInfo) -> NDArray[np.float64]:
    """Return a stored tensor of a report in float64, with a last dim of 1 (2 if it is complex).

    Raises:
        CheckpointError: the file is torn.
    """
    parts = list(_blocks(folder, info))
    whole = np.concatenate(parts) if parts else np.empty(0)
    return whole.reshape(*info.shape, 2 if info.dtype == "complex64" else 1)


def _norm(folder: PathLike, info: TensorInfo) -> float:
    """The Euclidean norm of a stored tensor, block by block, in float64."""
    return sqrt(sum(float(np.square(block).sum()) for block in _blocks(folder, info)))


def _blocks(folder: PathLike, info: TensorInfo) -> Iterator[NDArray[np.float64]]:
    (chunk,) = info.chunks
    with OpenFile(folder / chunk.file, f"{folder}/{chunk.file}") as file:
        for start, stop in blocks(info.nbytes):
            raw = bytearray(stop - start)
            file.read(chunk.start + start, memoryview(raw))
            yield floats(np.frombuffer(raw, np.uint8), info.dtype)

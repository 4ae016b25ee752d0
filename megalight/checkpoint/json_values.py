"""Nested Python values to JSON and back, exactly, with no code execution: counters, schedules, random states, settings.

Values that JSON cannot express are tagged: ``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}`` for keys that are
not strings, ``{"$tensor": "0"}`` for tensors, which go to a safetensors file of the same name.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalight.checkpoint.boxes import as_bytes, dtype_name
from megalight.checkpoint.disk.files import (
    FileRecord,
    PathLike,
    TensorEntry,
    dump_json,
    pack_header,
    parse_header,
    parse_json,
    read_file,
)
from megalight.errors import CheckpointError

_PLAIN = (type(None), bool, int, str)

_TAGGED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, lambda value: sorted(value, key=repr), set),
    "frozenset": (frozenset, lambda value: sorted(value, key=repr), frozenset),
    "ordered": (OrderedDict, lambda value: [list(pair) for pair in value.items()], OrderedDict),
    "counter": (Counter, lambda value: [list(pair) for pair in value.items()], lambda pairs: Counter(dict(pairs))),
    "size": (torch.Size, list, torch.Size),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, None, True)),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda name: _dtype(name)),
    "device": (torch.device, str, torch.device),
    "float": (float, repr, float),
}
"""Tag -> (exact type, to plainer values, back)."""

_BY_TYPE = {kind: tag for tag, (kind, _, _) in _TAGGED.items()}


def encode(value: Any, tensors: list[Tensor], path: str = "") -> Any:
    """``value`` in JSON's terms; its tensors are appended to ``tensors``.

    Raises:
        CheckpointError: a value of another type; the message says where in the tree it is and what to do.
    """
    # The exact type: a subclass would come back as another class.
    kind = type(value)
    if kind in _PLAIN or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(item, tensors, f"{path}[{number}]") for number, item in enumerate(value)]
    if kind is dict:
        # A key that begins with `$` would be read as a tag.
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [[key, item] for key, item in value.items()]
        return {"$dict": encode(pairs, tensors, path)}
    if kind in (Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    # Complex numbers and plain ones only: arrays of objects would need a pickle.
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        # A copy, as the array may change before it is written.
        array = np.asarray(value)
        tensors.append(torch.from_numpy(array.copy()))
        return {"$array" if kind is np.ndarray else "$number": len(tensors) - 1}
    if kind in _BY_TYPE:
        tag = _BY_TYPE[kind]
        return {f"${tag}": encode(_TAGGED[tag][1](value), tensors, path)}
    raise CheckpointError(
        f"the value at {path or 'the top'} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint does "
        "not keep (nothing on disk may run code). Give plain values: dicts, lists, tuples, numbers, strings, tensors."
    )


def decode(value: Any, tensors: list[Tensor], what: str) -> Any:
    """What :func:`encode` was given. Tensors are on the CPU; parameters come back as tensors.

    Raises:
        CheckpointError: an unknown tag, or one with the wrong content.
    """
    if isinstance(value, list):
        return [decode(item, tensors, what) for item in value]
    if not isinstance(value, dict):
        return value
    # A dict of ours has string keys without a tag, so a tag is no accident.
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(item, tensors, what) for key, item in value.items()}
    # The content first: tags may be nested.
    tag, content = tags[0][1:], decode(value[tags[0]], tensors, what)
    try:
        if len(value) > 1:
            raise ValueError("a tag stands alone")
        if tag == "dict":
            return dict(content)
        if tag in ("tensor", "array", "number"):
            tensor = tensors[content]
            # As a number of numpy's type again: its dtype is part of the value.
            return tensor if tag == "tensor" else tensor.numpy() if tag == "array" else tensor.numpy()[()]
        return _TAGGED[tag][2](content)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{what} holds a bad value tagged {tags[0]!r}: {error!r}.") from error


def _dtype(name: str) -> torch.dtype:
    # `getattr` of torch could find anything; only a dtype is taken.
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


def dumps(value: Any, what: str) -> tuple[bytes, bytes | None]:
    """A tree as the bytes of a JSON file, and of a safetensors file where it has tensors.

    Raises:
        CheckpointError: a value that cannot be kept; ``what`` is named.
    """
    tensors: list[Tensor] = []
    try:
        text = dump_json(encode(value, tensors, what))
    except (RecursionError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be kept: {error} (nested too deeply, or inside itself?).") from error
    if not tensors:
        return text, None
    entries = [TensorEntry(str(n), dtype_name(tensor.dtype), tuple(tensor.shape)) for n, tensor in enumerate(tensors)]
    header, _ = pack_header(entries, {"format": "pt"})
    body = (as_bytes(tensor.contiguous().cpu()).numpy().tobytes() for tensor in tensors)
    return text, b"".join((header, *body))


def loads(text: bytes, data: bytes | None, what: str) -> Any:
    """The tree again. ``what``: path of the files without their suffixes, for messages.

    Raises:
        CheckpointError: the bytes are no tree.
    """
    tensors: dict[str, Tensor] = {}
    if data is not None:
        memory = np.frombuffer(data, np.uint8)
        for entry in parse_header(data, len(data), f"{what}.safetensors"):
            # Memory of its own: no tensor keeps the others' alive. On the host, also where models are built on meta.
            tensor = tensors[entry.key] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
            as_bytes(tensor).numpy()[:] = memory[entry.start : entry.start + entry.nbytes]
    try:
        ordered = [tensors[str(number)] for number in range(len(tensors))]
        return decode(parse_json(text, f"{what}.json"), ordered, what)
    except (KeyError, RecursionError) as error:
        raise CheckpointError(f"{what} is malformed: {type(error).__name__} {error}.") from error


def files(name: str, value: Any, what: str) -> dict[str, bytes]:
    """A tree as files by name: ``<name>.json``, and ``<name>.safetensors`` where it has tensors.

    Raises:
        CheckpointError: see :func:`dumps`.
    """
    text, data = dumps(value, what)
    return {f"{name}.json": text, **({} if data is None else {f"{name}.safetensors": data})}


def read(root: PathLike, name: str, records: dict[str, FileRecord]) -> Any:
    """The verified tree ``name`` of a checkpoint."""
    text = read_file(root, f"{name}.json", records[f"{name}.json"])
    file = f"{name}.safetensors"
    data = read_file(root, file, records[file]) if file in records else None
    return loads(text, data, f"{root}/{name}")

"""Write ``transformers`` folders: weights as safetensors files from all ranks, configuration, tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor
from torch.distributed import ProcessGroup

from megalight.checkpoint.boxes import dtype_name
from megalight.checkpoint.disk.files import PathLike, TensorEntry, sync_directory, write_file
from megalight.checkpoint.disk.publish import Save, absolute, begin_folder, check_new, delete
from megalight.checkpoint.disk.rank_files import naming, write_tensors
from megalight.checkpoint.foreign.transformers_folder import (
    CONFIG,
    IMAGE_PROCESSOR,
    INDEX,
    PROCESSOR,
    WEIGHTS,
    is_folder,
    json_object,
)
from megalight.checkpoint.ranks import Ranks, alone
from megalight.checkpoint.saving import host_blocks
from megalight.checkpoint.sources import TensorSource, UnionSource
from megalight.checkpoint.view import WantedTensor, itself, stream
from megalight.data.tokenizer import FILE as TOKENIZER
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.config import with_floats
from megalight.models.family import Family
from megalight.models.hugging_face.folder import GENERATION, UNREAD, is_finite, warn_not_finite
from megalight.models.loading import PREFIX
from megalight.models.stored import StoredModel
from megalight.nn.canonical import canonical_tensors, parts
from megalight.parallel.source import RenamedSource

MAX_FILE = 5 << 30
"""Bytes of weights per file. A larger tensor has a file of its own."""

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Token ids in ``config.json`` and ``generation_config.json``."""


def export(
    model: StoredModel,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` of ``transformers`` reads. All ranks of the group call it together.

    Each rank reads and writes whole tensors, one after another. The folder appears when it is complete.

    Args:
        model: the model.
        path: the folder, on storage that all ranks share, or a new one in remote storage.
        dtype: dtype of the weights. None: as they are stored. Masters are read for float32, where there are any.
        overwrite: replace a folder of transformers that is there. On a disk it stays until the new one is complete; in
            remote storage it is deleted first.
        process_group: the ranks that call; None means the default group, or this process alone.

    Raises:
        CheckpointError: on every rank: tensors are missing or damaged, or a rank cannot write. Nothing is left behind.
        ConfigurationError: ``transformers`` has no such model.
    """
    ranks, target = Ranks(process_group), absolute(path)
    stage = f"exporting to {target}"
    # Everything that can be refused is refused before a rank writes.
    whole = _whole(model, dtype)
    values, source = config_values(model, {each.dtype for each in whole.values()}), model.weights
    if kept := load(model.files[UNREAD]) if UNREAD in model.files else {}:
        whole |= {
            name: WantedTensor(tuple(each.shape), dtype or each.dtype, {UNREAD + name: itself})
            for name, each in kept.items()
        }
        source = UnionSource(source, TensorSource({UNREAD + name: each for name, each in kept.items()}))
        values = _weights(model.family).with_unread(values, kept)
    files = _files(whole)
    beside = files_beside(model, values)
    started: list[Save] = []

    def begin() -> PathLike:
        # Only another folder of transformers is replaced, and nothing else of the user.
        if not (overwrite and is_folder(target)):
            check_new(target)
        elif not isinstance(target, Path):
            # A store has no rename that could replace it, so it goes first.
            delete(target)
        started.append(begin_folder(target))
        folder: PathLike = started[0].folder
        return folder

    # Alone: each rank reads its own files' tensors, and must not wait for others between them.
    def write() -> None:
        strange: list[str] = []

        def seen(keys: list[str], tensors: Iterable[Tensor]) -> Iterator[Tensor]:
            for key, tensor in zip(keys, tensors, strict=True):
                strange.extend([] if is_finite(tensor) else [key])
                yield tensor

        with alone() as group:
            # In turns: files have about equal sizes, and so have the shares of the ranks.
            for name, keys in list(files.items())[ranks.rank :: ranks.size]:
                tensors = stream(source, [whole[key] for key in keys], group)
                entries = [TensorEntry(key, dtype_name(whole[key].dtype), whole[key].shape) for key in keys]
                # Tensors go to disk one by one, so memory for one of them is enough.
                write_tensors(folder / name, entries, host_blocks(seen(keys, tensors)), name)
        warn_not_finite(str(target), strange)

    def finish() -> None:
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(each.nbytes for each in whole.values())},
                "weight_map": {key: name for name, keys in files.items() for key in sorted(keys)},
            }
            beside[INDEX] = _json(index)
        # The configuration is the last of them: without it, a folder in remote storage is no model.
        for name in sorted(beside, key=CONFIG.__eq__):
            with naming(name):
                write_file(folder / name, beside[name])
        # The folder is on disk before its new name is: after a crash it is there as a whole, or not at all.
        sync_directory(folder)
        started[0].publish()

    try:
        folder = ranks.first(stage, begin)
        ranks.together(stage, write)
        ranks.first(stage, finish)
    # Also on an interrupt: a half-written folder must not stay.
    except BaseException:
        for partial in started:
            partial.discard()
        raise


def _whole(model: StoredModel, dtype: torch.dtype | None) -> dict[str, WantedTensor]:
    """Return their tensors, by name.

    Raises:
        CheckpointError: the source lacks a tensor of the model, or has others.
    """
    weights = _weights(model.family)
    with torch.device("meta"):
        empty = model.family.model(model.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(empty).items()}
    weights_only = {part.name for part in parts(empty)}
    stored = RenamedSource(model.weights, "", PREFIX).tensors
    wrong = [f"{name} is missing" for name in sorted(shapes.keys() - stored.keys())]
    wrong += [f"{name} is not of this model" for name in sorted(stored.keys() - shapes.keys())]
    wrong += [
        f"{name} is {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and tuple(stored[name].shape) != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"the tensors do not fit the model's configuration: {'; '.join(wrong[:5])}{more}.")
    whole = {}
    for name, each in weights.map(model.config).layout(shapes).items():
        first = next(iter(each.parts))
        # buffers keep their dtype: the steps of an expert bias are too small for half of the bits
        kind = dtype if dtype is not None and first in weights_only else getattr(torch, stored[first].dtype)
        whole[name] = WantedTensor(each.shape, kind, {PREFIX + ours: place.views for ours, place in each.parts.items()})
    return whole


def _weights(family: Family) -> Any:
    if family.weights is None:
        raise ConfigurationError(f"transformers has no models like those of the family {family.name}.")
    return family.weights


def _files(whole: Mapping[str, WantedTensor]) -> dict[str, list[str]]:
    """Return the names of the files, and the tensors in each: wide dtypes first, so that all are aligned."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, each in whole.items():
        if groups[-1] and size + each.nbytes > MAX_FILE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += each.nbytes
    for group in groups:
        group.sort(key=lambda name: -whole[name].dtype.itemsize)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": group for n, group in enumerate(groups, 1)}


def config_values(model: StoredModel, dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Return ``config.json``, in the kind of the model that training began with, if that is known.

    Args:
        dtypes: those of the weights.
    """
    began = json_object(model.files.get(CONFIG, b"{}"), CONFIG)
    config = with_floats(model.config)
    values: dict[str, Any] = _weights(model.family).write_config(config, began.get("model_type"))
    # `from_pretrained` uses this dtype for the whole model.
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    tokens = {key: _tokens(began.get(key), model.config.vocab_size) for key in SPECIAL}
    return {**values, "dtype": dtype_name(widest), **tokens}


def _tokens(ids: Any, vocab_size: int) -> Any:
    """Return a token id, or a list of them, or None if one is not in the vocabulary."""
    known = ids if isinstance(ids, list) else [ids]
    return ids if known and all(isinstance(each, int) and 0 <= each < vocab_size for each in known) else None


def files_beside(model: StoredModel, values: dict[str, Any]) -> dict[str, bytes]:
    """Return the files beside the weights: those that came with the model, settings for generation, ``config.json``.

    Of a model that reads images, also how these are prepared.

    Special tokens are filled in. They come from the settings for generation that training began with, or else from the
    tokenizer.
    """
    files = {name: content for name, content in model.files.items() if name not in (CONFIG, UNREAD)}
    generation = json_object(files.get(GENERATION, b"{}"), GENERATION)
    known = {key: generation[key] for key in SPECIAL if generation.get(key) is not None}
    if not known and TOKENIZER in files:
        tokenizer = Tokenizer.of_files(files)
        known = {"eos_token_id": tokenizer.eod_id, "pad_token_id": tokenizer.pad_id}
    # What the model has said itself comes first.
    values |= {key: value for key, value in known.items() if values[key] is None}
    if model.family.generates and not generation:
        files[GENERATION] = _json({key: values[key] for key in SPECIAL if values[key] is not None})
    processors = _weights(model.family).processors
    # A folder that training began with has said it itself.
    if processors is not None and not files.keys() & {IMAGE_PROCESSOR, PROCESSOR}:
        vocabulary = Tokenizer.of_files(files).vocabulary if TOKENIZER in files else {}
        own = processors(model.config, values, vocabulary)
        # What the tokenizer has said itself stays.
        files |= {name: _json(content | json_object(files.get(name, b"{}"), name)) for name, content in own.items()}
    return {**files, CONFIG: _json(values)}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()

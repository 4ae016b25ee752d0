"""A ``torch_dist`` folder of Megatron-core as a source of tensors by canonical name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megalight.checkpoint.disk.files import TORCH_METADATA, PathLike, parse_json
from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign import pickles
from megalight.checkpoint.foreign.pickles import Record
from megalight.checkpoint.foreign.torch_dcp import Shard, TorchFolder, TorchTensor
from megalight.checkpoint.loading import compare
from megalight.checkpoint.ranks import Ranks
from megalight.errors import CheckpointError
from megalight.models.gpt.config import GPTConfig
from megalight.models.gpt.megatron import buckets
from megalight.models.gpt.megatron.arguments import COMMON, config_of
from megalight.models.gpt.megatron.param_mapping import OPTIMIZER, ParamMapping, map_params, plain
from megalight.models.loading import check_held
from megalight.parallel.shard import boxes
from megalight.parallel.source import FillReport, Target

KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)")
"""Their key of a state of one parameter, in the shape of the parameter."""

FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:distributed\.)?dp_group_idx_")
"""Their keys of state as it lies in flat shards."""

MASTERS = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


def map_states(
    config: GPTConfig, tensors: Mapping[str, TorchTensor], objects: Iterable[str], prefix: str
) -> tuple[dict[str, ParamMapping], list[str]]:
    """Return the place of each state by our name, and why there is none, as lines for a message.

    Nothing is returned unless all is there: moments of some parameters alone would mislead training.

    Args:
        config: the model's configuration.
        tensors: their tensors by key, in the shapes of parameters where they can be.
        objects: their keys of all else.
        prefix: added before canonical names of weights.
    """
    keys: dict[str, dict[str, str]] = {}
    for key in tensors:
        match = KEY.fullmatch(key)
        if match:
            state = match[1] if match[1] in MOMENTS else MASTERS
            keys.setdefault(state, {})[plain(match[2])] = key
    if not keys:
        if any(FLAT.match(key) for key in (*tensors, *objects)):
            return {}, [unreadable("dp_zero_gather_scatter", "lies in pickles of each rank")]
        return {}, ["its keys are not known"] if any(OPTIMIZER.match(key) for key in tensors) else []
    # Weights in float32 are their own masters.
    problems = [f"there is no {state}" for state in MOMENTS if state not in keys]
    places = {}
    for state, by_name in keys.items():
        found, wrong = map_params(config, {name: tensors[key] for name, key in by_name.items()}, buffers=False)
        problems += [f"{state}: {problem}" for problem in wrong]
        for name, mapping in found.items():
            places[f"optimizer.{state}.{prefix}{name}"] = replace(mapping, key=by_name[mapping.key])
    return ({}, problems) if problems else (places, [])


def unreadable(kind: str, why: str) -> str:
    """Return a line for a message: state in this format is not read, and what to do."""
    return (
        f"it is in the format {kind}, and {why}. Resume with Megatron-LM in the layout that saved it, and save once "
        "with --dist-ckpt-optim-fully-reshardable"
    )


def kind_of(common: Any) -> str:
    """Return their name of the format of the distributed optimizer's state; empty if there is none."""
    names = _entries(common.get("optimizer"), "param_state_sharding_type")
    return next((name for name in names if isinstance(name, str)), "")


def entries_of(common: Any, places: Mapping[str, ParamMapping]) -> dict[str, Any]:
    """Return the entries of a checkpoint with these states, which any parameter groups resume from.

    Args:
        common: the content of ``common.pt``.
        places: the result of :func:`map_states`.
    """
    iteration = common.get("iteration")
    iteration = iteration if isinstance(iteration, int) else 0
    # Skipped iterations make no step of the optimizer.
    groups = (group for found in _entries(common.get("optimizer"), "param_groups") for group in found)
    steps = (group.get("step") for group in groups if isinstance(group, dict))
    step = max((step for step in steps if type(step) is int), default=iteration)
    kinds = {state: next(p.dtype for name, p in places.items() if f".{state}." in name) for state in MOMENTS}
    group = {
        "options": {},
        "scalars": {"step": torch.tensor(float(step))},
        "tensors": {state: f"torch.{kind}" for state, kind in kinds.items()},
    }
    return {"global_step": iteration, "optimizer": {"class": "Adam", "groups": group, "magnitudes": False}}


def _entries(state: Any, name: str, levels: int = 4) -> Iterator[Any]:
    """Yield the entries of this name, in one optimizer or in several."""
    state = state.state if isinstance(state, Record) else state
    if isinstance(state, dict) and levels:
        if isinstance(found := state.get(name), list | str):
            yield found
        for inner in state.values():
            yield from _entries(inner, name, levels - 1)


# Flat state of the format ``fully_sharded_model_space``


NOTES = "mcore_data"
"""Their attribute of the metadata: key -> what torch has no place for."""

SHAPE = "nd_reformulated_orig_global_shape"
"""Their entry with the shape that a tensor of flat pieces has."""


def unflattened(tensors: Mapping[str, TorchTensor], notes: Mapping[str, Any], where: object) -> dict[str, TorchTensor]:
    """Return all tensors, those of flat pieces in their own shapes. Nothing is read.

    A tensor of shape ``[X, Y]`` in chunks of ``[x, y]`` is stored with the shape ``[X / x, Y / y, x * y]``. The last
    dim is a chunk in row-major order, and each data-parallel rank has written an interval of it. The shape ``[X, Y]``
    is in an attribute that Megatron-core adds to the metadata (``mcore_data``).

    Args:
        tensors: their tensors by key, as they are stored.
        notes: what Megatron-core has added to the metadata, by attribute.
        where: the folder, for messages.

    Raises:
        CheckpointError: a piece does not fit the shape of its tensor.
    """
    found = dict(tensors)
    noted = notes.get(NOTES)
    for key, note in noted.items() if isinstance(noted, dict) else ():
        shape = note.get(SHAPE) if isinstance(note, dict) else None
        if shape is not None and key in found:
            found[key] = _whole(key, found[key], shape, where)
    return found


def _whole(key: str, stored: TorchTensor, shape: Any, where: object) -> TorchTensor:
    counts = stored.shape[:-1]
    if (
        not isinstance(shape, tuple)
        or len(shape) != len(counts)
        or any(type(size) is not int or count < 1 or size % count for size, count in zip(shape, counts, strict=True))
        or prod(shape) != prod(stored.shape)
        or any(set(shard.size[:-1]) - {1} for shard in stored.shards)
    ):
        raise CheckpointError(
            f"{key} in {where} has the shape {list(stored.shape)}, and its metadata says that these are flat pieces of "
            f"{str(shape)[:80]}, which cannot be. The checkpoint is damaged; copy it again."
        )
    chunk = tuple(size // count for size, count in zip(shape, counts, strict=True))
    return TorchTensor(shape, stored.dtype, tuple(box for shard in stored.shards for box in _boxes(shard, chunk)))


def _boxes(shard: Shard, chunk: tuple[int, ...]) -> Iterator[Shard]:
    """Yield the boxes that an interval of a chunk is made of."""
    start, length = shard.offset[-1], shard.size[-1]
    corner = [index * size for index, size in zip(shard.offset, chunk, strict=False)]
    for offset, extent, first in boxes(chunk, start, start + length):
        place = tuple(low + inside for low, inside in zip(corner, offset, strict=True))
        yield Shard(place, extent, shard.archive, shard.first + first - start)


BACKEND = "metadata.json"
NEWEST = "latest_checkpointed_iteration.txt"


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a checkpoint of Megatron-core, or a folder with several."""
    return (located(path) / COMMON).is_file()


def located(path: str | os.PathLike[str]) -> PathLike:
    """Return the newest checkpoint in a folder that Megatron-LM saves to. Other paths stay as they are."""
    folder = place(path)
    if not (folder / NEWEST).is_file():
        return folder
    newest = (folder / NEWEST).read_bytes().decode(errors="replace").strip()
    if newest != "release" and not newest.isdecimal():
        raise CheckpointError(f"{folder / NEWEST} holds {newest[:40]!r}; a number of an iteration is expected.")
    return folder / (newest if newest == "release" else f"iter_{int(newest):07d}")


class MegatronFolder:
    """A ``torch_dist`` folder of a GPT model, as a :class:`~megalight.parallel.source.Source` of its weights.

    Attributes:
        config: the configuration that its arguments describe.
        tensors: canonical name -> shape, dtype and place, also of optimizer state.
        training: entries of a checkpoint with which a run resumes; empty without optimizer state.
        unread: why optimizer state that the folder holds is not among ``tensors``; empty if there is none, or it is.

    Raises:
        CheckpointError: metadata is missing or damaged, or tensors do not fit the arguments. The message lists key,
            shape and shards.
        ConfigurationError: the model has parts that are not imported.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str) -> None:
        self.path = located(path)
        _check_backend(self.path)
        common = pickles.read_file(self.path / COMMON)
        arguments = _arguments(common, self.path)
        self.config = config_of(arguments)
        self._folder = TorchFolder(self.path)
        self._folder.tensors = unflattened(self._folder.tensors, self._folder.notes, self.path)
        check_held(self.config, (stored.shape for stored in self._folder.tensors.values()), self.path)
        # The model's own keys decide. Which prefix a wrapper has added does not matter.
        keys = {plain(key): key for key in self._folder.tensors}
        places, problems = map_params(self.config, {name: self._folder.tensors[key] for name, key in keys.items()})
        if problems:
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(
                f"{len(problems)} tensors in {self.path} do not fit the model that its arguments describe: "
                f"{'; '.join(problems[:10])}{more}."
            )
        self.tensors = {prefix + name: replace(place, key=keys[place.key]) for name, place in places.items()}
        cut = buckets.cut(self.config, arguments, kind_of(common), self._folder.tensors)
        self._folder.tensors |= cut.tensors
        self._ranges = cut.ranges
        states, problems = map_states(self.config, self._folder.tensors, self._folder.objects, prefix)
        if cut.problems:
            states, problems = {}, [unreadable(buckets.FORMAT, problem) for problem in cut.problems]
        self.tensors |= states
        self.training = entries_of(common, states) if states else {}
        self.unread = "; ".join(problems[:3])

    def verify(self) -> None:
        """Check that state which lies in flat buckets is of the weights, whose values are compared with masters.

        All weights and masters of such buckets are read; without any, nothing is.

        Raises:
            CheckpointError: they are others. The message names bucket, range and parameter.
        """
        buckets.verify(self._folder, self._ranges)

    def fill(
        self,
        targets: Iterable[Target],
        *,
        strict: bool = True,
        prefix: str = "",
        process_group: ProcessGroup | None = None,
    ) -> FillReport:
        """See :meth:`megalight.parallel.source.Source.fill`; a shard that a box touches is read as a whole."""
        boxes, ranks = [target for target in targets if target.data.numel()], Ranks(process_group)
        asked = {box.name: box.shape for box in boxes}
        # Checked on all ranks before any of them reads.
        filled = compare(ranks, str(self.path), self.tensors, asked, strict=strict, prefix=prefix)
        wanted = [each for box in boxes if box.name in self.tensors for each in self.tensors[box.name].wanted(box)]
        ranks.together(f"reading {self.path}", partial(self._folder.fill, wanted))
        return filled


def _arguments(common: Any, path: PathLike) -> dict[str, Any]:
    arguments = common.get("args") if isinstance(common, dict) else None
    state = arguments.state if isinstance(arguments, pickles.Record) else arguments
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / COMMON} holds no arguments of Megatron-LM ('args'), which describe the model.")
    return state


def _check_backend(path: PathLike) -> None:
    """Refuse folders of another format of Megatron-core."""
    if (path / BACKEND).is_file():
        values = parse_json((path / BACKEND).read_bytes(), str(path / BACKEND))
        backend = values.get("sharded_backend") if isinstance(values, dict) else None
        if backend != "torch_dist":
            raise CheckpointError(
                f"{path} is of Megatron-core's format {backend!r}; torch_dist is read. Load it with the Megatron-LM "
                "that wrote it, and save it again with --ckpt-format torch_dist."
            )
    elif not (path / TORCH_METADATA).is_file():
        raise CheckpointError(
            f"{path} has neither {BACKEND} nor {TORCH_METADATA}: it is a checkpoint of Megatron-LM's format torch, or "
            "not finished. Save it again with --ckpt-format torch_dist."
        )

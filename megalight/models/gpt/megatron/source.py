"""A ``torch_dist`` folder of Megatron-core as a source of tensors by canonical name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from megalight.checkpoint.disk.files import TORCH_METADATA, PathLike, parse_json
from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign import pickles
from megalight.checkpoint.foreign.torch_dcp import TorchFolder
from megalight.checkpoint.loading import compare
from megalight.checkpoint.ranks import Ranks
from megalight.errors import CheckpointError
from megalight.models.gpt.megatron import buckets, optimizer
from megalight.models.gpt.megatron.arguments import COMMON, config_of
from megalight.models.gpt.megatron.optimizer import unflattened
from megalight.models.gpt.megatron.param_mapping import map_params, plain
from megalight.models.saved import check_held
from megalight.parallel.source import FillReport, Target

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
        cut = buckets.cut(self.config, arguments, optimizer.kind_of(common), self._folder.tensors)
        self._folder.tensors |= cut.tensors
        self._ranges = cut.ranges
        states, problems = optimizer.map_states(self.config, self._folder.tensors, self._folder.objects, prefix)
        if cut.problems:
            states, problems = {}, [optimizer.unreadable(buckets.FORMAT, problem) for problem in cut.problems]
        self.tensors |= states
        self.training = optimizer.entries_of(common, states) if states else {}
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

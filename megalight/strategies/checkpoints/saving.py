"""Write a run as one folder from all ranks: Lightning's entries and every canonical tensor.

A folder holds canonical tensors, so nobody needs the whole ``state_dict``. The user's ``on_save_checkpoint`` and
``on_load_checkpoint`` may still edit ``checkpoint["state_dict"]`` (:class:`Edits`) if a rank holds the whole model.
Elsewhere an edit raises an error: a rank's part is not what the user means to edit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megalight import __version__, checkpoint
from megalight.checkpoint import Contents, View
from megalight.checkpoint.loading import SavedCheckpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.sources import FullPrecision
from megalight.errors import CheckpointError, ConfigurationError
from megalight.imports import version
from megalight.models.module import CANONICAL_PREFIX, MegalightModule
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardSpec
from megalight.parallel.source import Target
from megalight.strategies.mesh_strategy import MeshStrategy

NOT_STORED = ("state_dict", "optimizer_states")
"""Lightning's entries that canonical tensors replace."""
CONFIGURED = "configured"
"""Key in our entry for the hyperparameters that a run started with."""
UNSHARDED = "unsharded_optimizers"
"""Entry with the states of optimizers of whole parameters, in torch's form."""


def save(strategy: MeshStrategy, entries: dict[str, Any], path: str, edits: Edits, write: Callable[..., Any]) -> None:
    """Write a checkpoint, with optimizer state if Lightning's entries have it, and with the edits of hooks.

    Args:
        write: :func:`megalight.checkpoint.save`, or what starts the same save asynchronously.
    """
    common = {name: value for name, value in entries.items() if name not in NOT_STORED}
    # The user's own on_save_checkpoint may have left it out, and no run could read the folder.
    describe = getattr(strategy.lightning_module, "describe_model", None)
    if describe is not None:
        common.setdefault("model", describe())
    common["megalight"] = {
        "version": __version__,
        "torch": version("torch"),
        "lightning": version("lightning"),
        "layout": strategy.description if strategy.handed_back is None else strategy.run.model.mesh.describe(),
    }
    if (sizes := strategy.micro_batches) is not None and sizes.result is not None:
        common["megalight"]["micro_batches"] = asdict(sizes.result)
    if "optimizer_states" in entries and strategy.configured is not None:
        common["megalight"][CONFIGURED] = strategy.configured.entry()
    # Optimizers of whole parameters are saved in torch's form, as no shard says where their state is.
    resumable = "optimizer_states" in entries and strategy.engine is not None
    if "optimizer_states" in entries and strategy.engine is None:
        common[UNSHARDED] = entries["optimizer_states"]
    if resumable:
        common["optimizer"] = strategy.run.group_options()
    write(
        path,
        views(strategy, resumable, edits),
        common=common,
        rank_state=strategy.run.rank_state(),
        files=_files(strategy),
        scheme=strategy.checkpoints.format,
    )


def views(strategy: MeshStrategy, optimizer: bool, edits: Edits) -> dict[str, View]:
    """Return this rank's views of a save.

    Args:
        optimizer: whether it has optimizer state.
    """
    saves_base = getattr(strategy.lightning_module, "saves_base", True)
    only = None if saves_base else strategy.run.model.added  # without the base, save only adapters
    contents = strategy.run.contents(optimizer=optimizer, only=only)
    return checkpoint.SCHEMES[strategy.checkpoints.format](edits.of(contents, prefix_of(strategy)))


@dataclass(frozen=True)
class Edits:
    """Differences of a ``state_dict``.

    Attributes:
        changed: tensors that are new or have other values, by key.
        removed: keys that are missing.
    """

    changed: Mapping[str, Tensor] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed)

    def check(self, strategy: MeshStrategy) -> None:
        """Check that a rank holds the whole model, and that no other tensors would undo the edits.

        Raises:
            ConfigurationError: the message says what to do.
        """
        if not self:
            return
        # One name is enough for the message, and there may be thousands.
        name = next(iter([*self.changed, *self.removed]))
        if not holds_whole_model(strategy):
            raise ConfigurationError(
                f'a hook edited checkpoint["state_dict"] ({name}), but each rank holds only its part of the model '
                f"({strategy.description}). Keep the values under a key of their own, or leave them to a "
                "ModelTransform."
            )
        buckets = [] if strategy.engine is None else strategy.engine.buckets
        # Master weights are saved and loaded too, and would overwrite these in the next step.
        if self.changed and not all(bucket.master_is_own_params for bucket in buckets):
            raise ConfigurationError(
                f'a hook edited checkpoint["state_dict"] ({name}), but the optimizer keeps wider master weights, which '
                "would undo that. Use precision='32-true', or edit the module's parameters in on_fit_start."
            )

    def of(self, contents: Contents, prefix: str) -> Contents:
        """Return what is to be saved with these edits."""
        tensors, specs = dict(contents.tensors), dict(contents.specs)
        cut = len(CANONICAL_PREFIX) - len(prefix)  # local names lack the canonical prefix
        for key in self.removed:
            tensors.pop(key[cut:], None)
        for key, value in self.changed.items():
            tensors[key[cut:]] = value.detach().to(contents_device(tensors))
            specs[key[cut:]] = ShardSpec.replicated(prefix + key, tuple(value.shape))
        return replace(contents, tensors=tensors, specs=specs)


def edits_of(given: Mapping[str, Any], found: Mapping[str, Any]) -> Edits:
    """Compare a ``state_dict`` with the one that hooks were given. Tensors are the same if the objects are.

    Raises:
        CheckpointError: a new value is no tensor.
    """
    # By identity: comparing values would read all of a device's weights in each save.
    changed = {key: value for key, value in found.items() if value is not given.get(key)}
    for key, value in changed.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f'checkpoint["state_dict"][{key!r}] is of type {type(value).__name__}, and weights are tensors. Keep '
                "other values under a key of their own in the checkpoint."
            )
    return Edits(changed, frozenset(given.keys() - found.keys()))


def write(edits: Edits, model: ParallelModel, prefix: str, strict: bool) -> None:
    """Copy changed tensors into the model, after the others have been read.

    Raises:
        CheckpointError: shapes differ; or, if ``strict``, names do.
    """
    cut, tensors = len(CANONICAL_PREFIX) - len(prefix), model.tensors()
    unknown = [key for key in edits.changed if key[cut:] not in tensors]
    lost = [key for key in edits.removed if key[cut:] in tensors]
    if strict and (unknown or lost):
        raise CheckpointError(
            f'on_load_checkpoint left a checkpoint["state_dict"] that does not fit the model: {lost or "nothing"} is '
            f"missing, {unknown or 'none'} is not in the model. Set the module's strict_loading to False to allow it."
        )
    for key, value in edits.changed.items():
        if key not in unknown:
            target = tensors[key[cut:]]
            if target.shape != value.shape:
                raise CheckpointError(
                    f'checkpoint["state_dict"][{key!r}] has shape {tuple(value.shape)} after on_load_checkpoint, and '
                    f"the model has {tuple(target.shape)}."
                )
            # Into the same memory, as the parameter is a view of the engine's buffers.
            target.detach().copy_(value)


class SavedWeights(MutableMapping[str, Tensor]):
    """The ``state_dict`` of a checkpoint, for hooks. A tensor is read when somebody looks at it.

    Args:
        saved: the checkpoint.
        prefix: see :func:`prefix_of`.
        whole: whether hooks may look and edit.
    """

    def __init__(self, saved: SavedCheckpoint, prefix: str, whole: bool) -> None:
        self._saved = saved
        self._prefix = prefix
        self._whole = whole
        names = (name for name in saved.tensors if name.startswith(CANONICAL_PREFIX))
        self._keys = dict.fromkeys(name.removeprefix(prefix) for name in names)
        # Kept, as the hook may change a tensor in place.
        self._opened: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        self._check()
        if key not in self._opened:
            self._opened[key] = self._read(key)
        return self._opened[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._check()
        self._keys[key] = None
        self._opened[key] = value

    def __delitem__(self, key: str) -> None:
        self._check()
        del self._keys[key]
        self._opened.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def edits(self, found: Mapping[str, Any]) -> Edits:
        """Return how ``found``, which may be this object, differs from the checkpoint."""
        given = {name.removeprefix(self._prefix) for name in self._saved.tensors if name.startswith(CANONICAL_PREFIX)}
        # A user may put another dict in place of this object. Every tensor in it is then compared.
        looked_at = self._opened if found is self else dict(found)
        changed = edits_of({}, looked_at).changed
        # Here by value: what a hook only looked at is an object of ours, too.
        same = {key for key, value in changed.items() if key in given and torch.equal(value.cpu(), self._read(key))}
        return Edits({key: changed[key] for key in changed if key not in same}, frozenset(given.difference(found)))

    def _read(self, key: str) -> Tensor:
        name = self._prefix + key
        stored = self._saved.tensors[name]
        value = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        # Alone: this rank looks, and no other one need look at the same time.
        with alone() as group:
            target = Target(name, tuple(stored.shape), (0,) * value.ndim, value)
            FullPrecision(self._saved).fill([target], strict=False, process_group=group)
        return value

    def _check(self) -> None:
        if not self._whole:
            raise ConfigurationError(
                'checkpoint["state_dict"] cannot be read or edited here: each rank reads only its part of the model. '
                "Keep values under a key of their own when you save."
            )


def prefix_of(strategy: MeshStrategy) -> str:
    """Return the prefix of canonical names that keys of the module's ``state_dict`` lack."""
    return "" if isinstance(strategy.lightning_module, MegalightModule) else CANONICAL_PREFIX


def holds_whole_model(strategy: MeshStrategy) -> bool:
    """Return whether this rank's ``state_dict`` is that of the single-device model."""
    if strategy.handed_back is not None:
        return True
    mesh = strategy.mesh
    # Data and context parallelism are left out: their ranks hold the same model.
    divided = strategy.holds_part or mesh.tp * mesh.size("ep") * mesh.size("etp") > 1
    return not divided and (strategy.parallel_model is None or strategy.parallel_model.shards is None)


def contents_device(tensors: Mapping[str, Tensor]) -> torch.device:
    """Return the device of the first tensor, or the CPU."""
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def _files(strategy: MeshStrategy) -> dict[str, bytes]:
    """Return files that the module or the data add to a checkpoint, for example a tokenizer."""
    if strategy.handed_back is not None:
        return strategy.handed_back.files
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    files: dict[str, bytes] = {}
    # the module's come last: a tokenizer of transformers knows more than the data's copy of it
    for owner in (getattr(trainer, "datamodule", None), strategy.lightning_module):
        provide = getattr(owner, "checkpoint_files", None)
        files |= provide() if provide is not None else {}
    return files

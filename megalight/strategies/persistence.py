"""Between Lightning's checkpoint dictionary and sharded folders of canonical tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from megalight import __version__, checkpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.view import View, targets_of, views_of_parameters, views_of_shards
from megalight.errors import CheckpointError
from megalight.imports import version
from megalight.models.module import CANONICAL_PREFIX, MegalightModule
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.options import ParallelOptions
from megalight.parallel.plan import Plan
from megalight.parallel.source import Renamed
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.user_module import root_of, seed_of

NOT_STORED = ("state_dict", "optimizer_states")
"""Lightning's entries that canonical tensors take the place of."""

remove = checkpoint.remove


def save(strategy: MeshStrategy, entries: dict[str, Any], path: str) -> None:
    """Write Lightning's entries and every canonical tensor as one folder, from all ranks."""
    common = {name: value for name, value in entries.items() if name not in NOT_STORED}
    common["megalight"] = {
        "version": __version__,
        "torch": version("torch"),
        "lightning": version("lightning"),
        "layout": strategy.mesh.describe(),
    }
    views = model_views(strategy)
    if "optimizer_states" in entries and strategy.engine is not None:
        common["optimizer"] = _group_options(strategy)
        views |= dict(_optimizer_views(strategy))
    assert strategy.streams is not None
    checkpoint.save(
        path,
        views,
        common=common,
        rank_state={"random": strategy.streams.state_dict()},
        files=_files(strategy),
    )


def model_views(strategy: MeshStrategy, *, to_fill: bool = False) -> dict[str, View]:
    """The model's canonical tensors as this rank holds them.

    Args:
        to_fill: a checkpoint is about to be read into them: what is held as codes shows its masters, which are else
            shown in the type that the parameters have outside training.
    """
    assert strategy.parallel_model is not None
    engine = strategy.engine
    coded = [] if engine is None else [bucket for bucket in engine.buckets if bucket.holds_codes]
    hidden = {info.name for bucket in coded for info in bucket.infos}
    tensors = strategy.parallel_model.tensors().items()
    views = views_of_parameters(((n, t) for n, t in tensors if n not in hidden), strategy.specs, strategy.mesh)
    if engine is not None and coded:
        masters = [bucket.shard.master.detach() for bucket in coded]
        if not to_fill:
            masters = [m.to(bucket.layout.kind.param_dtype) for m, bucket in zip(masters, coded, strict=True)]
        views |= views_of_shards(masters, [bucket.shard for bucket in coded])
    return views


def load_weights(module: pl.LightningModule, path: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint into a module of this one process, whichever layout saved them.

    ``module.model`` is then the whole one-device model, in the types that were saved, on the CPU: to be sampled from,
    exported, evaluated, or trained further, under any strategy. A model that the module has already is replaced; a
    plain LightningModule keeps its layers.

    Args:
        module: as it was constructed for training.
        path: the checkpoint's folder.

    Raises:
        CheckpointError: missing, torn, or of another model.
    """
    _load_whole(module, str(path))


def restore_whole(module: pl.LightningModule, path: str) -> dict[str, Any]:
    """:func:`load_weights`, and the state of Lightning's loops."""
    return dict(_load_whole(module, path).common["loops"])


def _load_whole(module: pl.LightningModule, path: str) -> checkpoint.Checkpoint:
    saved = Loaded.open(path).saved
    check = getattr(module, "check_checkpoint", None)
    if check is not None:
        check(saved.common)
    with torch.device("meta") if isinstance(module, MegalightModule) else nullcontext():
        if isinstance(module, MegalightModule):
            module.model, module.token_multiple = None, 1
        module.configure_model()
    model = ParallelModel(root_of(module), ParallelMesh(), ParallelOptions(plan=Plan()))
    model.place("cpu")
    model.draw(seed_of(module, 0))  # also what no checkpoint holds: buffers that modules compute
    for name, tensor in model.tensors().items():
        stored = saved.tensors.get(model.specs[name].pieces[0].name)
        if stored is not None:
            tensor.data = tensor.data.to(getattr(torch, stored.dtype))
    with alone() as group:
        model.read(saved, process_group=group)
    return saved


@dataclass
class Loaded:
    """A checkpoint that Lightning is resuming from: opened and verified, its tensors read when there is room for them.

    Attributes:
        strict: every tensor of the model must be in the checkpoint.
    """

    saved: checkpoint.Checkpoint
    path: str
    strict: bool = True

    @classmethod
    def open(cls, path: str) -> Loaded:
        """Open a folder.

        Raises:
            CheckpointError: not a complete checkpoint; names the last good one beside it.
        """
        if Path(path).is_file():
            raise CheckpointError(
                f"{path} is a single file, as other Lightning strategies write; MegatronStrategy reads folders that it "
                "wrote itself. Load such a file with module.load_state_dict(torch.load(...)['state_dict']) before fit."
            )
        return cls(checkpoint.open(path), path)

    def for_lightning(self) -> dict[str, Any]:
        """The entries that Lightning restores itself."""
        common = dict(self.saved.common)
        options = common.pop("optimizer", None)
        return {**common, "state_dict": {}, **({} if options is None else {"optimizer_states": [options]})}

    def read_model(self, strategy: MeshStrategy) -> None:
        """Weights into the local parameters. Float32 weights come from the masters, where the checkpoint has any."""
        _clear_padding(strategy)
        views = model_views(strategy, to_fill=True)
        targets = targets_of(views)
        self.saved.fill(targets, strict=self.strict, prefix=CANONICAL_PREFIX)
        masters = Renamed(self.saved, CANONICAL_PREFIX, MASTER + CANONICAL_PREFIX)
        if masters.tensors:
            wide = [target for target in targets if target.data.dtype in (torch.float32, torch.float64)]
            masters.fill(wide, strict=False)

    def read_optimizer(self, strategy: MeshStrategy) -> None:
        """Masters, optimizer state, group options and random states.

        Raises:
            CheckpointError: no optimizer state in it, or of another optimizer.
        """
        saved = self.saved.common.get("optimizer")
        optimizer, engine = strategy.optimizers[0], strategy.engine
        assert engine is not None and strategy.streams is not None
        if saved is None:
            raise CheckpointError(
                f"{self.path} holds weights only; it cannot resume training. Choose a full checkpoint."
            )
        groups = saved["groups"]
        if saved["class"] != type(optimizer).__name__ or len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"{self.path} was trained with {saved['class']} in {len(groups)} parameter groups; this run uses "
                f"{type(optimizer).__name__} in {len(optimizer.param_groups)}. Resume with the same optimizer, or load "
                "the weights alone."
            )
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options["options"])
        for shard in engine.shards:
            states = optimizer.state[shard.master]
            states.update({name: _scalar(value) for name, value in groups[shard.group]["scalars"].items()})
            for name, dtype in groups[shard.group]["tensors"].items():
                states[name] = torch.zeros_like(shard.master, dtype=DTYPES[dtype])
        views = self._found(dict(_optimizer_views(strategy)))
        missing = sorted(name for name in views.keys() - self.saved.tensors.keys() if name.startswith(STATE))
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} optimizer tensors that this run needs: {missing[0]}."
            )
        self.saved.fill(targets_of(views), strict=False)
        random = self.saved.rank_state(strategy.global_rank)
        if random is not None:
            strategy.streams.load_state_dict(random["random"])

    def _found(self, views: dict[str, View]) -> dict[str, View]:
        """Masters by the weights' own names where the checkpoint was written by a run that needed no copies."""
        wanted = {
            name: name.removeprefix(MASTER) if name.startswith(MASTER) and name not in self.saved.tensors else name
            for name in views
        }
        return {wanted[name]: view for name, view in views.items()}


MASTER = "optimizer.master."
STATE = "optimizer."
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


def _group_options(strategy: MeshStrategy) -> dict[str, Any]:
    """What belongs to whole parameter groups: options (learning rate, ...), step counters, the names of states.

    Some pipeline stages have no parameter in a group: the first that has one speaks for it.
    """
    assert strategy.engine is not None
    optimizer = strategy.optimizers[0]
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        shards = [shard for shard in strategy.engine.shards if shard.group == index]
        states = optimizer.state.get(shards[0].master, {}) if shards else {}
        flat = {name for name, value in states.items() if _is_flat(value, shards[0].master)}
        groups.append(
            {
                "options": options,
                "scalars": {name: value for name, value in states.items() if name not in flat},
                "tensors": {name: str(states[name].dtype) for name in sorted(flat)},
            }
        )
    pipeline = strategy.mesh.group("pp")
    if pipeline is not None:
        stages: list[Any] = [None] * pipeline.size()
        dist.all_gather_object(stages, groups, group=pipeline)
        groups = [
            next((g for g in same if g["tensors"] or g["scalars"]), same[0]) for same in zip(*stages, strict=True)
        ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _optimizer_views(strategy: MeshStrategy) -> Iterator[tuple[str, View]]:
    """Masters that are copies, element-wise optimizer states, and whatever callbacks keep per shard."""
    engine, optimizer = strategy.engine, strategy.optimizers[0]
    assert engine is not None
    shards = engine.shards
    copies = [bucket.shard for bucket in engine.buckets if not bucket.master_is_own_params]
    yield from views_of_shards([s.master for s in copies], copies, prefix=MASTER).items()
    names = sorted(
        {name for s in shards for name, value in optimizer.state[s.master].items() if _is_flat(value, s.master)}
    )
    for name in names:
        having = [s for s in shards if name in optimizer.state[s.master]]
        tensors = [optimizer.state[s.master][name] for s in having]
        yield from views_of_shards(tensors, having, prefix=f"{STATE}{name}.").items()
    for name, tensors in strategy.extra_shard_states.items():
        yield from views_of_shards(tensors, shards, prefix=f"{name}.").items()


@torch.no_grad()
def _clear_padding(strategy: MeshStrategy) -> None:
    """Zero tensors that hold more than pieces (a vocabulary rounded up): no checkpoint fills the rest."""
    assert strategy.parallel_model is not None
    for name, tensor in strategy.parallel_model.tensors().items():
        if sum(piece.numel for piece in strategy.specs[name].pieces) < tensor.numel():
            tensor.zero_()


def _is_flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape and value.ndim == 1


def _scalar(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _files(strategy: MeshStrategy) -> dict[str, bytes]:
    """Files that the module or the data say belong into a checkpoint (a tokenizer, say)."""
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    files: dict[str, bytes] = {}
    for owner in (strategy.lightning_module, getattr(trainer, "datamodule", None)):
        provide = getattr(owner, "checkpoint_files", None)
        files |= provide() if provide is not None else {}
    return files

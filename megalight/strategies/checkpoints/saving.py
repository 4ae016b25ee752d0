"""Write a run as one folder from all ranks: Lightning's entries and every canonical tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megalight import __version__, checkpoint
from megalight.checkpoint import View
from megalight.imports import version
from megalight.strategies.checkpoints.edits import Edits, prefix_of
from megalight.strategies.mesh_strategy import MeshStrategy

NOT_STORED = ("state_dict", "optimizer_states")
"""Lightning's entries that canonical tensors replace."""
CONFIGURED = "configured"
"""Our entry's entry with the hyperparameters that a run began with."""
ORDINARY = "ordinary_optimizers"
"""Entry with the states of optimizers of whole parameters, in torch's form."""


def save(strategy: MeshStrategy, entries: dict[str, Any], path: str, edits: Edits, write: Callable[..., Any]) -> None:
    """Write a checkpoint, with optimizer state if Lightning's entries have it, and with the edits of hooks.

    Args:
        write: :func:`megalight.checkpoint.save`, or what begins the same save beside training.
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
        "layout": strategy.layout if strategy.handed_back is None else strategy.run.model.mesh.describe(),
    }
    if (sizes := strategy.micro_batches) is not None and sizes.result is not None:
        common["megalight"]["micro_batches"] = asdict(sizes.result)
    if "optimizer_states" in entries and strategy.configured is not None:
        common["megalight"][CONFIGURED] = strategy.configured.entry()
    # Optimizers of whole parameters are saved in torch's form, as no shard tells where their state lies.
    resumable = "optimizer_states" in entries and strategy.engine is not None
    if "optimizer_states" in entries and strategy.engine is None:
        common[ORDINARY] = entries["optimizer_states"]
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

"""Read a checkpoint into a run: metadata when Lightning opens it, tensors when the parameters exist."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megalight import checkpoint
from megalight.checkpoint.disk import manifest, publish
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.loading import SavedCheckpoint
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.run import changes_matrices
from megalight.checkpoint.sources import FullPrecision
from megalight.errors import CheckpointError, MegalightError
from megalight.models.loading import holds_base, needs_base, widest
from megalight.models.module import CANONICAL_PREFIX, MegalightModule
from megalight.ops.quantized_weight import stored_of
from megalight.optim import schedules
from megalight.optim.configured import Configured, go_on
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.source import Source
from megalight.strategies import _lightning
from megalight.strategies.checkpoints.saving import (
    CONFIGURED,
    UNSHARDED,
    Edits,
    SavedWeights,
    holds_whole_model,
    prefix_of,
    write,
)
from megalight.strategies.checkpoints.single_file import REGROUPED, STATES, SingleFile
from megalight.strategies.mesh_strategy import MeshStrategy
from megalight.strategies.micro_batches import FoundSize
from megalight.strategies.user_module import root_of, seed_of


def open_saved(path: str, module: pl.LightningModule | None) -> SavedCheckpoint:
    """Open a checkpoint: a folder of ours, or a single file of Lightning's own strategies for a module like this.

    Raises:
        CheckpointError: it is not a complete checkpoint, and the message names the last good one beside it; or it is a
            file, and there is no module yet.
    """
    if not Path(path).is_file():
        return checkpoint.open(path)
    if module is None:
        raise CheckpointError(f"{path} is a single file, whose names need a module; give the trainer one first.")
    return SingleFile(path, module)


def newer_than_last(path: str | os.PathLike[str]) -> PathLike | None:
    """Return the latest checkpoint beside a ``last.ckpt`` if it was saved later, else None.

    A run that is killed between two saves leaves them so, and Lightning's word ``last`` means the older one.
    """
    last = publish.place(path)
    if last.name.startswith("last"):
        # Storage that fails now may serve what is read next, and a single file does not say when it was saved.
        with suppress(MegalightError, OSError):
            latest = publish.latest(last.parent)
            if latest is not None and _saved_at(latest) > _saved_at(last):
                return latest
    return None


@contextmanager
def latest_for_last(trainer: pl.Trainer | None) -> Iterator[None]:
    """Let ``ckpt_path="last"`` mean the latest finished checkpoint beside a ``last.ckpt``, as the commands do.

    A path that is given itself stays.
    """
    with ExitStack() as stack:
        for callback in () if trainer is None else trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                stack.enter_context(_lightning.finding_last_by(callback, _latest_for))
        yield


def _latest_for(last: str | os.PathLike[str]) -> str | os.PathLike[str]:
    newer = newer_than_last(last)
    return last if newer is None else str(newer)


def _saved_at(path: PathLike) -> int:
    return manifest.read(publish.resolve(path)).saved_at


def base_of(module: pl.LightningModule, saved: SavedCheckpoint) -> Source:
    """Return the source of the base weights for a checkpoint with only adapters.

    Raises:
        CheckpointError: the module has no initial weights.
    """
    source = module.initial_weights() if isinstance(module, MegalightModule) else None
    if source is None:
        raise needs_base(saved, "give the module the folder that training started from (weights=...)")
    return source


@dataclass
class Resumed:
    """A checkpoint that a run resumes from.

    Attributes:
        saved: the opened and verified checkpoint.
        strict: whether every tensor of the model must be in the checkpoint.
        weights: the ``state_dict`` that hooks are given.
        edits: what hooks changed in it.
    """

    saved: SavedCheckpoint
    strict: bool = True
    weights: SavedWeights | None = None
    edits: Edits = field(default_factory=Edits)

    def for_lightning(self, strategy: MeshStrategy) -> dict[str, Any]:
        """Return the entries that Lightning restores itself, and ``state_dict`` for hooks."""
        common = dict(self.saved.common)
        common.pop("megalight", None)  # ours alone, and hooks see Lightning's entries
        options, whole = common.pop("optimizer", None), common.pop(self._unsharded, None)
        states = whole if options is None else [options]
        if self.from_elsewhere:
            common = {**_lightning.entries_at(common["global_step"]), **common}
        # Without a trainer, no run resumes from what is read here.
        elif "loops" in common and (trainer := _lightning.trainer_of(strategy.lightning_module)) is not None:
            common["loops"] = _lightning.begin_window(trainer, common["loops"])
        self.weights = SavedWeights(self.saved, prefix_of(strategy), holds_whole_model(strategy))
        # Hooks see a `state_dict` that reads tensors one by one. Lightning hands it on without a look.
        return {**common, "state_dict": self.weights, **({} if states is None else {"optimizer_states": states})}

    @property
    def _unsharded(self) -> str:
        """The entry for optimizers of whole parameters. Lightning's files have all optimizers there."""
        return STATES if isinstance(self.saved, SingleFile) else UNSHARDED

    @property
    def from_elsewhere(self) -> bool:
        """Whether another library trained before: there is optimizer state, but no state of Lightning's loops."""
        return "optimizer" in self.saved.common and "loops" not in self.saved.common

    def micro_batches(self, strategy: MeshStrategy) -> FoundSize | None:
        """Return what ``micro_batch_size="auto"`` found in the same layout, if it is saved."""
        saved = self.saved.common.get("megalight", {})
        found = saved.get("micro_batches") if saved.get("layout") == strategy.description else None
        return None if found is None else FoundSize(**found)

    def take(self, state: Mapping[str, Any]) -> None:
        """Note how hooks have changed the ``state_dict``."""
        if self.weights is not None:
            self.edits = self.weights.edits(state)

    def read_model(self, strategy: MeshStrategy) -> None:
        """Read weights into the local parameters. Float32 weights are read from the masters, if it has any."""
        assert strategy.parallel_model is not None
        model = strategy.parallel_model
        # Padding is in no checkpoint, and must be zero.
        model.clear_padding()
        self.edits.check(strategy)
        targets = strategy.run.weight_targets()
        if not holds_base(self.saved.common):
            assert strategy.lightning_module is not None
            # Base weights first: tensors of adapters are in the checkpoint, and come after.
            model.read(base_of(strategy.lightning_module, self.saved))
            targets = [target for target in targets if target.name in model.added]
        prefix = prefix_of(strategy)
        edited = {prefix + key for key in (*self.edits.changed, *self.edits.removed)}
        targets = [target for target in targets if target.name not in edited]
        FullPrecision(self.saved).fill(targets, strict=self.strict and not self.edits, prefix=CANONICAL_PREFIX)
        write(self.edits, model, prefix, self.strict)

    def read_optimizer(self, strategy: MeshStrategy) -> None:
        """Read masters, optimizer state, group options and random states.

        Raises:
            CheckpointError: it has no optimizer state, or that of another optimizer.
        """
        if isinstance(self.saved, SingleFile):
            # It was saved before training: this run's optimizer begins as that one would have.
            if not self.saved.common.get(STATES):
                return
            assert strategy.parallel_model is not None
            self.saved.read_optimizer_states(strategy.optimizers[0], strategy.parallel_model)
        strategy.run.resume(self.saved)
        if self.from_elsewhere:
            assert strategy.lightning_module is not None
            for config in strategy.lightning_module.trainer.lr_scheduler_configs:
                schedules.advance(config.scheduler, self.saved.common["global_step"])

    def settle(self, strategy: MeshStrategy, now: Configured, checkpoint: dict[str, Any]) -> Configured:
        """Choose between hyperparameters that were just read and those configured now. Returns those in effect.

        Args:
            strategy: its optimizers were just read.
            now: what is configured now.
            checkpoint: Lightning loads the states of schedulers from it next.
        """
        if self.from_elsewhere:  # it has none, so those of now are used already
            return now
        assert strategy.lightning_module is not None
        trainer, which = strategy.lightning_module.trainer, strategy.checkpoints.resume_optimizer
        optimizers, configs, states = strategy.optimizers, trainer.lr_scheduler_configs, checkpoint["lr_schedulers"]
        done = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        entry = self.saved.common.get("optimizer")
        regrouped = entry is not None and (entry.get(REGROUPED) or changes_matrices(entry, optimizers[0]))
        if regrouped and strategy.engine is not None:
            # Its groups are others, and so are the rates in the states of schedulers.
            for config in configs:
                if isinstance(config.scheduler, LambdaLR):
                    schedules.advance(config.scheduler, done[config.interval] // config.frequency)
            checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in configs]
            return now
        then = Configured.saved(self.saved.common.get("megalight", {}).get(CONFIGURED), optimizers)
        if which is None:
            # Lightning loads fields, but no checkpoint holds functions: those of now act from the next step on.
            then = then.with_functions(now)
            for config, state in zip(configs, states, strict=False):  # there may be more or fewer schedulers now
                if schedules.NOTE in state:
                    state[schedules.NOTE] = getattr(config.scheduler, schedules.NOTE, None)
        changes = then.changes(now)
        if which == "saved":
            for config, state in zip(configs, states, strict=False):
                if (kept := schedules.noted(state.get(schedules.NOTE))) and isinstance(config.scheduler, LambdaLR):
                    config.scheduler.lr_lambdas = [kept.factor] * len(config.scheduler.lr_lambdas)
        elif which == "configured":
            states = go_on(optimizers, configs, states, then, now, done)
            if changes:
                rank_zero_info(f"resumed with what is configured now: {', '.join(changes)} ({self.saved.path})")
        elif changes:
            rank_zero_warn(
                f"{self.saved.path} was saved with other hyperparameters, which stay: what is configured now would be "
                f"{', '.join(changes)}. Choose with CheckpointOptions(resume_optimizer='configured') or 'saved'."
            )
        checkpoint["lr_schedulers"] = states
        return now if which == "configured" else then

    def read_unsharded(self, strategy: MeshStrategy, optimizers: Sequence[Optimizer]) -> None:
        """Read the states of optimizers of whole parameters, and random states.

        Raises:
            CheckpointError: it has other optimizers.
        """
        states = self.saved.common.get(self._unsharded)
        if states is None or len(states) != len(optimizers):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise CheckpointError(
                f"{self.saved.path} has no state of whole parameters for the {len(optimizers)} optimizers of this run "
                f"({kinds}). Resume with the same optimizers, or load the weights alone."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        # Each rank's random state and counters, beside the optimizers.
        strategy.run.resume_rank(self.saved)


def load_weights(module: pl.LightningModule, path: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint, saved in any layout, into a module in this one process.

    ``module.model`` is then the whole single-device model on the CPU, with the saved dtypes. Use it to generate,
    export, evaluate or train further, under any strategy. It replaces a model that the module already has. A plain
    LightningModule keeps its layers.

    Args:
        module: the module, constructed as for training.
        path: the checkpoint's folder, or the file that one of Lightning's own strategies wrote.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, or of another model.
    """
    saved = open_saved(str(path), module)
    check = getattr(module, "check_checkpoint", None)
    if check is not None:
        check(saved.common)
    model = _fresh(module)
    model.place("cpu")
    # Everything is filled first: buffers that modules compute are in no checkpoint.
    model.draw(seed_of(module, 0))
    whole = holds_base(saved.common)
    if not whole:
        model.root.to(widest(saved))  # base weights get the dtype of the run, not that of their own files
    for name, tensor in model.tensors().items():
        # Each tensor keeps the dtype in which it was saved, whatever the module was built with.
        stored = saved.tensors.get(model.specs[name].pieces[0].name)
        if stored is not None:
            tensor.data = tensor.data.to(getattr(torch, stored.dtype))
    with alone() as group:
        if not whole:
            model.read(base_of(module, saved), process_group=group)
        model.read(saved, only_added=not whole, process_group=group)


def unsplit(module: MegalightModule, model: ParallelModel) -> bool:
    """Make the model that was split for one rank anew, with its values, so that it can be split for more.

    Args:
        module: its model is replaced.
        model: of that model; its mesh has one rank.

    Returns:
        Whether it could be made: not if its weights are quantized, or if it has other tensors than the module builds.
    """
    before, multiple = module.model, module.token_multiple
    values = model.tensors()
    whole = _fresh(module)
    if values.keys() - whole.tensors().keys() or any(stored_of(value) is not None for value in values.values()):
        module.model, module.token_multiple = before, multiple
        return False
    whole.place(model.device)
    whole.draw(seed_of(module, 0))
    for name, tensor in whole.tensors().items():
        if name in values:
            # A copy, as the values lie in the flat memory of the run before.
            tensor.data = values[name].detach().clone()
            tensor.requires_grad_(values[name].requires_grad)
    return True


def _fresh(module: pl.LightningModule) -> ParallelModel:
    """Build the whole model of a module anew, without values. A plain module keeps its layers."""
    with torch.device("meta") if isinstance(module, MegalightModule) else nullcontext():
        if isinstance(module, MegalightModule):
            module.model, module.token_multiple = None, 1
        module.configure_model()
    return ParallelModel(root_of(module), ParallelMesh(), Layout(plan=ParallelizePlan()))

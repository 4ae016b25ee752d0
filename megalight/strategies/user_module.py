"""The user's LightningModule as the strategy sees it: its model, its seed, and its own steps."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule
from megalight.models.signatures import check_signatures
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.options import ParallelOptions

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def root_of(module: pl.LightningModule) -> nn.Module:
    """Return what the strategy splits: the model of a Megalight module, or a plain LightningModule itself."""
    if isinstance(module, MegalightModule):
        assert module.model is not None
        return module.model
    return module


def seed_of(module: pl.LightningModule, seed: int) -> int:
    """Return the seed of the initial weights: the module's own seed, or else ``seed`` of the run."""
    # A run's seed may be larger than generators take.
    return module.seed if isinstance(module, MegalightModule) else seed % 2**63


def options_for(module: pl.LightningModule, model: nn.Module, options: ParallelOptions) -> ParallelOptions:
    """Return the strategy's options for the unsplit model, with the module's transforms and, if needed, its plan."""
    if not isinstance(module, MegalightModule):
        return options
    # The user's plan on the strategy goes before the module's own.
    plan = module.plan(model) if options.plan is None else options.plan
    return replace(options, plan=plan, transforms=tuple(module.transforms))


def own_steps(module: pl.LightningModule, method: str) -> bool:
    """Return whether the user wrote the Lightning step ``method`` instead of Megalight's methods."""
    return not isinstance(module, MegalightModule) or (
        getattr(type(module), method) is not getattr(MegalightModule, method)
    )


def check_steps(module: pl.LightningModule, mesh: ParallelMesh) -> None:
    """Refuse a module whose methods cannot be called, or whose own steps would get only a part of the model or tokens.

    Raises:
        ConfigurationError: the message names the method to write instead.
    """
    if isinstance(module, MegalightModule):
        check_signatures(module, pl.LightningModule)
    own = [step for step in STEPS if own_steps(module, step)]
    if own and isinstance(module, MegalightModule) and module.frozen_models():
        raise ConfigurationError(
            f"{type(module).__name__} defines {own[0]} and frozen_models, whose results no step of one's own is given. "
            f"Remove {own[0]}, and read the results in forward_step or loss_step."
        )
    degrees = [f"{name}={size}" for name, size in (("pp", mesh.pp), ("cp", mesh.cp)) if size > 1]
    # Without these degrees a forward runs the whole model on whole sequences, so any step can run.
    if not degrees:
        return
    name = type(module).__name__
    if not isinstance(module, MegalightModule):
        raise ConfigurationError(
            f"{name} is a plain LightningModule, and {' and '.join(degrees)} cut the model or its sequences: no rank "
            "can run a whole training_step. Derive from megalight.models.module.MegalightModule and write build_model, "
            "forward_step, loss_step and loss_tokens."
        )
    missing = [step for step in ("forward_step", "loss_step", "loss_tokens") if not _overridden(module, step)]
    if missing:
        raise ConfigurationError(
            f"{name} does not define {', '.join(missing)}, which {' and '.join(degrees)} need: they run on every chunk "
            "of the model in turn. Write them; see megalight.models.module.MegalightModule."
        )
    if own:
        raise ConfigurationError(
            f"{name} defines {own[0]}, which no rank can run whole with {' and '.join(degrees)}. Remove it: return "
            "further values as metrics from loss_step, and outputs of predict from output_step."
        )


def _overridden(module: MegalightModule, method: str) -> bool:
    return getattr(type(module), method) is not getattr(MegalightModule, method)

"""The user's LightningModule as the strategy sees it: its model, its seed, its own steps, and its hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn

from megalight.attachments import overridden
from megalight.errors import ConfigurationError
from megalight.models.module import MegalightModule, check_signatures
from megalight.parallel.context.divided_calls import interfaces_of
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.pipeline.stages import declared_parts
from megalight.types import Loss

log = logging.getLogger(__name__)

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


def layout_for(module: pl.LightningModule, model: nn.Module, layout: Layout) -> Layout:
    """Return the strategy's layout for the unsplit model, with the module's transforms and, if needed, its plan."""
    if not isinstance(module, MegalightModule):
        return layout
    # The user's plan on the strategy goes before the module's own.
    plan = module.plan(model) if layout.plan is None else layout.plan
    return replace(layout, plan=plan, transforms=tuple(module.transforms))


def defines_step(module: pl.LightningModule, method: str) -> bool:
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
    own = [step for step in STEPS if defines_step(module, step)]
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
        if mesh.pp == 1 and interfaces_of(module):
            return  # a model of transformers takes a share of the tokens by itself
        if mesh.cp == 1 and declared_parts(module) is not None:
            if type(module).backward is not pl.LightningModule.backward:
                raise ConfigurationError(
                    f"{name} defines backward, and {degrees[0]}: stages before the last have no loss to differentiate. "
                    "Remove it; on_before_backward of a callback gets the loss."
                )
            return
        raise ConfigurationError(
            f"{name} is a plain LightningModule, and {' and '.join(degrees)} cut the model or its sequences: no rank "
            "can run a whole training_step. Derive from megalight.models.module.MegalightModule and write build_model, "
            "forward_step, loss_step and loss_tokens. A pipeline also runs a plain module whose model is one of "
            "transformers that declares how it is cut (base_model_pp_plan)."
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


# Hooks that the user's code defines


OURS = ("lightning", "megalight")


def is_ours(function: object) -> bool:
    """Return whether a function, method or callable object is part of Lightning or Megalight."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] in OURS


def defines(owner: pl.Callback | pl.LightningModule, hook: str) -> bool:
    """Return whether the user's code defines ``hook``, in the owner's class or on the object itself.

    Lightning's ``LambdaCallback`` sets its hooks on the object.
    """
    return not is_ours(getattr(owner, hook))


HOOKS_BETWEEN_STEPS = (
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_validation_batch_start",
    "on_validation_epoch_start",
    "on_validation_start",
)
"""Hooks of callbacks and modules that run while parameters may still be gathered."""
METHODS_BETWEEN_STEPS = (
    *HOOKS_BETWEEN_STEPS,
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_validation_model_eval",
    "on_validation_model_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""The same hooks for modules, and methods that only modules have."""


HOOKS_OF_SHARDED_WEIGHTS = (
    "on_sanity_check_end",
    "on_sanity_check_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_validation_epoch_end",
)
"""Further hooks in which all weights are there unless each rank keeps only a shard of them."""
HOOKS_BEFORE_UPDATE = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step")
"""Hooks between the backward passes and the update. Sharded weights are not whole there, either."""


def reads_weights_between_steps(module: pl.LightningModule, trainer: pl.Trainer, sharded: bool = False) -> bool:
    """Return whether the user's code runs between steps and may read weights. If so, each step ends with the gather.

    Set ``reads_weights = False`` on a callback or module that reads no weights there.

    Args:
        sharded: between steps, each rank keeps only a shard of the weights.
    """
    if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return True
    more = (*HOOKS_OF_SHARDED_WEIGHTS, *HOOKS_BEFORE_UPDATE) if sharded else ()
    return _any_defines(module, trainer, (*HOOKS_BETWEEN_STEPS, *more), (*METHODS_BETWEEN_STEPS, *more))


def reads_weights_before_update(module: pl.LightningModule, trainer: pl.Trainer) -> bool:
    """Return whether the user's code runs between backward passes and update, and may read weights."""
    return _any_defines(module, trainer, HOOKS_BEFORE_UPDATE, HOOKS_BEFORE_UPDATE)


def _any_defines(
    module: pl.LightningModule, trainer: pl.Trainer, of_callbacks: Sequence[str], of_module: Sequence[str]
) -> bool:
    owners = [(callback, of_callbacks) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    for owner, names in (*owners, (module, of_module)):
        for name in names if getattr(owner, "reads_weights", True) else ():
            if hasattr(owner, name) and defines(owner, name):
                log.info("%s defines %s: parameters are gathered before it runs", type(owner).__name__, name)
                return True
    return False


@contextmanager
def intercepted_log(module: pl.LightningModule, handle: Callable[[str, Any, dict[str, Any]], None]) -> Iterator[None]:
    """Give calls of ``module.log`` inside, also by ``log_dict``, to ``handle``: name, value, further arguments.

    Tensors come without a graph. To log a value all the same, ``handle`` calls the ``module.log`` from before.
    """

    def log(name: str, value: Any, prog_bar: bool = False, **kwargs: Any) -> None:
        handle(name, value.detach() if isinstance(value, Tensor) else value, {"prog_bar": prog_bar, **kwargs})

    with overridden(module, log=log):
        yield


@dataclass
class WeightedBatch:
    """A micro-batch, and its share of the samples of this rank's batch."""

    batch: Any
    weight: float


class UserStages:
    """The training task of a plain module: its ``training_step`` is a mean over the samples of a micro-batch.

    Args:
        problem: describes an output that cannot be trained on; returns an exception.

    Attributes:
        method: the step that runs.
        others: its arguments behind the batch.
        output: what an evaluation step returned. None on stages before the last.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device, problem: Callable[[Any], Exception]) -> None:
        self.module = module
        self.device = device
        self.problem = problem
        self.method = "training_step"
        self.others: Sequence[Any] = ()
        self.output: Any = None

    def begin(self, method: str, others: Sequence[Any]) -> None:
        """Begin a step."""
        self.method, self.others, self.output = method, others, None

    def forward_step(self, model: nn.Module, batch: WeightedBatch, carry: Carry | None = None) -> Carry:
        """Run the user's step, which calls the model; on the last stage, return its loss."""
        made = getattr(self.module, self.method)(batch.batch, *self.others)
        if self.method != "training_step":
            self.output = made
            return {}
        loss = made.get("loss") if isinstance(made, Mapping) else made
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise self.problem(made)
        return {"loss": loss}

    def loss_step(self, carry: Carry, batch: WeightedBatch) -> Loss:
        """Return the loss, which is a mean, times the micro-batch's weight."""
        return Loss(carry["loss"] * batch.weight)

    def loss_tokens(self, batch: WeightedBatch) -> Tensor:
        """Return the weight. The weights of one rank add up to 1, so that the whole is the mean over ranks."""
        return torch.tensor(batch.weight, dtype=torch.float64, device=self.device)

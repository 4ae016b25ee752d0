"""Which ops a run uses: our fused ops inside models of ``transformers``, and backends by name."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Adam, AdamW, Optimizer

from megalight.models.fused import Fused, fuse, unfuse
from megalight.models.module import MegalightModule
from megalight.ops import use_backends


class FusedOps(pl.Callback):
    """Runs models of ``transformers`` with fused ops while a Trainer works on them.

    A module is fused if its numbers are those of one of our ops, whatever its family: a small copy of it is tried once.

    Fused are norms with the sum before them, gated activations, experts, rotary embedding, attention, the head with its
    loss, and the step of torch's ``Adam`` and ``AdamW``. Losses and gradients are equal up to rounding. Names and
    weights stay, so checkpoints fit models with and without this callback. See :func:`megalight.models.fused.fuse`.

    In training, a model that is given ``labels`` returns its loss and no logits.

    Raises:
        ConfigurationError: the module has no such part.
    """

    reads_weights = False

    def __init__(self) -> None:
        self._stepped: list[tuple[Optimizer, int]] = []

    def attach(self, module: pl.LightningModule) -> None:
        """Change the model, or note that it is to be changed when it is built. Called before processes start."""
        if isinstance(module, MegalightModule):
            if Fused() not in module.transforms:
                module.transforms.append(Fused())
        elif type(module).configure_model is pl.LightningModule.configure_model:
            Fused().change(module)
        else:
            fuse(module)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Change the model before it is split."""
        # For trainers without our strategy's early checks.
        self.attach(pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change a model that ``configure_model`` has built."""
        # A stage of a pipeline may hold no layer. Its model was changed as a whole.
        if not isinstance(pl_module, MegalightModule):
            Fused().change(pl_module)
        rank_zero_info(f"FusedOps: {fuse(pl_module)} decoder layers run fused ops")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let torch's Adam update all its parameters in one kernel, unless its user has chosen a way."""
        # Here: a checkpoint's options and state are there now.
        for optimizer in trainer.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                chosen = any(group.get(way) for way in ("foreach", "fused", "capturable", "differentiable"))
                if type(optimizer) in (Adam, AdamW) and not chosen and group.get("foreach") is None:
                    group["fused"] = True
                    self._stepped.append((optimizer, number))
            if any(changed is optimizer for changed, _ in self._stepped):
                _count_on_device(optimizer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave model and optimizer as they were."""
        self._restore(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave model and optimizer as they were."""
        self._restore(pl_module)

    def _restore(self, module: pl.LightningModule) -> None:
        # Models of our own modules remember their transforms for the next Trainer.
        if not isinstance(module, MegalightModule):
            unfuse(module)
        for optimizer, number in self._stepped:
            optimizer.param_groups[number]["fused"] = None
        self._stepped.clear()


def _count_on_device(optimizer: Optimizer) -> None:
    """Move the numbers of steps to the device of their parameter, where the fused kernel reads them."""
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(parameter.device, torch.float32)


class UseBackends(pl.Callback):
    """Makes ``auto`` mean the given backends during a run. Afterwards ``auto`` has its usual meaning again.

    Args:
        names: op -> backend, as ``megalight doctor --all`` lists them: ``{"weight_gradient": "transformer_engine"}``.

    Raises:
        ConfigurationError: there is no such op (in ``setup``).
        BackendError: the op has no such backend (in ``setup``), or the backend cannot serve (at its first use).
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the backends, before the model is built."""
        # Before the model is built, because modules choose their backend as they are made,
        # or at their first call.
        use_backends(**self.names)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore ``auto`` after the run."""
        use_backends(**dict.fromkeys(self.names, "auto"))

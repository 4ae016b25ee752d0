"""The one-device model of a module that ranks have divided, for those who count its parameters."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn

from megalight.models.module import MegalightModule
from megalight.parallel.transform import apply_transforms


def whole_model(module: pl.LightningModule) -> nn.Module:
    """Return the one-device model: built again without memory, or the module itself if it builds none."""
    if not isinstance(module, MegalightModule):
        return module
    # On meta, and with the state of the generator kept: the run's values do not change.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = module.build_model()
        apply_transforms(model, module.transforms)
    return model


def with_whole_model(module: pl.LightningModule) -> pl.LightningModule:
    """Return a twin with the one-device model in the place of this rank's part, or the module itself as above."""
    if not isinstance(module, MegalightModule):
        return module
    twin: MegalightModule = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {**module._modules, "model": whole_model(module)}
    twin.example_input_array = None  # a model without memory computes nothing
    return twin

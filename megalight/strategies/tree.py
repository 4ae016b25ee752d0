"""Which module of a LightningModule is split, and the tensors it holds."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor, nn

from megalight.models.module import MegalightModule


def root_of(module: pl.LightningModule) -> nn.Module:
    """What is split: a Megalight module's model, or a plain LightningModule itself."""
    if isinstance(module, MegalightModule):
        assert module.model is not None
        return module.model
    return module


def tensors_of(root: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by local name, tied ones once."""
    persistent = set(root.state_dict(keep_vars=True))
    named: dict[str, Tensor] = dict(root.named_parameters())
    named.update({name: buffer for name, buffer in root.named_buffers() if name in persistent})
    return named

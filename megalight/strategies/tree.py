"""Which module of a LightningModule is split, the tensors it holds, and what is known of its parts."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
from torch import Tensor, nn

from megalight.models.module import MegalightModule
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.shard import ShardSpec


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


@dataclass(frozen=True)
class Split:
    """A model that became this rank's part of a parallel one.

    Attributes:
        asked: the parallel layout it was split for, in words.
        specs: what each local parameter and buffer holds of the model.
        layout: the pipeline's stages.
        chunks: the stages that lie here.
    """

    asked: str
    specs: dict[str, ShardSpec]
    layout: PipelineLayout
    chunks: list[nn.Module]

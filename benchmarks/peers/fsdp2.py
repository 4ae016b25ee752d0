"""``transformers``' Llama with torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.peers.sharded_llama import Sharded, ShardedLlama
from benchmarks.step import Step


class Runner(ShardedLlama):
    """Shards parameters, gradients and optimizer state. Reduces gradients in float32 at the last micro-batch."""

    def shard(self, model: Any, step: Step, optimizer: Callable[..., Optimizer]) -> Sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if step.precision == "bf16" else None
        options = {"mp_policy": policy} if policy else {}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return Sharded(
            model,
            optimizer(model.parameters()),
            model.set_requires_gradient_sync,
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        )

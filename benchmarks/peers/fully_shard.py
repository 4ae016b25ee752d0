"""``transformers``' Llama with ``megalight.fully_shard``, without Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

import megalight
from benchmarks.peers.megalight import sharding_of
from benchmarks.peers.sharded_llama import Sharded, ShardedLlama
from benchmarks.step import Step
from megalight.parallel.data_parallel import DataParallelOptions


class Runner(ShardedLlama):
    """bfloat16 parameters, float32 gradients and masters."""

    choices = ("level", "sharding")

    def shard(self, model: Any, step: Step, optimizer: Callable[..., Optimizer]) -> Sharded:
        stepping = optimizer(model.parameters())
        sharded = megalight.fully_shard(
            model,
            stepping,
            dtype=torch.bfloat16 if step.precision == "bf16" else None,
            data_parallel=DataParallelOptions(level="optim_grads_params", **sharding_of(step)),
        )
        return Sharded(model, stepping, lambda last: None, lambda: sharded.clip_grad_norm_(1.0))

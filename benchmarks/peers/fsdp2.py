"""``transformers``' Llama with torch's ``fully_shard`` over all ranks, each layer compiled (on GPUs)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.meter import Meter
from benchmarks.peers import world_size
from benchmarks.peers.huggingface import finish, llama, loss_of
from benchmarks.step import Step, only_of
from megalight.imports import has
from megalight.parallel.ending import end_at_exit


class Runner:
    """Shards parameters, gradients and optimizer state. Reduces gradients in float32 at the last micro-batch."""

    def why_not(self, step: Step) -> str | None:
        if not has("transformers"):
            return "transformers is not installed"
        return "this runner has no fp8" if step.precision == "fp8" else only_of(step, ("level",))

    def check(self, step: Step) -> dict[str, Any]:
        return {}

    def run(self, step: Step, meter: Meter) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        cuda = step.device == "cuda"
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with process_group("nccl" if cuda else "gloo") as rank:
            model = llama(step)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if step.precision == "bf16" else None
            options = {"mp_policy": policy} if policy else {}
            for layer in model.model.layers:
                if cuda:
                    layer.compile()
                fully_shard(layer, **options)
            fully_shard(model, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            meter.start()
            for index in range(meter.total):
                for micro in range(step.micro):
                    model.set_requires_gradient_sync(micro == step.micro - 1)
                    seed = (index * step.micro + micro) * world_size() + rank
                    (loss_of(model, step, seed) / step.micro).backward()
                finish(model, optimizer)
                meter.tick()
            meter.close()


@contextmanager
def process_group(backend: str) -> Iterator[int]:
    """Use a process group of all ranks from torchrun, or of this process alone, and yield the rank.

    An existing group is reused. The group stays open for the next peer; :mod:`megalight.parallel.ending` closes it.
    """
    if not dist.is_initialized():
        store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **store)
        end_at_exit()
    yield dist.get_rank()
    dist.barrier()

"""``transformers``' Llama, sharded over all ranks and each layer compiled: what the peers of full sharding share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from benchmarks.meter import Meter, forget
from benchmarks.peers import world_size
from benchmarks.peers.huggingface import llama, loss_of
from benchmarks.step import Step, only_of
from megalight.imports import has
from megalight.parallel.mesh import end_at_exit

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
"""Precision -> relative difference of the twin's losses from float32 that rounding may cause."""

CHECKED_STEPS = 6
TWIN_RATE = 0.3


@dataclass(frozen=True)
class Sharded:
    """A sharded model and its optimizer.

    Attributes:
        begin: called with True before the last micro-batch of a step, else with False.
        clip: clips gradients to norm 1; None: the peer has no way to.
    """

    model: nn.Module
    optimizer: Optimizer
    begin: Callable[[bool], None]
    clip: Callable[[], object] | None


class ShardedLlama:
    """Trains a Llama; a subclass shards it. Ranks have different batches, and gradients are their mean.

    Attributes:
        package: must be installed.
        choices: the settings of a step that it supports beside the shape.
    """

    package = "torch"
    choices: tuple[str, ...] = ("level",)

    def shard(self, model: Any, step: Step, optimizer: Callable[..., Optimizer]) -> Sharded:
        """Shard a model, with the optimizer that ``optimizer(parameters)`` makes."""
        raise NotImplementedError

    def why_not(self, step: Step) -> str | None:
        for package in ("transformers", self.package):
            if not has(package):
                return f"{package.replace('_', '-')} is not installed"
        return "this runner has no fp8" if step.precision == "fp8" else only_of(step, self.choices)

    def check(self, step: Step) -> dict[str, Any]:
        """Train a narrow twin of the step on one batch, and compare its losses with float32 on one device.

        The optimizer is SGD without clipping: a gradient of the wrong scale moves its losses, and Adam's hardly.
        (``megatron-fsdp`` takes an empty first step, which would change Adam's next ones.)

        Raises:
            RuntimeError: the losses differ by more than rounding.
        """
        small = twin(step)
        with process_group(step) as rank:
            sharded = self.shard(llama(small), small, lambda parameters: torch.optim.SGD(parameters, TWIN_RATE))
            losses = []
            for _ in range(CHECKED_STEPS):
                losses.append(torch.stack([backward(sharded, small, micro, rank) for micro in range(small.micro)]))
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
            mean = torch.stack(losses).sum(1).double() / world_size()
            dist.all_reduce(mean)
            learned = mean.tolist()
            del sharded
            forget(step)
            exact = by_hand(small)
            forget(step)
        worst = max(abs(a - b) / b for a, b in zip(learned, exact, strict=True))
        found = {"twin_losses": learned, "twin_losses_float32": exact, "twin_difference": worst}
        if not worst < TOLERANCE[step.precision]:
            raise RuntimeError(f"the twin's losses differ from float32 by {worst:.1e}: {found}")
        return found

    def run(self, step: Step, meter: Meter) -> None:
        with process_group(step) as rank:
            model = llama(step)
            if step.device == "cuda":
                # Sizes of the peer before would count as dynamic, and those kernels are slower.
                torch._dynamo.reset()
                for layer in model.model.layers:
                    # Not `layer.compile()`: it would trace the hooks that gather a layer, and anew for each of them.
                    layer.forward = torch.compile(layer.forward)
            sharded = self.shard(model, step, lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True))
            meter.start()
            for index in range(meter.total):
                for micro in range(step.micro):
                    backward(sharded, step, micro, rank, index)
                if sharded.clip is not None:
                    sharded.clip()
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
                meter.tick()
            meter.close()


def backward(sharded: Sharded, step: Step, micro: int, rank: int, index: int = 0) -> torch.Tensor:
    """Run one micro-batch of this rank; return its part of the loss of the rank's step."""
    sharded.begin(micro == step.micro - 1)
    loss = loss_of(sharded.model, step, (index * step.micro + micro) * world_size() + rank) / step.micro
    loss.backward()
    return loss.detach()


def twin(step: Step) -> Step:
    """Return a small step with the same precision and size of heads."""
    heads = min(step.heads, 4)
    width = heads * step.head_dim
    small = {name: min(getattr(step, name), most) for name, most in (("layers", 4), ("vocab", 4096), ("seq", 256))}
    return replace(step, **small, heads=heads, kv=min(step.kv, 2), hidden=width, ffn=2 * width, dim=0, mbs=1, micro=2)


def by_hand(step: Step) -> list[float]:
    """Return the losses of the twin in float32, from a plain loop over the batches of all ranks."""
    model = llama(step)
    optimizer, losses = torch.optim.SGD(model.parameters(), TWIN_RATE), []
    everyone = step.micro * world_size()
    for _ in range(CHECKED_STEPS):
        total = 0.0
        for number in range(everyone):
            loss = loss_of(model, step, number) / everyone
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextmanager
def process_group(step: Step) -> Iterator[int]:
    """Use a process group of all ranks from torchrun, or of this process alone, and yield the rank.

    An existing group is reused. The group stays open for the next peer; :mod:`megalight.parallel.mesh` closes it.
    """
    if step.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if step.device == "cuda" else "gloo", **store)
        end_at_exit()
    yield dist.get_rank()
    dist.barrier()

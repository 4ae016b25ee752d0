"""Makes an ordinary optimizer step on the flat shards of the data-parallel engine."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.errors import ConfigurationError
from megalight.optim.adam import Adam
from megalight.parallel.data_parallel import DataParallelEngine, FlatShard

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""torch optimizers that update each element only from its own gradient and state."""

SCALARS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number per parameter."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can step on flat shards. Your own class declares it with ``elementwise = True``."""
    return type(optimizer) in ELEMENTWISE or bool(getattr(optimizer, "elementwise", False))


def shard_optimizer(optimizer: OptimizerT, engine: DataParallelEngine) -> OptimizerT:
    """Replace the parameters of an optimizer by the master shards of the engine, and return the optimizer.

    The optimizer object and the dicts of its groups stay the same, so learning-rate schedulers and callbacks that hold
    them keep working. Groups keep their options. Existing state is moved to the shards.

    Raises:
        ConfigurationError: the optimizer is not element-wise, or its groups differ from those of the engine. A later
            step raises it if parameters were added to the optimizer.
    """
    if not is_elementwise(optimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"{name} is not known to update each element only from its own gradient, so it cannot step on flat shards. "
            "If it does, set elementwise = True on the class. If not, use an optimizer such as megalight.optim.Adam, "
            "or another strategy."
        )
    _check_groups(optimizer, engine)
    states = [_flat_state(optimizer, engine, index) for index in range(len(engine.shards))]
    optimizer.state.clear()
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [shard.master for shard in engine.shards if shard.group == number]
        group.pop("param_names", None)
    for shard, state in zip(engine.shards, states, strict=True):
        if state:
            optimizer.state[shard.master] = state
    masters = {id(shard.master) for shard in engine.shards}
    optimizer.register_step_pre_hook(lambda *_: _check_masters(optimizer, masters))
    if isinstance(optimizer, Adam):
        _fuse(optimizer, engine)
    return optimizer


def _check_masters(optimizer: Optimizer, masters: set[int]) -> None:
    if any(id(p) not in masters for group in optimizer.param_groups for p in group["params"]):
        raise ConfigurationError(
            "a parameter was added to the optimizer after training began (by a callback that unfreezes layers?), and "
            "its gradients are not summed over ranks; let it require gradients from the start, with learning rate 0."
        )


def _fuse(optimizer: Adam, engine: DataParallelEngine) -> None:
    """Let Adam's kernel also scale gradients for clipping, and write the low-precision copies of the masters."""

    def scale(factor: Tensor) -> None:
        optimizer.grad_scale = factor if optimizer.grad_scale is None else optimizer.grad_scale * factor

    written = engine.fuse(scale)
    optimizer.copies = {b.shard.master: b.own_params for b in engine.buckets if b.rounds_masters}
    optimizer.register_step_post_hook(lambda *_: written())


def _check_groups(optimizer: Optimizer, engine: DataParallelEngine) -> None:
    home = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for info in engine.infos:
        number = home.pop(id(info.parameter), None)
        if number is None:
            raise ConfigurationError(
                f"{info.name} requires gradients, but the optimizer does not hold it. Add it to a parameter group, or "
                "freeze it with requires_grad_(False) before the engine is built."
            )
        if number != info.group:
            raise ConfigurationError(
                f"{info.name} is in group {number} of the optimizer, but in group {info.group} of the engine; build "
                "both from the same groups."
            )
    foreign = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"] if id(p) in home)
    if foreign:
        raise ConfigurationError(
            f"the optimizer holds {foreign} trainable tensors that are not parameters of the model; create it from the "
            "model's parameters in configure_optimizers."
        )


def _flat_state(optimizer: Optimizer, engine: DataParallelEngine, index: int) -> dict[str, object]:
    """Return the existing state of one bucket's parameters in the layout of the shard. Padding is zero."""
    bucket, flat = engine.buckets[index], dict[str, object]()
    shard: FlatShard = bucket.shard
    for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
        low, high = max(shard.start, slot.start), min(shard.stop, slot.stop)
        for key, value in optimizer.state.get(info.parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == info.parameter.shape and key not in SCALARS:
                target = flat.setdefault(key, value.new_zeros(shard.numel))
                assert isinstance(target, Tensor)
                if low < high:
                    part = value.reshape(-1)[low - slot.start : high - slot.start]
                    target[low - shard.start : high - shard.start] = part
            else:
                flat.setdefault(key, value)
    return flat

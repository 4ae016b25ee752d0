"""Makes an ordinary optimizer step on the flat shards of the data-parallel engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from megalight.errors import ConfigurationError
from megalight.optim.adam import Adam
from megalight.parallel.data_parallel import DataParallelEngine, FlatShard
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.data_parallel.layout import Slot

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

SHARDING = "megalight_sharding"
"""Attribute of an optimizer that is on shards."""

SCALARS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that is one number per parameter."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can step on flat shards. Your own class declares it with ``elementwise = True``."""
    # The exact type: a subclass may look at whole parameters.
    return type(optimizer) in ELEMENTWISE or bool(getattr(optimizer, "elementwise", False))


def shard_optimizer(optimizer: OptimizerT, engine: DataParallelEngine) -> OptimizerT:
    """Let an optimizer update the master shards of the engine from now on, and return the optimizer.

    The optimizer object and the dicts of its groups stay the same, so learning-rate schedulers and callbacks that hold
    them keep working. Groups keep their options, and show the model's parameters between steps. Existing state is moved
    to the shards. If the optimizer was on an earlier engine, all ranks call this together.

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
    # First its own parameters get the state back, on all ranks together: the two engines
    # may cut it differently.
    if (earlier := sharding_of(optimizer)) is not None:
        earlier.end()
    _check_groups(optimizer, engine)
    optimizer.__dict__[SHARDING] = Sharding(optimizer, engine)
    return optimizer


def sharding_of(optimizer: Optimizer) -> Sharding | None:
    """Return how an optimizer is sharded. None: it updates the parameters in its groups."""
    sharding: Sharding | None = optimizer.__dict__.get(SHARDING)
    return sharding


class Sharding:
    """An optimizer on the shards of an engine.

    Its groups hold the masters during a step and while its state is saved or loaded. At all other times they show the
    model's parameters, where schedulers, callbacks and users look for them.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self.optimizer = optimizer
        self.engine = engine
        groups = optimizer.param_groups
        self._shown = [group["params"] for group in groups]
        self._names = [group.get("param_names") for group in groups]
        # Those on the device first: their updates run there while the host works on its own.
        ordered = sorted(engine.buckets, key=lambda bucket: bucket.on_host)
        self._masters: list[list[Tensor]] = [
            [bucket.shard.master for bucket in ordered if bucket.shard.group == number] for number in range(len(groups))
        ]
        self._frozen = [parameter for shown in self._shown for parameter in shown if not parameter.requires_grad]
        if isinstance(optimizer, Adam):
            # A block of codes of a parameter is none of a shard.
            optimizer.widen_moments()
        # Read all states before any is dropped: state of the parameters and of the shards is in one dict.
        states = [_flat_state(optimizer, engine, index) for index in range(len(engine.shards))]
        optimizer.state.clear()
        for shard, state in zip(engine.shards, states, strict=True):
            if state:
                optimizer.state[shard.master] = state
        # Hooks instead of an override: a user's own optimizer class needs no change.
        enter, leave = (lambda *_: self._enter()), (lambda *_: self._leave())
        self._handles = [
            optimizer.register_step_pre_hook(enter),
            optimizer.register_step_pre_hook(lambda *_: self._bring_gradients()),
            optimizer.register_step_post_hook(leave),
            optimizer.register_state_dict_pre_hook(enter),
            optimizer.register_state_dict_post_hook(leave),
            optimizer.register_load_state_dict_pre_hook(enter),
            optimizer.register_load_state_dict_post_hook(leave),
        ]
        # Only our Adam has a kernel that scales and rounds.
        if isinstance(optimizer, Adam):
            self._handles.append(_fuse(optimizer, engine))

    @property
    def changed(self) -> bool:
        """Whether somebody added parameters or groups, or unfroze parameters, so that the engine does not fit."""
        groups = self.optimizer.param_groups
        return (
            len(groups) != len(self._shown)
            or any(not _same(g["params"], shown) for g, shown in zip(groups, self._shown, strict=True))
            or any(parameter.requires_grad for parameter in self._frozen)
        )

    @property
    def divided(self) -> bool:
        """Whether this rank holds only a part of the state."""
        return any(bucket.state_groups for bucket in self.engine.buckets)

    def end(self) -> None:
        """Let the optimizer update its own parameters again, and give them their state.

        If the state is :attr:`divided`, all ranks call this together, and each then holds all of it.
        """
        for handle in self._handles:
            handle.remove()
        del self.optimizer.__dict__[SHARDING]
        if isinstance(self.optimizer, Adam):
            # These are buffers of the engine, which may be freed after this.
            self.optimizer.copies, self.optimizer.before, self.optimizer.after = {}, {}, {}
            self.optimizer.coded = {}
            self.optimizer.turns = {}
            # Parts of several ranks are joined, and blocks of codes with them.
            self.optimizer.widen_moments()
        for bucket in self.engine.buckets:
            state = self.optimizer.state.pop(bucket.shard.master, {})
            # A collective for each state tensor: all ranks have the same buckets in the same order.
            whole = {name: _whole(bucket, value) for name, value in state.items()}
            for info, slot in zip(bucket.infos, bucket.layout.slots, strict=True):
                # Each parameter gets a view of the whole state, so that a plain optimizer finds it where it looks.
                own = {name: _cut(value, slot, info.parameter, bucket) for name, value in whole.items()}
                if own:
                    self.optimizer.state[info.parameter] = own

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Run passes inside, in the middle of a step, with the values that the masters have now."""
        self._leave()
        self.engine.publish()
        yield
        self._enter()
        self._bring_gradients()

    def _enter(self) -> None:
        if self.changed:
            # Groups still hold the masters: `_leave` never ran.
            if _same(self.optimizer.param_groups[0]["params"], self._masters[0]):
                return  # an earlier step failed half-way
            raise ConfigurationError(
                "a parameter was added to the optimizer after training began (by a callback that unfreezes layers?), "
                "and its gradients are not summed over ranks; let it require gradients from the start, with learning "
                "rate 0."
            )
        for group, masters in zip(self.optimizer.param_groups, self._masters, strict=True):
            # The list itself is replaced, not changed: schedulers and callbacks hold the dict of the group.
            group["params"] = masters
            # These are names of parameters, and a master stands for many of them.
            group.pop("param_names", None)

    def _bring_gradients(self) -> None:
        """Start to copy gradients to masters on the host. Adam waits for one after the other, others for all."""
        host, adam = self.engine.host, isinstance(self.optimizer, Adam)
        # Only our Adam scales in its step. The scale travels in front of the gradients, which the host waits for.
        scale = host.begin(self.optimizer.grad_scale if adam else None)  # type: ignore[attr-defined]
        if adam:
            self.optimizer.host_scale = scale  # type: ignore[attr-defined]
        else:
            host.arrive_all()

    def _leave(self) -> None:
        for group, shown, names in zip(self.optimizer.param_groups, self._shown, self._names, strict=True):
            group["params"] = shown
            if names is not None:
                group["param_names"] = names


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return some is others or (len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True)))


def _whole(bucket: Bucket, value: object) -> object:
    """Return a state tensor of all ranks' shards of a bucket. Numbers are returned as they are."""
    flat = isinstance(value, Tensor) and value.shape == bucket.shard.master.shape
    return bucket.gathered(value) if flat else value  # type: ignore[arg-type]


def _cut(value: object, slot: Slot, parameter: Tensor, bucket: Bucket) -> object:
    """Return a parameter's part of a flat state tensor, as a view, or its copy of a number."""
    if not isinstance(value, Tensor):
        return value
    flat = value.shape == (bucket.layout.numel,)
    return value[slot.start : slot.stop].view(parameter.shape) if flat else value.clone()


def _fuse(optimizer: Adam, engine: DataParallelEngine) -> RemovableHandle:
    """Let Adam's kernel also scale gradients for clipping, and write the low-precision copies or codes of masters."""

    def scale(factor: Tensor | None) -> None:
        optimizer.grad_scale = factor

    written = engine.fuse(scale)
    host, away = engine.host, engine.host.buckets
    optimizer.copies = {b.shard.master: b.updated for b in engine.buckets if b.rounds_masters and not b.on_host}
    optimizer.copies.update({b.shard.master: flat for b in away if (flat := host.rounded(b)) is not None})
    optimizer.coded = {b.shard.master: partial(engine.coded, b) for b in engine.buckets if b.holds_codes}
    optimizer.before = {bucket.shard.master: partial(host.arrive, bucket) for bucket in away}
    optimizer.after = {bucket.shard.master: partial(host.send, bucket) for bucket in away}
    early = [b for b in engine.sendable if b.shard.master in optimizer.copies or not b.rounds_masters]
    optimizer.after.update({bucket.shard.master: partial(engine.send, bucket) for bucket in early})
    # What the next forward pass needs first is updated first. Masters on the host come last: see `Sharding`.
    first = {id(bucket): turn for turn, bucket in enumerate(early)}
    turns = sorted(engine.buckets, key=lambda bucket: (bucket.on_host, first.get(id(bucket), len(first))))
    optimizer.turns = {bucket.shard.master: turn for turn, bucket in enumerate(turns)}
    return optimizer.register_step_post_hook(lambda *_: written())


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
    # What is left in `home` belongs to no parameter of the engine.
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
        # The part of this parameter that lies in this rank's shard; empty if they do not meet.
        low, high = max(shard.start, slot.start), min(shard.stop, slot.stop)
        for key, value in optimizer.state.get(info.parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == info.parameter.shape and key not in SCALARS:
                # Padding is stepped like any element, so its state must be finite.
                target = flat.setdefault(key, shard.master.new_zeros(shard.numel, dtype=value.dtype))
                assert isinstance(target, Tensor)
                if low < high:
                    part = value.reshape(-1)[low - slot.start : high - slot.start]
                    target[low - shard.start : high - shard.start] = part
            else:
                flat.setdefault(key, value)
    return flat

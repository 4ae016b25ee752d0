"""ZeRO optimizer: makes any elementwise torch optimizer step on the flat shards of the data-parallel engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from megalight.attachments import SHARDING
from megalight.errors import ConfigurationError
from megalight.imports import has_grad_dtype
from megalight.ops.adam import MOMENT_BLOCK, QuantizedOutput
from megalight.ops.parameter import known_state
from megalight.optim.adam import EXPONENTS, Adam
from megalight.optim.whole_matrices import WholeMatrixOptimizer
from megalight.parallel.data_parallel import DataParallelEngine, FlatShard, ParamInfo
from megalight.parallel.data_parallel.buffers import SCALARS, Bucket, history
from megalight.parallel.data_parallel.layout import BucketSlot

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


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can step on flat shards. Your own class declares it with ``elementwise = True``."""
    # The exact type: a subclass may look at whole parameters.
    declared = isinstance(optimizer, WholeMatrixOptimizer) or getattr(optimizer, "elementwise", False)
    return type(optimizer) in ELEMENTWISE or bool(declared)


def shard_optimizer(optimizer: OptimizerT, engine: DataParallelEngine) -> OptimizerT:
    """Let an optimizer update the master shards of the engine from now on, and return the optimizer.

    The optimizer object and the dicts of its groups stay the same, so learning-rate schedulers and callbacks that hold
    them keep working. Groups keep their options, and show the model's parameters between steps. Existing state is moved
    to the shards. If the optimizer was on an earlier engine, all ranks call this together.

    Raises:
        ConfigurationError: the optimizer is not element-wise, or its groups differ from those of the engine. A later
            step raises it if parameters were added to the optimizer.
    """
    if not steps_on_shards(optimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"{name} is not known to update each element of {engine.buckets[0].infos[0].name} only from its own "
            "gradient, so it cannot step on flat shards. If it does, set elementwise = True on the class. If it needs "
            "whole matrices, derive it from megalight.optim.WholeMatrixOptimizer. If neither, use an optimizer such as "
            "megalight.optim.Adam, or another strategy."
        )
    # First its own parameters get the state back, on all ranks together: the two engines
    # may cut it differently.
    if (earlier := sharding_of(optimizer)) is not None:
        earlier.end()
    _check_groups(optimizer, engine)
    SHARDING.set(optimizer, Sharding(optimizer, engine))
    return optimizer


def sharding_of(optimizer: Optimizer) -> Sharding | None:
    """Return how an optimizer is sharded. None: it updates the parameters in its groups."""
    sharding: Sharding | None = SHARDING.get(optimizer)
    return sharding


class Sharding:
    """An optimizer on the shards of an engine.

    Its groups hold the masters during a step and while its state is saved or loaded. At all other times they show the
    model's parameters, where schedulers, callbacks and users look for them.

    One master stands for all parameters of a bucket as long as all of them take part in the same steps. When some had
    no gradient in a step, the master is divided into parts, which are views of it: each is stepped, and counts its
    steps, by itself. All ranks that share a bucket divide it alike, also where a part has no element.

    Attributes:
        parts: for each bucket the parts of this rank's shard; undivided: the shard itself.
    """

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self.optimizer = optimizer
        self.engine = engine
        groups = optimizer.param_groups
        self._shown = [group["params"] for group in groups]
        self._names = [group.get("param_names") for group in groups]
        self.parts = [[shard] for shard in engine.shards]
        self._skipped: set[FlatShard] = set()
        self._whole = False  # Adam was told of undivided shards
        self._entered = False
        self._frozen = [parameter for shown in self._shown for parameter in shown if not parameter.requires_grad]
        if isinstance(optimizer, Adam):
            # A block of quantized values of a parameter is none of a shard.
            optimizer.widen_moments()
        # Read all states before any is dropped: state of the parameters and of the shards is in one dict.
        before = dict(optimizer.state)
        optimizer.state.clear()
        for index, bucket in enumerate(engine.buckets):
            states = [before.get(info.parameter, {}) for info in bucket.infos]
            self._divide(index, list(map(history, states)))
            for part, places in self._rows(index):
                if state := _flat_state(part, bucket.infos[places], states[places]):
                    optimizer.state[part.master] = state
        # Frozen parameters are on no shard. Their state waits until they are trained again.
        self._resting = {p: before[p] for shown in self._shown for p in shown if p in before and not p.requires_grad}
        # Hooks instead of an override: a user's own optimizer class needs no change.
        enter, leave = (lambda *_: self._enter()), (lambda *_: self._leave())
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._begin_step()),
            optimizer.register_step_post_hook(leave),
            optimizer.register_state_dict_pre_hook(enter),
            optimizer.register_state_dict_post_hook(leave),
            optimizer.register_load_state_dict_pre_hook(enter),
            optimizer.register_load_state_dict_post_hook(leave),
        ]
        if isinstance(optimizer, WholeMatrixOptimizer):
            optimizer.buckets = {
                index: bucket
                for index, bucket in enumerate(engine.buckets)
                if optimizer.param_groups[bucket.shard.group]["whole_matrices"]
            }
        # Only our Adam has a kernel that scales and rounds.
        if isinstance(optimizer, Adam):
            written = engine.fuse(partial(setattr, optimizer, "grad_scale"))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: written()))
            self._wire(optimizer)

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
        SHARDING.pop(self.optimizer)
        if isinstance(self.optimizer, Adam):
            # These are buffers of the engine, which may be freed after this.
            self.optimizer.copies, self.optimizer.before, self.optimizer.after = {}, {}, {}
            self.optimizer.quantized_out = {}
            self.optimizer.turns = {}
            if isinstance(self.optimizer, WholeMatrixOptimizer):
                self.optimizer.leave()
            # Parts of several ranks are joined, and blocks of quantized values with them.
            self.optimizer.widen_moments()
        for index, bucket in enumerate(self.engine.buckets):
            states = [self.optimizer.state.pop(part.master, {}) for part in self.parts[index]]
            # A collective for each state tensor: all ranks have the same buckets and names in the same order.
            names = dict.fromkeys(name for state in states for name in state)
            whole = {name: self._gathered(index, [state.get(name) for state in states]) for name in names}
            for state, (_, places) in zip(states, self._rows(index), strict=True):
                for info, slot in zip(bucket.infos[places], bucket.layout.slots[places], strict=True):
                    # Each parameter gets a view of the whole state, so that a plain optimizer finds it where it looks.
                    own = {name: _own(whole[name], value, slot, info.parameter) for name, value in state.items()}
                    if own:
                        self.optimizer.state[info.parameter] = own
        self.optimizer.state.update(self._resting)

    @property
    def shards(self) -> list[FlatShard]:
        """The parts of all shards: the optimizer has a state for the master of each."""
        return [part for parts in self.parts for part in parts]

    def restart(self, key: Callable[[str], Hashable]) -> None:
        """Drop all states, and divide shards anew: parameters whose canonical names have one key go together."""
        self.optimizer.state.clear()
        self.parts = [[shard] for shard in self.engine.shards]
        for index, shard in enumerate(self.engine.shards):
            self._divide(index, [key(spec.pieces[0].name) if spec.pieces else None for spec, _ in shard.slots])

    def follow(self) -> None:
        """Let the masters of parts be views of the whole ones, which may have moved."""
        for shard, parts in zip(self.engine.shards, self.parts, strict=True):
            for part in parts:
                if part is not shard:
                    part.master.data = shard.part(part.start, part.stop)

    def _rows(self, index: int) -> Iterator[tuple[FlatShard, slice]]:
        """Yield the parts of a bucket, each with the places of its parameters there."""
        first = 0
        for part in self.parts[index]:
            yield part, slice(first, first + len(part.slots))
            first += len(part.slots)

    def _divide(self, index: int, keys: Sequence[Hashable]) -> None:
        """Divide the parts of a bucket further, so that neighbors with different keys are in different parts."""
        parts: list[FlatShard] = []
        for part, places in self._rows(index):
            sizes = [len(list(same)) for _, same in groupby(keys[places])]
            parts += [part] if len(sizes) == 1 else self._divided(part, sizes)
        self.parts[index] = parts

    def _divided(self, part: FlatShard, sizes: Sequence[int]) -> Iterator[FlatShard]:
        """Yield the parts of a part with these numbers of parameters, and give each its state."""
        state = self.optimizer.state.pop(part.master, {})
        firsts = [0, *accumulate(sizes)]
        # What lies between two parameters goes with the first of them. A part may have no element on this rank.
        inside = (min(max(part.slots[first][1], part.start), part.stop) for first in firsts[1:-1])
        bounds = [part.start, *inside, part.stop]
        for (first, last), (start, stop) in zip(pairwise(firsts), pairwise(bounds), strict=True):
            low, high = start - part.start, stop - part.start
            master = part.part(start, stop).requires_grad_()
            if state:
                self.optimizer.state[master] = {
                    name: _slice(name, value, part, low, high) for name, value in state.items()
                }
            yield replace(part, start=start, stop=stop, master=master, slots=part.slots[first:last])

    def _gathered(self, index: int, values: Sequence[object]) -> Tensor | None:
        """Return a state tensor of all ranks' shards of a bucket from that of each part; None: it is one number."""
        parts, bucket = self.parts[index], self.engine.buckets[index]
        part, like = next((part, v) for part, v in zip(parts, values, strict=True) if v is not None)
        if not (isinstance(like, Tensor) and like.shape == part.master.shape):
            return None
        own = [v if isinstance(v, Tensor) else like.new_zeros(p.numel) for p, v in zip(parts, values, strict=True)]
        return bucket.gathered(torch.cat(own) if len(own) > 1 else own[0])

    # ---------------------------------------------------------------- a step

    def _begin_step(self) -> None:
        self._skipped.clear()
        for index, unused in enumerate(self.engine.main_gradients.unused):
            if unused:
                self._divide(index, [place in unused for place in range(len(self.engine.buckets[index].infos))])
                self._skipped.update(part for part, places in self._rows(index) if places.start in unused)
        self._enter()
        self._bring_gradients()
        self.follow()
        for shard, parts in zip(self.engine.shards, self.parts, strict=True):
            gradient = shard.master.grad
            for part in parts:
                if part is not shard:
                    if has_grad_dtype():
                        part.master.grad_dtype = shard.master.grad_dtype
                    own = slice(part.start - shard.start, part.stop - shard.start)
                    part.master.grad = None if gradient is None else gradient[own]
                if part in self._skipped:
                    part.master.grad = None
        if isinstance(self.optimizer, WholeMatrixOptimizer):
            self.optimizer.places = {
                part.master: (index, part.start - bucket.shard.start)
                for index, (bucket, parts) in enumerate(zip(self.engine.buckets, self.parts, strict=True))
                for part in parts
            }
            self.optimizer.parts = {part.master: part for part in self.shards}
        whole = not self._skipped and all(len(parts) == 1 for parts in self.parts)
        if isinstance(self.optimizer, Adam) and not (whole and self._whole):
            self._wire(self.optimizer)
        self._whole = whole

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Run passes inside, in the middle of a step, with the values that the masters have now."""
        self._leave()
        self.engine.publish()
        yield
        self._begin_step()

    def _enter(self) -> None:
        # Groups still hold the masters if an earlier step failed half-way.
        if self.changed and not self._entered:
            raise ConfigurationError(
                "a parameter was added to the optimizer after training began (by a callback that unfreezes layers?), "
                "and its gradients are not summed over ranks; let it require gradients when training begins, and "
                "freeze it in on_train_start."
            )
        self._entered = True
        # Those on the device first: their updates run there while the host works on its own.
        ordered = sorted(zip(self.engine.buckets, self.parts, strict=True), key=lambda pair: pair[0].on_host)
        for number, group in enumerate(self.optimizer.param_groups):
            # The list itself is replaced, not changed: schedulers and callbacks hold the dict of the group.
            group["params"] = [part.master for _, parts in ordered for part in parts if part.group == number]
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
        self._entered = False
        for shard, parts in zip(self.engine.shards, self.parts, strict=True):
            for part in parts:
                if part is not shard:
                    part.master.grad = None  # a view of the sums of the whole bucket
        for group, shown, names in zip(self.optimizer.param_groups, self._shown, self._names, strict=True):
            group["params"] = shown
            if names is not None:
                group["param_names"] = names

    # ---------------------------------------------------------------- our Adam

    def _wire(self, optimizer: Adam) -> None:
        """Let Adam's kernel also write low-precision or quantized copies of masters, and send what it has written."""
        optimizer.copies, optimizer.quantized_out, optimizer.before, optimizer.after = {}, {}, {}, {}
        engine, host = self.engine, self.engine.host
        early = {id(bucket): turn for turn, bucket in enumerate(engine.parameters.sendable)}
        # What the next forward pass needs first is updated first. Masters on the host come last.
        turns = sorted(engine.buckets, key=lambda bucket: (bucket.on_host, early.get(id(bucket), len(early))))
        turn = {id(bucket): place for place, bucket in enumerate(turns)}
        optimizer.turns = {}
        for bucket, parts in zip(engine.buckets, self.parts, strict=True):
            stepped = [part for part in parts if part not in self._skipped]
            target = host.rounded(bucket) if bucket.on_host else bucket.updated if bucket.rounds_masters else None
            for part in stepped:
                optimizer.turns[part.master] = turn[id(bucket)]
                if target is not None:
                    optimizer.copies[part.master] = _of_part(target, part, bucket)
                # A scale may change for all weights of a bucket: those that are not stepped are cast with the others.
                if bucket.is_quantized and len(stepped) == len(parts):
                    optimizer.quantized_out[part.master] = partial(self._quantized_out, bucket, part)
            if not stepped:
                continue
            if bucket.on_host:
                optimizer.before[stepped[0].master] = partial(host.arrive, bucket)
                optimizer.after[stepped[-1].master] = partial(self._send, bucket, parts)
            elif id(bucket) in early:
                optimizer.after[stepped[-1].master] = partial(engine.parameters.send, bucket)

    def _send(self, bucket: Bucket, parts: Sequence[FlatShard]) -> None:
        """Start to send the new parameters of masters on the host, and the old ones of parts that were not stepped."""
        if (target := self.engine.host.rounded(bucket)) is not None:
            for part in parts:
                if part in self._skipped:
                    _of_part(target, part, bucket).copy_(bucket.shard.part(part.start, part.stop))
        self.engine.host.send(bucket)

    def _quantized_out(self, bucket: Bucket, part: FlatShard) -> list[tuple[int, int, QuantizedOutput]] | None:
        """Return how to write the quantized values of a part; see :meth:`ShardedParameters.quantized_out`."""
        found, low = self.engine.parameters.quantized_out(bucket), part.start - bucket.shard.start
        if found is None:
            return None
        return [(a - low, b - low, quantized_out) for a, b, quantized_out in found if low <= a < low + part.numel]


def _of_part(flat: Tensor, part: FlatShard, bucket: Bucket) -> Tensor:
    """Return what belongs to a part in a flat tensor of this rank's shard of a bucket."""
    return flat[part.start - bucket.shard.start : part.stop - bucket.shard.start]


def _slice(name: str, value: Any, part: FlatShard, low: int, high: int) -> Any:
    """Return elements ``[low, high)`` of a part's state tensor, as a view, or the copy of a number."""
    if not isinstance(value, Tensor):
        return value
    # Parts begin where parameters or shards do, and so do blocks of quantized values.
    if name.endswith(EXPONENTS):
        return value[low // MOMENT_BLOCK : -(-high // MOMENT_BLOCK)]
    return value[low:high] if value.shape == part.master.shape else value.clone()


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return some is others or (len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True)))


def _own(whole: Tensor | None, value: object, slot: BucketSlot, parameter: Tensor) -> object:
    """Return a parameter's part of a flat state tensor, as a view, or its copy of a number."""
    if whole is not None:
        return whole[slot.start : slot.stop].view(parameter.shape)
    return value.clone() if isinstance(value, Tensor) else value


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


def _flat_state(part: FlatShard, infos: Sequence[ParamInfo], states: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return the existing state of the parameters of a part in the layout of the part. Padding is zero."""
    flat = dict[str, object]()
    for (_, start), info, state in zip(part.slots, infos, states, strict=True):
        # What of this parameter lies in this part; empty if they do not meet.
        low, high = max(part.start, start), min(part.stop, start + info.parameter.numel())
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == info.parameter.shape and key not in SCALARS:
                # Padding is stepped like any element, so its state must be finite.
                target = flat.setdefault(key, part.master.new_zeros(part.numel, dtype=value.dtype))
                assert isinstance(target, Tensor)
                if low < high:
                    target[low - part.start : high - part.start] = value.reshape(-1)[low - start : high - start]
            else:
                flat.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
    return flat


_homes: WeakKeyDictionary[Optimizer, dict[Tensor, torch.device]] = WeakKeyDictionary()
"""Offloaded optimizers -> their parameters and the devices to return them to."""


def offload_to_cpu(optimizer: Optimizer) -> None:
    """Move optimizer state and fp32 copies of low-precision parameters to host memory.

    The tensor objects stay the same; only their storage changes. Gradients of moved parameters are dropped. Parameters
    that the model computes with are not moved, nor are 0-dim state tensors. A second call changes nothing.
    """
    homes = _homes.setdefault(optimizer, {})
    for parameter in _parameters(optimizer):
        homes.setdefault(parameter, parameter.device)
        # Only masters that are copies move. Others are the parameters with which the model computes.
        if (own := known_state(parameter)) is not None and own.master_copy:
            parameter.grad = None
            # `.data`: optimizers find their state by the tensor object, so the object must stay.
            parameter.data = parameter.data.to("cpu")
        _move_state(optimizer, parameter, torch.device("cpu"))
    _move_homes(optimizer, torch.device("cpu"))
    _follow(optimizer)
    if any(device.type == "cuda" for device in homes.values()):
        torch.cuda.empty_cache()  # so that other processes can use the memory


def restore_from_cpu(optimizer: Optimizer) -> None:
    """Move everything back to its device. Without an earlier :func:`offload_to_cpu` this does nothing."""
    for parameter, device in _homes.pop(optimizer, {}).items():
        parameter.data = parameter.data.to(device)
        _move_state(optimizer, parameter, device)
    _move_homes(optimizer, None)
    _follow(optimizer)


def _move_homes(optimizer: Optimizer, device: torch.device | None) -> None:
    """Move the state of whole matrices. None: back to the device of the parameters."""
    if not isinstance(optimizer, WholeMatrixOptimizer):
        return
    for exchange, members in optimizer.exchanges or ():
        assert optimizer.buckets is not None
        place = optimizer.buckets[members[0]].params.device if device is None else device
        for states in (batch for current in exchange.states for batch in current.values()):
            states.update({name: tensor.to(place) for name, tensor in states.items()})


def _follow(optimizer: Optimizer) -> None:
    if (sharding := sharding_of(optimizer)) is not None:
        sharding.follow()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that the optimizer updates."""
    if (sharding := sharding_of(optimizer)) is not None:
        whole = [shard.master for shard in sharding.engine.shards]
        # Each of those of divided shards has a state, and is a view of a whole one.
        return list(dict.fromkeys([*whole, *(part.master for part in sharding.shards)]))
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _move_state(optimizer: Optimizer, parameter: Tensor, device: torch.device) -> None:
    state = optimizer.state.get(parameter, {})
    # State of one number is read by the host, or counted on a device.
    for value in state.values():
        if isinstance(value, Tensor) and value.ndim:
            value.data = value.data.to(device)

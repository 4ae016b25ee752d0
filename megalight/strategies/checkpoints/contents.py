"""What a rank of a run holds: weights, masters and optimizer state, and what belongs to whole parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalight.checkpoint import Contents, State
from megalight.checkpoint.precision import MASTER
from megalight.parallel.data_parallel.buffers import Bucket
from megalight.parallel.source import Target, parameter_targets, shard_targets
from megalight.strategies.mesh_strategy import MeshStrategy

STATE = "optimizer."
"""Names of the optimizer's tensors begin with this, and go on with the state's own and the weight's."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


def contents(strategy: MeshStrategy, *, optimizer: bool) -> Contents:
    """What is to be saved.

    Parameters that are held as codes are shown by their masters, in the type that they have outside training. Frozen
    weights are left out where the module says so (``saves_base``).

    Args:
        optimizer: with masters that are copies, optimizer state, and what callbacks keep per shard.
    """
    tensors, coded = _weights(strategy)
    if not getattr(strategy.lightning_module, "saves_base", True):
        assert strategy.parallel_model is not None
        added = strategy.parallel_model.added
        tensors = {name: t for name, t in tensors.items() if strategy.specs[name].pieces[0].name in added}
    masters = [bucket.shard.master.detach().to(bucket.layout.kind.param_dtype) for bucket in coded]
    states = [State("", masters, [bucket.shard for bucket in coded])] if coded else []
    if optimizer:
        states += optimizer_states(strategy)
    return Contents(tensors, strategy.specs, strategy.mesh, states)


def weight_targets(strategy: MeshStrategy) -> list[Target]:
    """Where weights are read into: parameters and buffers, and the masters of what is held as codes."""
    tensors, coded = _weights(strategy)
    shards = [bucket.shard for bucket in coded]
    masters = [shard.master for shard in shards]
    return [*parameter_targets(tensors.items(), strategy.specs), *shard_targets(masters, shards)]


def _weights(strategy: MeshStrategy) -> tuple[dict[str, Tensor], list[Bucket]]:
    """The tensors that hold weights themselves, and the buckets whose parameters are codes."""
    assert strategy.parallel_model is not None
    coded = [] if strategy.engine is None else [bucket for bucket in strategy.engine.buckets if bucket.holds_codes]
    hidden = {info.name for bucket in coded for info in bucket.infos}
    tensors = strategy.parallel_model.tensors().items()
    return {name: tensor for name, tensor in tensors if name not in hidden}, coded


def optimizer_states(strategy: MeshStrategy) -> Iterator[State]:
    """Masters that are copies, element-wise optimizer states, and what callbacks keep per shard."""
    engine, optimizer = strategy.engine, strategy.optimizers[0]
    assert engine is not None
    shards = engine.shards
    copies = [bucket.shard for bucket in engine.buckets if not bucket.master_is_own_params]
    yield State(MASTER, [shard.master for shard in copies], copies)
    held = [(shard, optimizer.state[shard.master]) for shard in shards]
    for name in sorted({name for shard, state in held for name in state if _flat(state[name], shard.master)}):
        having = [(shard, state[name]) for shard, state in held if name in state]
        yield State(f"{STATE}{name}.", [tensor for _, tensor in having], [shard for shard, _ in having])
    for name, tensors in strategy.extra_shard_states.items():
        yield State(f"{name}.", tensors, shards)


def make_optimizer_state(strategy: MeshStrategy, groups: list[dict[str, Any]]) -> None:
    """Give the optimizer the options and counters that were saved, and room for its tensors."""
    optimizer, engine = strategy.optimizers[0], strategy.engine
    assert engine is not None
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved["options"])
    for shard in engine.shards:
        states, saved = optimizer.state[shard.master], groups[shard.group]
        for name, value in saved["scalars"].items():
            states[name] = value.clone() if isinstance(value, Tensor) else value
        for name, dtype in saved["tensors"].items():
            states[name] = torch.zeros_like(shard.master, dtype=DTYPES[dtype])


def group_options(strategy: MeshStrategy) -> dict[str, Any]:
    """What belongs to whole parameter groups: options (learning rate, ...), step counters, the names of states.

    Some pipeline stages have no parameter in a group: the first that has one speaks for it.
    """
    assert strategy.engine is not None
    optimizer = strategy.optimizers[0]
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name != "params"}
        shards = [shard for shard in strategy.engine.shards if shard.group == index]
        states = optimizer.state.get(shards[0].master, {}) if shards else {}
        flat = {name for name, value in states.items() if _flat(value, shards[0].master)}
        groups.append(
            {
                "options": options,
                "scalars": {name: value for name, value in states.items() if name not in flat},
                "tensors": {name: str(states[name].dtype) for name in sorted(flat)},
            }
        )
    pipeline = strategy.mesh.group("pp")
    if pipeline is not None:
        stages: list[Any] = [None] * pipeline.size()
        dist.all_gather_object(stages, groups, group=pipeline)
        groups = [
            next((g for g in same if g["tensors"] or g["scalars"]), same[0]) for same in zip(*stages, strict=True)
        ]
    return {"class": type(optimizer).__name__, "groups": groups}


def _flat(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape and value.ndim == 1

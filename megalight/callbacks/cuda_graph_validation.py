"""Reasons against recording CUDA graphs that are known before a run begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.attachments import overridden
from megalight.models.module import MegalightModule
from megalight.nn.moe import Dispatcher
from megalight.ops.parameter import cast_of
from megalight.parallel.mesh import uses_backend
from megalight.parallel.pipeline import schedules
from megalight.parallel.recompute import redrawing
from megalight.strategies.megatron import MegatronStrategy
from megalight.strategies.towers import MegatronTowersStrategy
from megalight.strategies.user_module import defines, defines_step, intercepted_log, is_ours

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def of_environment(on_gpu: bool) -> Iterator[str]:
    """Yield reasons in the environment of the process."""
    for name in ALLOCATOR:
        # The value may be spelled with spaces and capitals.
        if "expandable_segments:true" in "".join(os.environ.get(name, "").split()).lower():
            yield f"{name} switches expandable_segments on, whose memory may move; take it out"
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield "CUDA_LAUNCH_BLOCKING makes the host wait for every kernel; unset it"
    if torch.is_anomaly_enabled():
        yield "detect_anomaly reads every gradient on the host; switch it off"
    # A graph can hold work of the device only.
    if on_gpu and dist.is_initialized() and not uses_backend("nccl"):
        yield f"collectives run over {dist.get_backend()}, through the host; use nccl"


def of_backend(strategy: MegatronStrategy, backend: str) -> Iterator[str]:
    """Yield reasons in the backend that records parts: others than our own follow the schedule of one model."""
    if backend != "own" and isinstance(strategy, MegatronTowersStrategy):
        yield f"backend={backend!r} records one model, and {strategy.what} is a second one; use backend='own'"


def of_module(module: pl.LightningModule) -> Iterator[str]:
    """Yield reasons in the kind of module: whether it has Megalight's methods."""
    if not isinstance(module, MegalightModule) or defines_step(module, "training_step"):
        yield (
            f"{type(module).__name__} has a training_step of its own, which only scope='iteration' records; or write a "
            "MegalightModule with forward_step and loss_step"
        )


def of_recompute(chunks: Iterable[nn.Module]) -> Iterator[str]:
    """Yield reasons in recompute, which draws random numbers twice."""
    for chunk in chunks:
        for place in redrawing(chunk):
            yield (
                f"recompute of {place} draws dropout masks a second time, for which generators are put back on the "
                "host; leave it out of recompute, or set its dropout to 0"
            )


def of_sharding(
    strategy: MegatronStrategy, backend: str, lanes: Sequence[Sequence[tuple[str, nn.Module]]]
) -> Iterator[str]:
    """Yield reasons in sharded gradients and parameters, whose contents come and go by hooks of modules.

    Args:
        lanes: the parts of each chunk that are recorded; none: whole steps are.
    """
    if strategy.engine is None or (units := strategy.engine.units) is None:
        return
    level = f"data_parallel.level={strategy.data_parallel.level!r}"
    if not lanes or backend != "own":
        yield (
            f"{level} gathers and reduces units by hooks of modules, which a replay does not call; record between "
            "these hooks with scope='layer' and backend='own', or use level 'optim'"
        )
        return
    modules = {id(module) for module in units.modules}
    for name, part in (named for lane in lanes for named in lane):
        inside = next((child for child in part.modules() if child is not part and id(child) in modules), None)
        if inside is not None:
            yield (
                f"{level} gathers {type(inside).__name__} inside {name} by hooks, which a replay does not call; let "
                f"units be {type(part).__name__}"
            )
        if any(cast_of(parameter) is not None for parameter in part.parameters()):
            # That memory would be whole on every rank, and take what sharding saves.
            yield (
                f"{name} has weights that are cast to 8 or 4 bits into fixed memory, where graphs read them, and "
                f"{level} keeps no whole casts; use level 'optim'"
            )


def of_whole_steps(trainer: pl.Trainer, module: pl.LightningModule, strategy: MegatronStrategy) -> Iterator[str]:
    """Yield reasons against whole steps: code that runs between the beginning and the end of a step."""
    if isinstance(strategy, MegatronTowersStrategy) and strategy.placement == "disjoint":
        yield (
            f"{strategy.what} sends features, and its language model reads on the host, in the middle of a step, how "
            "many rows have arrived; record both models with scope='layer', or set placement='colocated'"
        )
    if strategy.layout.pipeline.schedule == "combined":
        yield "the schedule 'combined' runs forward and backward in turns, in two threads; choose another schedule"
    for owner in (*trainer.callbacks, module):  # type: ignore[attr-defined]
        if defines(owner, "on_before_backward"):
            yield f"{type(owner).__name__} defines on_before_backward, which a replay does not call"
    if getattr(module, "varying_carry", False) and strategy.mesh.pp > 1:
        yield f"{type(module).__name__}.varying_carry lets stages exchange shapes in the step, on the host"
    for chunk in strategy.chunks:
        yield from of_hooks(chunk.named_modules())
        yield from of_parameter_hooks(chunk.named_parameters())
        yield from of_dispatchers(chunk.named_modules())


def of_parts(strategy: MegatronStrategy, scope: str, lanes: Iterable[Iterable[tuple[str, nn.Module]]]) -> Iterator[str]:
    """Yield reasons against recording layers, or blocks in them, one by one."""
    if schedules.chosen(strategy.layout.pipeline.schedule, strategy.layout.virtual_pipeline) == "zero_bubble":
        yield f"zero-bubble schedules keep weight gradients back, which scope={scope!r} cannot; use scope='iteration'"
    if strategy.layout.pipeline.schedule == "combined":
        yield f"the schedule 'combined' runs forward and backward in turns, which scope={scope!r} cannot repeat"
    # That of the language model: ranks of a tower trade rows for heads, whose numbers they know.
    if strategy.layout.context_parallel > 1:
        yield f"context parallelism plans its exchange inside layers, on the host; use scope='iteration', not {scope!r}"
    if strategy.layout.recompute.granularity == "full":
        yield f"recompute of whole layers runs them twice for one backward, which scope={scope!r} cannot repeat"
    parts = [named for lane in lanes for named in lane]
    for name, module in parts:
        if "forward" in module.__dict__:
            yield f"{name} is recomputed as a whole; recompute modules inside it, or leave it out"
    yield from of_hooks_in(parts)
    for name, module in parts:
        yield from of_dispatchers(module.named_modules(prefix=name))


def of_dispatchers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield dispatchers that learn numbers of rows inside their package, where an inspection of the step sees no wait.

    Recorded, the message would not be sent, and the host would wait for its numbers until the package gives up.
    """
    for name, module in modules:
        if isinstance(module, Dispatcher) and not module.pads:
            yield (
                f"{name} ({type(module).__name__}) waits for numbers of rows; use scope='router', or "
                "dispatcher='all_to_all' with moe.capacity.pad"
            )


def of_hooks_in(parts: Sequence[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield hooks inside parts and on their parameters, which a replay skips. Hooks on a part itself still run."""
    # Hooks of the part itself run around its replay.
    for name, module in parts:
        yield from of_hooks((f"{name}.{part}", child) for part, child in module.named_modules() if part)
    yield from of_parameter_hooks(pair for name, module in parts for pair in module.named_parameters(name))


def of_hooks(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield hooks of other code on modules. A replay calls no hooks."""
    for name, module in modules:
        found = [
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
            *module._backward_hooks.values(),
            *module._backward_pre_hooks.values(),
        ]
        if not all(map(is_ours, found)):
            yield f"{name or 'the model'} ({type(module).__name__}) has a hook, which a replay does not call"


def of_parameter_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[str]:
    """Yield one reason for all hooks of other code on parameters. Hooks of the data-parallel engine can be recorded."""
    found = [
        name
        for name, parameter in parameters
        # Hooks of both kinds run in the backward of autograd, which a replay does not enter.
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if not all(map(is_ours, (hooks or {}).values()))
    ]
    names = list(dict.fromkeys(found))
    if names:
        others = f" (and {len(names) - 1} more)" if names[1:] else ""
        yield (
            f"parameter {names[0]}{others} has a hook, which a replay does not call; remove it: freeze by "
            "requires_grad_(False) before fit, and look at gradients in on_before_optimizer_step"
        )


COUNTERS = ("global_step", "current_epoch")
"""Attributes of the trainer that change from step to step."""

NEXT = "keep it in a buffer of the module, which on_train_batch_start writes"

INTERNAL = frozenset(vars(pl.LightningModule())) - {"training"}
"""Attributes of modules that are Lightning's or torch's."""

STAND_INS = frozenset({"training_step", "log"})
"""Methods that :func:`watched` sets on the module for one step."""

PLAIN = (bool, int, float, str, bytes)
"""Types whose values are compared, not their identity."""


@contextmanager
def watched(module: pl.LightningModule, reasons: list[str]) -> Iterator[None]:
    """Note in ``reasons`` what a replay would not do as the step inside does it.

    Inside this context the module has a second trainer, which shares all attributes of the first one.
    """
    found: list[str] = []
    own = defines_step(module, "training_step")
    trainer = module.trainer
    module.trainer = _second(trainer, found.append, own)
    before = _host_state(module) if own else {}
    stand_ins = _noted_step(module, found.append) if own else _noted_logs(module, found.append)
    try:
        with stand_ins:
            yield
    finally:
        module.trainer = trainer
        if own:
            found += _changes(before, _host_state(module))
        reasons += dict.fromkeys(found)


def _noted_logs(module: pl.LightningModule, note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Note what a module logs whose metrics are results of its step. What this step logs is not lost."""
    log = module.log

    def noted(name: str, value: Any, kwargs: dict[str, Any]) -> None:
        note(f"the step logs {name!r} by self.log; return it as one of loss_step's metrics")
        log(name, value, **kwargs)

    return intercepted_log(module, noted)


def _second(trainer: pl.Trainer, note: Callable[[str], None], all_reads: bool) -> pl.Trainer:
    """Return a trainer that shares all attributes with ``trainer``, and notes reads of its counters, or all reads."""
    kind = type(trainer)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in COUNTERS or (all_reads and not name.startswith("_")):
                note(f"the step reads {name}, and replays would repeat the value of this step; {NEXT}")
            return super().__getattribute__(name)

    Watched.__name__ = kind.__name__
    second: pl.Trainer = Watched.__new__(Watched)
    second.__dict__ = trainer.__dict__
    return second


class Index(int):
    """An integer that records its use."""

    note: Callable[[str], None]


def _telling(name: str) -> Any:
    def method(self: Index, *args: Any) -> Any:
        self.note(f"training_step computes with batch_idx, and replays would repeat the number of this step; {NEXT}")
        return getattr(int, name)(self, *args)

    return method


# Everything that reads the value in Python. What reads it in C (range) cannot be seen.
for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "index", "float", "hash", "str", "repr", "format"),
    *(f"{side}{name}" for side in ("", "r") for name in ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow")),
):
    setattr(Index, f"__{_name}__", _telling(f"__{_name}__"))


def _noted_step(module: pl.LightningModule, note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Let the module's own step be called with numbers that record their use, and note the numbers that it logs."""
    step = module.training_step

    def training_step(batch: Any, *others: Any) -> Any:
        given = [Index(other) if type(other) is int else other for other in others]
        for other in given:
            if isinstance(other, Index):
                other.note = note
        log = module.log

        def noted(name: str, value: Any, kwargs: dict[str, Any]) -> None:
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                note(f"the step logs {name!r}, of type {kind}, which replays would repeat; log a tensor on the device")
            log(name, value, **kwargs)

        with intercepted_log(module, noted):
            return step(batch, *given)

    return overridden(module, training_step=training_step)


def _host_state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return the attributes of all submodules that are not parameters, buffers or modules."""
    return {
        f"{name}.{key}".strip("."): _entry(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in INTERNAL
    }


def _entry(value: Any) -> tuple[Any, ...]:
    # A container may grow in place. The object itself is kept, so that its identity is not used again.
    return value, len(value) if isinstance(value, list | dict | set) else 0


def _changes(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> Iterator[str]:
    for name, (value, length) in after.items():
        old, old_length = before.get(name, (value, -1))
        equal = old == value if isinstance(value, PLAIN) and isinstance(old, PLAIN) else old is value
        if not equal or length != old_length:
            yield f"the step changes the attribute {name}, which a replay does not; keep it in a buffer"

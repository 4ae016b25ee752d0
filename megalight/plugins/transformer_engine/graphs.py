"""CUDA graphs of layers with TransformerEngine's ``make_graphed_callables``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalight.attachments import restore
from megalight.ops.autograd import once_differentiable
from megalight.ops.parameter import cast_of
from megalight.parallel.graphs.modules import Named, Parts
from megalight.parallel.graphs.static import recordable, tensors_of, with_tensors
from megalight.parallel.layers import check_own_forwards
from megalight.parallel.pipeline.p2p_communication import signature
from megalight.parallel.pipeline.schedules import ActionKind
from megalight.plugins.transformer_engine.kernels import PACKAGE, TORCH, why_not

CALL = f"{TORCH}:make_graphed_callables"
MINIMUM = "2.12"
WARM_UPS = 11
"""How often ``make_graphed_callables`` runs each module before it records."""


def graphs_why_not(device: str) -> str | None:
    """Return why the package cannot record graphs, or None."""
    return why_not(device, "make_graphed_callables", MINIMUM, TORCH, CALL)


class Flat(nn.Module):
    """A module that is called only with tensors, as ``make_graphed_callables`` needs it.

    It hides its parameters, because the recorded work adds their gradients to the engine's buffers, as an eager pass
    does. The package would also return these gradients to autograd, which would add and count them a second time.

    Attributes:
        calls: number of forward calls.
    """

    def __init__(self, module: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.module = module
        self.example = example
        self.calls = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return no parameters; see the class."""
        return iter(())

    def forward(self, *tensors: Tensor) -> Any:
        """Call the module like the example, but with these tensors."""
        self.calls += 1
        args, kwargs = with_tensors(self.example, iter(tensors))
        return type(self.module).forward(self.module, *args, **kwargs)


@dataclass
class ChunkModules:
    """The modules of one chunk.

    Attributes:
        samples: arguments in the last eager step, for each micro-batch and module.
        graphed: functions that replay the graphs, for each micro-batch and module.
        forms: signature of each module's arguments.
        arrivals: for each module, the gradients that its backward adds to the engine's buffers.
        at: index of the current micro-batch.
    """

    modules: list[Named]
    samples: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)
    graphed: list[list[Callable[..., Any]]] = field(default_factory=list)
    forms: list[Any] = field(default_factory=list)
    arrivals: list[list[tuple[int, int]]] = field(default_factory=list)
    at: int = -1


class TransformerEngineGraphs:
    """Replaces the forwards of modules, as :class:`~megalight.parallel.graphs.modules.ModuleGraphs` does.

    After ``warmup_steps`` steps it records all modules together, in the order of the schedule.

    Attributes:
        replays: number of replayed forwards.

    Raises:
        ConfigurationError: the forward of a module was set on the instance.
        MissingPackageError: the package cannot be imported. Raised at the recording.
    """

    def __init__(self, parts: Parts) -> None:
        self.engine = engine = parts.engine
        self.schedule = parts.schedule
        self.rehearsal = parts.rehearsal
        self.generators = parts.generators
        self.warmup_steps = parts.warmup_steps
        self.refuse = parts.refuse
        self.replays = 0
        check_own_forwards((named for lane in parts.lanes for named in lane), "a graph")
        self._lanes = [ChunkModules(list(modules)) for modules in parts.lanes]
        self._steps = 0
        self._count = 0
        self._recorded = 0
        self._off = False
        modules = [module for lane in self._lanes for _, module in lane.modules]
        # A replay always adds: the recording must not contain a first write, which would
        # erase what came before.
        engine.main_gradients.only_add(p for module in modules for p in module.parameters())
        for lane in self._lanes:
            for place, (_, module) in enumerate(lane.modules):
                module.forward = partial(self._forward, lane, place)

    def begin_step(self, micro_batches: int) -> None:
        """Begin a step of ``micro_batches`` micro-batches."""
        self._steps += 1
        self._count = micro_batches
        for lane in self._lanes:
            lane.at = -1
            # Samples of the last eager step, as memory and forms have settled by then.
            if self._steps == self.warmup_steps:
                lane.samples = [[] for _ in range(micro_batches)]
        if self._steps > self.warmup_steps and not self._recorded and not self._off:
            if self.generators():
                self._give_up("TransformerEngine registers its own random generators alone; use backend='own'")
            elif len(self._lanes[0].samples) != micro_batches:
                self._give_up("the number of micro-batches changes")
            else:
                self._record()  # it waits for the device, so it must run before any wait for other ranks' messages

    def close(self) -> None:
        """Restore the forwards of the modules, and release the graphs."""
        for lane in self._lanes:
            lane.samples, lane.graphed = [], []
            for _, module in lane.modules:
                restore(module, "forward")
                for parameter in module.parameters():
                    if (cast := cast_of(parameter)) is not None:
                        cast.release()

    def _forward(self, lane: ChunkModules, place: int, *args: Any, **kwargs: Any) -> Any:
        name, module = lane.modules[place]
        plain = partial(type(module).forward, module)
        if not torch.is_grad_enabled() or not module.training or self._off:
            return plain(*args, **kwargs)
        # The first module of a chunk begins the next micro-batch.
        lane.at += place == 0
        if self._steps <= self.warmup_steps:
            if self._steps == self.warmup_steps:
                self._note(lane, name, args, kwargs)
            return plain(*args, **kwargs)
        form = signature((args, kwargs))
        # Another number of micro-batches would need other graphs: each micro-batch has its own.
        if self._count != self._recorded or form != lane.forms[place]:
            self._give_up(f"{name} is called with another form of arguments, or number of micro-batches")
            return plain(*args, **kwargs)
        self.replays += 1
        # Outside of the graph, because the gather waits for other ranks.
        self._prepare([module])
        return lane.graphed[lane.at][place](*self._marked(tensors_of((args, kwargs)), lane.arrivals[place]))

    def _prepare(self, modules: Sequence[nn.Module]) -> None:
        """Gather the parameters and cast the weights, because graphs read both at fixed addresses."""
        for module in modules:
            parameters = list(module.parameters())
            self.engine.sync_parameters(self.engine.parameters.gatherer.buckets_of(parameters))
            for parameter in parameters:
                if (cast := cast_of(parameter)) is not None:
                    cast.refresh(parameter)

    def _note(self, lane: ChunkModules, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if (why := recordable(value)) is not None:
                self._give_up(f"{name} is called with {why}")
                return
        # Copies: the tensors of the step are freed, and the samples must have the same
        # addresses for the recording.
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_of((args, kwargs))]
        lane.samples[lane.at].append(with_tensors((args, kwargs), iter(copies)))

    def _record(self) -> None:
        """Record all modules for all micro-batches. Then restore gradients and random states, which the runs change."""
        make = PACKAGE.load(CALL)
        actions = self.schedule(self._count)
        # the package's form of a schedule: chunk + 1 for a forward, the negative for a backward
        order = [a.chunk + 1 if a.kind is ActionKind.FORWARD else -a.chunk - 1 for a in actions]
        flat = [[Flat(m, lane.samples[0][i]) for i, (_, m) in enumerate(lane.modules)] for lane in self._lanes]
        samples = [tuple(tensors_of(sample)) for lane in self._lanes for batch in lane.samples for sample in batch]
        # Warm-up runs and the recording add to these buffers, in the middle of a run.
        kept = [bucket.grads.clone() for bucket in self.engine.buckets]
        devices = [self.engine.device] if self.engine.device.type == "cuda" else []
        with self.rehearsal(), self.engine.main_gradients.noting() as seen, torch.random.fork_rng(devices):
            self._prepare([module for lane in self._lanes for _, module in lane.modules])
            made = make(
                tuple(module for lane in flat for module in lane),
                tuple(samples),
                num_warmup_iters=WARM_UPS,
                allow_unused_input=True,
                _order=order,
                _num_layers_per_chunk=[len(lane.modules) for lane in self._lanes],
            )
        # The gradients of the run so far, as if nothing had happened.
        for bucket, gradients in zip(self.engine.buckets, kept, strict=True):
            bucket.grads.copy_(gradients)
        found, first = Counter(seen), 0
        places_of = self.engine.main_gradients.places_of
        for lane, modules in zip(self._lanes, flat, strict=True):
            size = len(modules)
            lane.graphed = [list(made[first + i * size : first + (i + 1) * size]) for i in range(self._count)]
            first += self._count * size
            lane.forms = [signature(module.example) for module in modules]
            lane.arrivals = [
                # The runs have noted every arrival; divided by the number of calls, that is how many one backward
                # brings.
                [place for place in places_of(m.module.parameters()) for _ in range(round(found[place] / m.calls))]
                for m in modules
            ]
            lane.samples = []
        self._recorded = self._count

    def _marked(self, tensors: list[Tensor], arrivals: list[tuple[int, int]]) -> list[Tensor]:
        """Mark an input of a module. Its backward tells the engine which gradients the module's backward has added."""
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensors[place] = _Arrived.apply(tensor, self, arrivals)  # type: ignore[no-untyped-call]
                break
        return tensors

    def _give_up(self, reason: str) -> None:
        self._off = True
        self.refuse(reason)


class _Arrived(torch.autograd.Function):
    """The identity on an input of a module. Its backward runs after the backward of the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graphs: TransformerEngineGraphs, arrivals: Sequence[tuple[int, int]]) -> Tensor:
        ctx.graphs, ctx.arrivals = graphs, arrivals
        # A view: autograd needs another tensor than its input.
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.graphs.engine.main_gradients.arrive(ctx.arrivals)
        return gradient, None, None

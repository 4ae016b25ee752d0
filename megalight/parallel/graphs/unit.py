"""Graphs of one module for one micro-batch in flight: one of its forward and one of its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalight.errors import MegalightError
from megalight.ops.common import once_differentiable
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.graphs.arguments import Argument, Constant, Held, Leaf
from megalight.parallel.graphs.recorder import Recorder, Recording
from megalight.parallel.graphs.static import tensors_of, with_tensors


class Unit:
    """A module's forward and backward, recorded from one call and replayed, strictly in turn, for all later calls.

    Recorded work adds parameters' gradients to the engine's buffers, and the engine is notified after each replay. The
    gradient of a chained input is written directly to the memory where the previous unit reads it.

    Args:
        name: for messages.
        function: the module's own forward.
        arguments: static memory for its arguments, with the names of keyword arguments.
        previous: the unit whose outputs are this one's inputs; None: the inputs come from elsewhere.
        copies: return copies of the outputs, because the caller may keep or change them.
        done: called after the backward.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[tuple[str | None, Argument]],
        engine: DataParallelEngine,
        previous: Unit | None,
        copies: bool,
        done: Callable[[], None],
    ) -> None:
        self.name = name
        self.function = function
        self.arguments = list(arguments)
        self.engine = engine
        self.previous = previous
        self.copies = copies
        self.done = done
        self.forwarded = False
        self.leaves = [argument.tensor for _, argument in self.arguments if isinstance(argument, Leaf)]
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.arrivals: list[tuple[int, int]] = []
        self._structure: Any = None
        self._forward: Recording[Any] | None = None
        self._backward: Recording[list[Tensor | None]] | None = None
        # Autograd runs the backward even if no input of the first module requires a gradient (token ids).
        self._anchor = torch.empty(0, requires_grad=True)

    def record(self, recorder: Recorder, generators: Sequence[torch.Generator], pool: Any) -> None:
        """Record both graphs in the middle of a step, while messages of other ranks may be in flight.

        Raises:
            MegalightError: no output has a gradient.
        """
        # Forward before backward, in one pool: the backward reads activations that the forward's graph keeps alive.
        self._forward = recorder.record(self._call, generators, pool, settle=False)
        self._structure = self._forward.result
        self.outputs = tensors_of(self._structure)
        if not any(output.requires_grad for output in self.outputs):
            raise MegalightError(f"{self.name} must return at least one tensor that needs a gradient")
        self.gradients = [torch.empty_like(output) for output in self._differentiable]
        self._backward = recorder.record(self._differentiate, generators, pool, settle=False)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has the form of the recorded one."""
        values = [(None, value) for value in args] + list(kwargs.items())
        return [name for name, _ in values] == [name for name, _ in self.arguments] and all(
            argument.fits(value) for (_, argument), (_, value) in zip(self.arguments, values, strict=True)
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the forward for this call, and return the module's output."""
        values = [*args, *kwargs.values()]
        for (_, argument), value in zip(self.arguments, values, strict=True):
            argument.fill(value)
        inputs = [v for (_, a), v in zip(self.arguments, values, strict=True) if isinstance(a, Leaf)]
        outputs = _Replay.apply(self, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        return with_tensors(self._structure, iter(outputs))

    def drop(self) -> None:
        """Free the graphs, results first."""
        self.outputs, self.gradients, self.leaves, self.previous, self._structure = [], [], [], None, None
        for recording in (self._backward, self._forward):
            if recording is not None:
                recording.drop()
        self._backward = self._forward = None

    def _call(self) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, argument in self.arguments:
            value = argument.tensor if isinstance(argument, Leaf) else argument.value
            if name is None:
                args.append(value)
            else:
                kwargs[name] = value
        with torch.enable_grad():
            return self.function(*args, **kwargs)

    def _differentiate(self) -> list[Tensor | None]:
        with self.engine.main_gradients.noting() as self.arrivals:
            # Replays read the activations that the forward saved, so autograd must not free them.
            torch.autograd.backward(self._differentiable, self.gradients, retain_graph=True)
        found = [leaf.grad for leaf in self.leaves]
        if self.previous is None:
            return found
        # Inside the graph: the replay leaves gradients where the previous unit's backward reads them, without a launch
        # of its own.
        with torch.no_grad():
            for target, gradient in zip(self.previous.gradients, found, strict=True):
                assert gradient is not None
                target.copy_(gradient)
        for leaf in self.leaves:  # copied, so the graphs' pool can reuse the memory
            leaf.grad = None
        return list(self.previous.gradients)

    @property
    def _differentiable(self) -> list[Tensor]:
        """The outputs with gradients. A router returns indices of experts, too."""
        return [output for output in self.outputs if output.requires_grad]

    def replay_forward(self) -> tuple[Tensor, ...]:
        """Replay the forward, and return the module's outputs."""
        assert self._forward is not None
        self.forwarded = True
        self._forward.replay()
        return tuple(output.detach().clone() if self.copies else output.detach() for output in self.outputs)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the backward: gradients of the outputs -> gradients of the leaves."""
        if not self.forwarded:
            raise MegalightError(
                f"the backward of {self.name} ran twice for one forward, or after another micro-batch took its memory; "
                "a layer that is recorded as a CUDA graph has one backward per forward."
            )
        assert self._backward is not None
        self.forwarded = False
        arrived = [g for g, output in zip(gradients, self.outputs, strict=True) if output.requires_grad]
        for target, gradient in zip(self.gradients, arrived, strict=True):
            if gradient.data_ptr() != target.data_ptr():
                target.copy_(gradient, non_blocking=True)
        self._backward.replay()
        found = self._backward.result
        if self.previous is None:  # autograd may keep these gradients, and the next replay would overwrite them
            found = [None if gradient is None else gradient.clone() for gradient in found]
        else:
            found = [None if gradient is None else gradient.detach() for gradient in found]
        # After the replay is queued: the engine may start to reduce a bucket, in stream order behind this work.
        self.engine.main_gradients.arrive(self.arrivals)
        self.done()
        return found


class _Replay(torch.autograd.Function):
    """Runs a unit as one autograd operation."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        outputs = unit.replay_forward()
        ctx.mark_non_differentiable(*(x for x, own in zip(outputs, unit.outputs, strict=True) if not own.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found = ctx.unit.replay_backward(gradients)
        return None, None, *(g if need else None for g, need in zip(found, ctx.needs_input_grad[2:], strict=True))


def follows(previous: Unit | None, values: Sequence[Any]) -> bool:
    """Whether the arguments that need gradients are exactly the outputs of the unit that ran just before."""
    inputs = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return (
        previous is not None
        and len(inputs) == len(previous.outputs)
        and all(
            (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)
            for x, y in zip(inputs, previous.outputs, strict=True)
        )
    )


def argument_for(value: Any, chained: bool, held: list[Held]) -> Argument:
    """Return static memory for one argument of the call that is recorded.

    Args:
        chained: arguments that need gradients are outputs of the previous unit, so its memory is used.
        held: arguments held by units of the same pass. One may hold the value already; otherwise a new one is added.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        memory = value.detach() if chained else value.detach().clone()
        return Leaf(memory.requires_grad_())
    if not tensors_of(value):
        return Constant(value)
    for each in held:
        if each.holds(value):
            return each
    held.append(Held(value))
    return held[-1]

"""One module for one micro-batch in flight: a graph of its forward and one of its backward."""

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
    """Recorded from one call, and replayed for all that follow: forward and backward strictly in turn.

    Gradients of parameters land where recorded work adds them, in the engine's buffers; that they arrived, the engine
    is told after each replay. The gradient of a chained input is written straight to where the previous unit reads it.

    Args:
        name: for messages.
        function: the module's own forward.
        arguments: static memory for its arguments, and their names where they have some.
        previous: the unit whose outputs are this one's inputs; None: others made them.
        copies: outputs are handed out as copies: what becomes of them is not known.
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
        self._anchor = torch.empty(0, requires_grad=True)

    def record(self, recorder: Recorder, generators: Sequence[torch.Generator], pool: Any) -> None:
        """Record both, in the midst of a step: messages of other ranks may be awaited.

        Raises:
            MegalightError: an output has no gradient.
        """
        self._forward = recorder.record(self._call, generators, pool, settle=False)
        self._structure = self._forward.result
        self.outputs = tensors_of(self._structure)
        if not self.outputs or not all(output.requires_grad for output in self.outputs):
            raise MegalightError(f"{self.name} returns tensors without gradients beside others, or none")
        self.gradients = [torch.empty_like(output) for output in self.outputs]
        self._backward = recorder.record(self._differentiate, generators, pool, settle=False)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is like the recorded one."""
        values = [(None, value) for value in args] + list(kwargs.items())
        return [name for name, _ in values] == [name for name, _ in self.arguments] and all(
            argument.fits(value) for (_, argument), (_, value) in zip(self.arguments, values, strict=True)
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for this call, by replay."""
        values = [*args, *kwargs.values()]
        for (_, argument), value in zip(self.arguments, values, strict=True):
            argument.fill(value)
        inputs = [v for (_, a), v in zip(self.arguments, values, strict=True) if isinstance(a, Leaf)]
        outputs = _Replay.apply(self, self._anchor, *inputs)  # type: ignore[no-untyped-call]
        return with_tensors(self._structure, iter(outputs))

    def drop(self) -> None:
        """Give the graphs up."""
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
            # What the forward keeps must stay where it is, for the replays; autograd would let go of it.
            torch.autograd.backward(self.outputs, self.gradients, retain_graph=True)
        found = [leaf.grad for leaf in self.leaves]
        if self.previous is None:
            return found
        with torch.no_grad():
            for target, gradient in zip(self.previous.gradients, found, strict=True):
                assert gradient is not None
                target.copy_(gradient)
        for leaf in self.leaves:
            leaf.grad = None
        return list(self.previous.gradients)

    def replay_forward(self) -> tuple[Tensor, ...]:
        """What the module puts out."""
        assert self._forward is not None
        self.forwarded = True
        self._forward.replay()
        return tuple(output.detach().clone() if self.copies else output.detach() for output in self.outputs)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the leaves from those of the outputs."""
        if not self.forwarded:
            raise MegalightError(
                f"the backward of {self.name} ran twice for one forward, or after its memory went to another "
                "micro-batch; layers recorded as CUDA graphs can be differentiated once."
            )
        assert self._backward is not None
        self.forwarded = False
        for target, gradient in zip(self.gradients, gradients, strict=True):
            if gradient.data_ptr() != target.data_ptr():
                target.copy_(gradient, non_blocking=True)
        self._backward.replay()
        found = self._backward.result
        if self.previous is None:  # whoever gets them may keep them
            found = [None if gradient is None else gradient.clone() for gradient in found]
        else:
            found = [None if gradient is None else gradient.detach() for gradient in found]
        self.engine.main_gradients.arrive(self.arrivals)
        self.done()
        return found


class _Replay(torch.autograd.Function):
    """A unit's place among other operations."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return unit.replay_forward()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found = ctx.unit.replay_backward(gradients)
        return None, None, *(g if need else None for g, need in zip(found, ctx.needs_input_grad[2:], strict=True))


def follows(previous: Unit | None, values: Sequence[Any]) -> bool:
    """Whether the arguments that want gradients are the outputs of the unit that ran just before, as they are."""
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
    """Static memory for one argument of the call that is recorded.

    Args:
        chained: it is the output of the unit before, if it wants a gradient.
        held: of other units of the same pass, of which one may hold the value already; a new one is added.
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

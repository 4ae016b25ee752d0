"""Run a schedule: this rank's actions in order, while messages to and from neighbors are in flight."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalight.errors import ConfigurationError
from megalight.ops.linear import WeightGradients, deferring
from megalight.parallel import trace
from megalight.parallel.collectives import Message
from megalight.parallel.data_parallel.unit_memory import UnitPass
from megalight.parallel.data_parallel.unshard import Units
from megalight.parallel.interleaved_passes import PassInterleaver
from megalight.parallel.layers import layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline.layout import PipelineLayout, Stage
from megalight.parallel.pipeline.p2p_communication import (
    Carry,
    Channel,
    Form,
    Forms,
    P2PCommunicator,
    ReceiveQueue,
    decode,
    encode,
    form_of,
    signature,
)
from megalight.parallel.pipeline.schedules import Action, ActionKind, Actions, Messages
from megalight.parallel.pipeline.timeline import RankSchedule
from megalight.types import Loss

ForwardStep: TypeAlias = Callable[[nn.Module, Any, Carry | None], Carry]
LossStep: TypeAlias = Callable[[Carry, Any], Loss]
Objective: TypeAlias = Callable[[Loss], Tensor]


@dataclass
class InFlight:
    """One micro-batch inside one chunk, from its forward until the end of its backward.

    The output is not kept after it is sent: the backward only needs its edge in the autograd graph.

    Attributes:
        inputs: tensors from the previous stage: leaves that accumulate gradients.
        outputs: edges in the autograd graph of the outputs that need gradients.
        form: names, shapes and dtypes of those outputs.
        loss: only on the last stage.
        weights: weight gradients that are still to be computed.
    """

    inputs: Carry
    outputs: list[GradientEdge] = field(default_factory=list)
    form: Form = ()
    loss: Loss | None = None
    weights: WeightGradients | None = None


class ScheduleExecutor(Protocol):
    """Runs the schedule of a step: :class:`Executor`, or what runs another model before and after it."""

    def prepare(self, micro_batches: Sequence[Any]) -> Hashable:
        """Prepare a run of these micro-batches; all ranks call it together. Graphs of steps are kept by the result."""
        ...

    def train(
        self,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        loss_step: LossStep,
        objective: Objective,
        units: Units | None = None,
    ) -> list[Loss]:
        """Run forward and backward of every micro-batch; return the losses on the last stage, else nothing."""
        ...

    def forward(
        self,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        units: Units | None = None,
    ) -> list[Carry]:
        """Run forward passes without gradients; return the carries on the last stage, else nothing."""
        ...


class Executor:
    """Runs micro-batches through the chunks of this rank, in the order of a schedule.

    Args:
        chunks: the parts of the model on this rank, in model order.
        layout: all stages; a single one for a model that is not cut.
        device: device of the chunks.
        varying: carries may change form between micro-batches of equal form, so a header precedes every message.
        messages: how messages travel between stages.

    Attributes:
        peak: largest number of micro-batches (of any chunk) in flight at once in the last step.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layout: PipelineLayout,
        mesh: ParallelMesh,
        device: torch.device,
        varying: bool = False,
        messages: Messages = "auto",
    ) -> None:
        self.chunks = list(chunks)
        self.layout = layout
        self.stages = layout.of_rank(mesh.rank("pp"))
        self.device = device
        self.varying = varying
        # With several chunks per rank, the last rank's output is the input of the first rank's next chunk.
        self.edges = P2PCommunicator.between(mesh, layout.vpp > 1, messages)
        # They outlive a step, and both ends of a channel must keep the same forms.
        self.coming, self.going = Forms(), Forms()
        self.turns = PassInterleaver(device)
        self.peak = 0

    def prepare(self, micro_batches: Sequence[Any]) -> Hashable:
        """Return what the passes of these micro-batches depend on beside them: nothing."""
        return ()

    def train(
        self,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        loss_step: LossStep,
        objective: Objective,
        units: Units | None = None,
    ) -> list[Loss]:
        """Run forward and backward of every micro-batch.

        Args:
            schedule: this rank's part of a schedule for this number of micro-batches.
            objective: loss of a micro-batch -> the scalar to differentiate.
            units: modules whose parameters come and go. They are told which pass comes next.

        Returns:
            on the last stage the detached losses, ordered by micro-batch; elsewhere nothing.
        """
        run = _Run(self, schedule, micro_batches, forward_step, loss_step, objective, units)
        run.play()
        self.peak = run.peak
        return [run.losses[index] for index in sorted(run.losses)]

    def forward(
        self,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        units: Units | None = None,
    ) -> list[Carry]:
        """Run forward passes without gradients; return the last chunk's carries on the last stage, else nothing."""
        with torch.no_grad():
            run = _Run(self, schedule, micro_batches, forward_step, units=units)
            run.play()
        return [run.carries[index] for index in sorted(run.carries)]


class _Run:
    """One run of a schedule."""

    def __init__(
        self,
        executor: Executor,
        schedule: RankSchedule,
        micro_batches: Sequence[Any],
        forward_step: ForwardStep,
        loss_step: LossStep | None = None,
        objective: Objective | None = None,
        units: Units | None = None,
    ) -> None:
        self.executor = executor
        self.units = units
        self.actions, self.slots = schedule.actions, schedule.slots
        self.micro_batches = micro_batches
        self.forward_step = forward_step
        self.loss_step = loss_step
        self.objective = objective
        # A single stage gets no messages.
        known = not executor.varying and len(executor.layout.stages) > 1
        self.signatures = [signature(batch) if known else None for batch in micro_batches]
        self.flights: dict[tuple[int, int], InFlight] = {}
        self.losses: dict[int, Loss] = {}
        self.carries: dict[int, Carry] = {}
        self.sent: dict[tuple[ActionKind | None, int, int], Message] = {}
        self.kept_back: list[tuple[tuple[ActionKind, int, int], Channel, list[Tensor]]] | None = None
        self.peak = 0
        edges, device = executor.edges, executor.device
        self.activations = ReceiveQueue(edges.activations_in, schedule.activations, self._incoming, device)
        self.gradients = ReceiveQueue(edges.gradients_in, schedule.gradients, self._returning, device)

    def play(self) -> None:
        self.executor.edges.prepare(self.slots)
        coming = passes_of(self.actions)
        for number, action in enumerate(self.actions):
            if self.units is not None:
                coming = coming[len(passes_of([action])) :]
                self.units.follow(self.executor.chunks, coming)
            with self._named(action):
                # Receives are posted early, so that messages travel during computation.
                self.gradients.post(number)
                self.activations.post(number)
                # Messages that have arrived give their memory back now, and not at the end of the step.
                self.sent = {place: message for place, message in self.sent.items() if not message.done()}
            if action.overlapped is None:
                self._do(action)
            else:
                self._together(action, action.overlapped)
            # a pair ends one flight and begins another, and meanwhile both are there
            self.peak = max(self.peak, len(self.flights) + len(action.parts) - 1)
        # Buffers of sent messages must not be freed or reused before the neighbors have them.
        for message in self.sent.values():
            message.wait()
        del self.activations, self.gradients  # they refer to this run: without the cycle its memory is freed at once

    def _do(self, action: Action) -> None:
        work = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRADIENT: self._input_gradient,
            ActionKind.WEIGHT_GRADIENT: self._weight_gradient,
        }
        span = trace.span(action.kind.name.lower(), chunk=action.chunk, micro_batch=action.micro_batch)
        with self._named(action), span:
            work[action.kind](action.chunk, action.micro_batch)

    def _together(self, backward: Action, forward: Action) -> None:
        """Run a backward and a forward in turns. Weight gradients wait for the messages of the backward."""
        flight = self.flights[backward.chunk, backward.micro_batch]
        weights = flight.weights = WeightGradients()

        def both_gradients() -> None:
            for kind in (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT):
                self._do(backward._replace(kind=kind, overlapped=None))

        # The backward begins: it computes with what is here, and the forward hides its first message.
        self.kept_back = []
        self.executor.turns.play(partial(self._do, forward), both_gradients, weights.run)
        kept_back, self.kept_back = self.kept_back, None
        for place, channel, tensors in kept_back:
            self._send(place, channel, tensors)

    def _forward(self, chunk: int, index: int) -> None:
        stage, batch = self.executor.stages[chunk], self.micro_batches[index]
        inputs = None if self._first(stage) else self._received(chunk, index)
        outputs = self.forward_step(self.executor.chunks[chunk], batch, inputs)
        outputs = check_carry(outputs, str(stage))
        flight = InFlight(inputs or {})
        if self._last(stage):
            if self.loss_step is None:
                self.carries[index] = outputs
            else:
                flight.loss = self.loss_step(outputs, batch)
                # Detached: the caller keeps the losses of all micro-batches, and their graphs
                # must be freed one by one.
                self.losses[index] = flight.loss.detach()
        else:
            form = form_of(outputs)
            # The form goes first: the receiver makes its buffers from it.
            self._announce(stage, index, form)
            self._send((ActionKind.FORWARD, chunk, index), self.executor.edges.activations_out, list(outputs.values()))
            flight.form = tuple(entry for entry in form if entry.requires_grad)
            # An edge keeps the graph alive, but not the output itself, whose memory the message alone still needs.
            flight.outputs = [get_gradient_edge(outputs[entry.name]) for entry in flight.form]
        # Without gradients nothing comes back, so there is nothing to remember.
        if torch.is_grad_enabled():
            self.flights[chunk, index] = flight

    def _send(self, place: tuple[ActionKind, int, int], channel: Channel | None, tensors: list[Tensor]) -> None:
        """Start to send; at the end of a pair, if one runs.

        Until a neighbor receives, a message occupies the device. The neighbor may be inside a pair as well, and the
        host must not wait for an idle device before that ends (see :mod:`.timeline`).
        """
        assert channel is not None
        if self.kept_back is not None:
            self.kept_back.append((place, channel, tensors))
        else:
            self.sent[place] = channel.send(tensors)

    def _received(self, chunk: int, index: int) -> Carry:
        form, tensors = self.activations.take()
        # These tensors are leaves, so that `.grad` is what goes back to the previous stage.
        return {e.name: tensor.requires_grad_(e.requires_grad) for e, tensor in zip(form, tensors, strict=True)}

    def _backward(self, chunk: int, index: int) -> None:
        # Out of the dict first: the activations are freed even if the backward fails.
        self._differentiate(chunk, index, self.flights.pop((chunk, index)))

    def _input_gradient(self, chunk: int, index: int) -> None:
        flight = self.flights[chunk, index]
        if flight.weights is None:
            flight.weights = WeightGradients()
        with deferring(flight.weights):  # weight gradients wait in a queue for a later action
            self._differentiate(chunk, index, flight)

    def _weight_gradient(self, chunk: int, index: int) -> None:
        weights = self.flights.pop((chunk, index)).weights
        assert weights is not None
        weights.run()

    def _differentiate(self, chunk: int, index: int, flight: InFlight) -> None:
        stage = self.executor.stages[chunk]
        if flight.loss is not None:
            assert self.objective is not None
            torch.autograd.backward(self.objective(flight.loss))
        else:
            _, gradients = self.gradients.take()
            if gradients and (sent := self.sent.pop((ActionKind.FORWARD, chunk, index), None)):
                # It has arrived, since its gradient is here; gloo reports this only in a wait.
                sent.wait()
            # There are none if no output needs one. The previous stage then gets zeros.
            if gradients:
                torch.autograd.backward(flight.outputs, gradients)
        wanted = [tensor for tensor in flight.inputs.values() if tensor.requires_grad]
        if not self._first(stage):
            # The previous stage expects a gradient of every input, also of one that this stage did not use.
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
            self._send((ActionKind.INPUT_GRADIENT, chunk, index), self.executor.edges.gradients_out, found)
        # With deferred weight gradients the flight lives on, so free what only this action needed.
        flight.inputs, flight.outputs, flight.loss = {}, [], None

    # ------------------------------------------------------------------ forms of messages

    def _key(self, stage_index: int, micro_batch: int) -> Hashable | None:
        """Return the key under which the form of the carry into a stage is cached; None: it is not cached."""
        seen = self.signatures[micro_batch]
        # Whether gradients are on belongs to the key, because a form says which tensors need them.
        return None if seen is None else (stage_index, seen, torch.is_grad_enabled())

    def _incoming(self, chunk: int, index: int) -> Form:
        """Return the form of incoming activations: the cached one, or the one from the header of :meth:`_announce`."""
        assert self.executor.edges.activations_in is not None
        key = self._key(self.executor.stages[chunk].index, index)
        form = self.executor.coming.get(key)
        if form is None:
            form = decode(self.executor.edges.activations_in.receive_text())
            self.executor.coming.put(key, form)
        return form

    def _returning(self, chunk: int, index: int) -> Form:
        """Return the form of incoming gradients, which is that of the sent activations."""
        return self.flights[chunk, index].form

    def _announce(self, stage: Stage, index: int, form: Form) -> None:
        """Send the next stage the form of the coming message, unless it knows it."""
        # The key names the receiving stage, as it does on the other end.
        key = self._key(stage.index + 1, index)
        known = self.executor.going.get(key)
        if known is None:
            assert self.executor.edges.activations_out is not None
            self.sent[None, stage.index, index] = self.executor.edges.activations_out.send_text(encode(form))
            self.executor.going.put(key, form)
        elif known != form:
            raise ConfigurationError(
                f"forward_step returned ({', '.join(map(str, form))}) on stage {stage.index} and earlier, for a "
                f"micro-batch of the same form, ({', '.join(map(str, known))}). Let the carry's names, shapes "
                "and gradients follow from the micro-batch, or set varying_carry = True on the module: stages then ask "
                "every time."
            )

    # ------------------------------------------------------------------ small things

    def _first(self, stage: Stage) -> bool:
        return stage.index == 0

    def _last(self, stage: Stage) -> bool:
        return stage.index == len(self.executor.layout.stages) - 1

    @contextmanager
    def _named(self, action: Action) -> Iterator[None]:
        """Add a note to an error that tells where in the schedule it occurred."""
        try:
            yield
        except Exception as error:
            stage = self.executor.stages[action.chunk]
            layer = layer_of(error, self.executor.chunks[action.chunk])
            error.add_note(
                f"(pipeline: {action.kind.name.lower().replace('_', ' ')} of micro-batch {action.micro_batch}"
                f"{'' if layer is None else f' in layers.{layer}'} on {stage} of {len(self.executor.layout.stages)}, "
                f"pipeline rank {stage.rank})"
            )
            raise


def check_carry(carry: Any, where: str) -> Carry:
    """Check that a carry is a dict of tensors by name, and return it.

    Raises:
        TypeError: it is not.
    """
    step = "it must return a dict of tensors (hidden states for the next chunk, or what loss_step reads)."
    if not isinstance(carry, dict):
        raise TypeError(f"forward_step returned {type(carry).__name__} on {where}; {step}")
    for name, value in carry.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"forward_step returned {name!r}: {type(value).__name__} on {where}; {step}")
    return carry


def passes_of(actions: Actions) -> list[UnitPass]:
    """Return the passes of actions that read parameters: all but delayed weight gradients."""
    parts = (part for action in actions for part in action.parts)
    return [
        UnitPass(part.chunk, part.kind is ActionKind.FORWARD)
        for part in parts
        if part.kind is not ActionKind.WEIGHT_GRADIENT
    ]


def layer_of(error: Exception, chunk: nn.Module) -> int | None:
    """Return the global index of the layer in whose forward an error occurred, or None."""
    # A traceback goes from the outermost call inwards, so the first layer in it is one of the model's own.
    names = {id(layer): index for index, layer in layers_of(chunk).items()}
    called = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((names[id(module)] for module in called if id(module) in names), None)

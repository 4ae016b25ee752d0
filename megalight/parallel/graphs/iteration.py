"""A whole training step as one graph: forward passes, backward passes and reductions of all micro-batches."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.graphs.fingerprint import Fingerprint, Inspection, Operation, format_changing
from megalight.parallel.graphs.recorder import Recorder, Recording
from megalight.parallel.graphs.static import StaticInputs, clone
from megalight.parallel.peers.spin import check_all
from megalight.parallel.pipeline.p2p_communication import signature

log = logging.getLogger(__name__)

REMEMBERED = 16
"""Largest number of forms of steps that are counted at a time before they are recorded."""


class StepMode(IntEnum):
    """How to run a step."""

    EAGER = 0
    REPLAY = 1
    RECORD = 2


@dataclass
class StepForm:
    """Steps that differ only in the values of their tensors.

    Attributes:
        inputs: static memory for the micro-batches.
        seen: number of steps of this form so far.
        recording: the recorded step; None: not recorded yet.
        external: tensors that the recording reads and that must be kept alive.
        numbers: Python numbers in the operations of the step before the last eager one.
        gradients: where the recording leaves the reduced gradients; None: it reduces none.
    """

    inputs: StaticInputs
    seen: int = 0
    recording: Recording[Any] | None = None
    external: list[Tensor] = field(default_factory=list)
    numbers: list[Operation] = field(default_factory=list)
    gradients: list[Tensor] | None = None


class IterationGraphs:
    """Runs the passes of training steps: eagerly at first, then from one graph per form of step.

    A form is recorded after ``warmup_steps`` steps of it; the last two of them are inspected. Before each step the
    ranks agree on the host whether all of them replay. A collective must not be in a graph on one rank and outside on
    another.

    Attributes:
        replays: number of steps that were replayed.

    Args:
        recorder: records and replays.
        engine: reduces gradients.
        device: device of the passes.
        agree: host values of all ranks -> the largest of each.
        fingerprint: fingerprint of the model; a recording is valid only for the one under which it was made.
        generators: random generators that the passes use besides the default ones.
        warmup_steps: at least 2.
        max_graphs: largest number of forms that are recorded.
        refuse: called with the reason why steps run eagerly; may raise.
        looking: a context around the inspected step; gets the list of reasons.
        tell: called when it changes whether steps are recorded, on all ranks before the same step. Layers may then
            work in another way.

    Attributes:
        off: whether all later steps run eagerly.
    """

    def __init__(
        self,
        recorder: Recorder,
        engine: DataParallelEngine,
        device: torch.device,
        agree: Callable[[list[int]], list[int]],
        fingerprint: Fingerprint,
        generators: Callable[[], Sequence[torch.Generator]],
        *,
        warmup_steps: int,
        max_graphs: int,
        refuse: Callable[[str], None],
        looking: Callable[[list[str]], AbstractContextManager[None]] = lambda reasons: nullcontext(),
        tell: Callable[[bool], None] = lambda recorded: None,
    ) -> None:
        self.recorder = recorder
        self.engine = engine
        self.device = device
        self.agree = agree
        self.fingerprint = fingerprint
        self.generators = generators
        self.warmup_steps = warmup_steps
        self.max_graphs = max_graphs
        self.refuse = refuse
        self.looking = looking
        self.tell = tell
        self.replays = 0
        self._refused = False  # on this rank
        self.off = False  # on all ranks
        self._recorded = False  # what `tell` was told
        self._varied = False
        self._forms: OrderedDict[Hashable, StepForm] = OrderedDict()

    @property
    def graphs(self) -> int:
        """Number of recorded steps."""
        return sum(form.recording is not None for form in self._forms.values())

    def __call__(self, key: Hashable, micro_batches: Sequence[Any], passes: Callable[[Sequence[Any]], Any]) -> Any:
        """Run the step, and return the result of ``passes`` in memory that no replay overwrites.

        Raises:
            MegalightError: a wait for a peer in an earlier replay has ended without it.
        """
        check_all()  # replays run no Python that would
        if self.off:
            return passes(micro_batches)
        passes = self._noted(passes)
        form = None if self._refused else self._form(key, micro_batches)
        way = self._agreed(form)
        if form is None or (way is StepMode.EAGER and form.recording is not None):
            return passes(micro_batches)
        form.seen += 1
        # Eager warm-up steps also read the static inputs, so that the inspection sees what a recording will read.
        form.inputs.fill(list(micro_batches))
        if way is StepMode.EAGER:
            self.engine.sync_parameters()  # what waits for parameters is no operation of the step
            looked = form.seen in (self.warmup_steps - 1, self.warmup_steps)
            return self._look_through(form, passes) if looked else passes(form.inputs.value)
        if not self._record_all(form, passes, way):
            return passes(form.inputs.value)
        assert form.recording is not None
        self.engine.parameters.gatherer.replay()
        form.recording.replay()
        self.replays += 1
        # No hook of autograd has run, so the engine is told what the graph has done.
        self.engine.main_gradients.adopt(form.gradients)
        return clone(form.recording.result)

    def _noted(self, passes: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        """Return ``passes``, which also tell what attributes they change themselves."""

        def run(micro_batches: Sequence[Any]) -> Any:
            with self.fingerprint.attributes.running():
                return passes(micro_batches)

        return run

    def drop(self) -> None:
        """Free all graphs."""
        for form in self._forms.values():
            if form.recording is not None:
                # Before the graph: they are views of its pool.
                form.gradients = None
                form.recording.drop()
        self._forms.clear()

    def prepare(self, recorded: bool = True) -> None:
        """Let layers work as in recorded steps, or as in others, before the same step on all ranks."""
        if recorded != self._recorded:
            self._recorded = recorded
            self.tell(recorded)

    def close(self) -> None:
        """Free all graphs, and run all later steps eagerly, before the same step on all ranks."""
        self.off = True
        self.drop()
        self.prepare(False)

    # ------------------------------------------------------------------ which way

    def _form(self, key: Hashable, micro_batches: Sequence[Any]) -> StepForm | None:
        seen = signature(list(micro_batches))
        if seen is None:
            self._refuse(
                f"a batch of type {type(micro_batches[0]).__name__} holds objects whose contents cannot be "
                "inspected; use tensors, numbers, strings, dicts, tuples, lists and dataclasses"
            )
            return None
        # `first`: a step that overwrites main gradients and one that adds to them are different work.
        full = key, seen, self.engine.main_gradients.first, self.fingerprint()
        form = self._forms.get(full)
        if form is None:
            if self.graphs >= self.max_graphs:
                if not self._varied:
                    self._varied = True
                    changed = self.fingerprint.attributes.changed
                    self.refuse(
                        f"{'steps' if changed else 'batches'} have more than max_graphs={self.max_graphs} forms; only "
                        "the first ones are recorded" + (f"; {format_changing(changed)}" if changed else "")
                    )
                return None
            if len(self._forms) - self.graphs >= REMEMBERED:
                self._forget_oldest()
            form = self._forms[full] = StepForm(StaticInputs(list(micro_batches)))
        return form

    def _forget_oldest(self) -> None:
        oldest = next(key for key, form in self._forms.items() if form.recording is None)
        counts = self.fingerprint.attributes.changed
        changed = [name for name, count in counts.items() if count > REMEMBERED // 2]
        if (changed or not self.graphs) and not self._varied:
            self._varied = True
            self.refuse(
                format_changing(changed)
                if changed
                else f"the last {REMEMBERED} batches had different forms; give batches one shape (drop_last=True, rows "
                "of one length, no document_lengths)"
            )
        del self._forms[oldest]

    def _agreed(self, form: StepForm | None) -> StepMode:
        wish = StepMode.EAGER
        if form is not None and form.seen >= self.warmup_steps:
            wish = StepMode.RECORD if form.recording is None else StepMode.REPLAY
        # All ranks must run a step the same way. One reduction gives the largest wish, the smallest one (as the
        # largest of the negated wishes) and whether any rank has refused.
        largest, least, refused = self.agree([wish, -wish, int(self._refused)])
        if refused:
            self.close()
            if not self._refused:
                self.refuse("another rank cannot record its steps")
        return StepMode.EAGER if refused or least == 0 else StepMode(largest)

    # ------------------------------------------------------------------ the ways

    def _look_through(self, form: StepForm, passes: Callable[[Sequence[Any]], Any]) -> Any:
        """Run a step eagerly, and check whether it can be recorded: two steps, to see what changes between them."""
        with Inspection(self.device, form.numbers) as inspection, self.looking(inspection.reasons):
            result = passes(form.inputs.value)
        form.numbers = inspection.numbers
        if form.seen < self.warmup_steps:
            return result  # it may do what is done once
        form.numbers = []
        form.external = list(inspection.external.values())
        if signature(result) is None:
            inspection.note("returns objects whose contents cannot be inspected", None)
        if inspection.reasons:
            self._refuse("; ".join(inspection.reasons))
        return result

    def _record_all(self, form: StepForm, passes: Callable[[Sequence[Any]], Any], way: StepMode) -> bool:
        """Record on this rank if needed; return False if any rank failed, and then no rank has run anything."""
        if way is StepMode.REPLAY:
            return True
        problem, gradients = None, self.engine.main_gradients
        first = gradients.first
        if form.recording is None:
            log.info("recording a CUDA graph of the training step (form %d)", self.graphs + 1)
            try:
                # Nothing runs while it is recorded. So the ranks may agree afterwards, and replay only if all have
                # succeeded.
                form.recording = self.recorder.record(lambda: self._waiting(form, passes), self.generators())
                form.gradients = gradients.values if gradients.reduced else None
            except Exception as error:
                # The capture has marked gradients as written, but no kernel has run.
                gradients.give_up(first)
                problem = error
        if self.agree([int(problem is not None)]) == [0]:
            return True
        gradients.give_up(first)
        self.close()
        told = "recording failed on another rank"
        if problem is not None:
            told = f"recording failed: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        self.refuse(told)
        return False

    def _waiting(self, form: StepForm, passes: Callable[[Sequence[Any]], Any]) -> Any:
        with self.engine.parameters.gatherer.recording():
            return passes(form.inputs.value)

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self.drop()
        self.refuse(reason)

"""Training steps as CUDA graphs: recorded once, launched by one call from then on."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from megalight.callbacks import graph_reasons
from megalight.errors import ConfigurationError
from megalight.parallel.graphs.fingerprint import Fingerprint
from megalight.parallel.graphs.iteration import IterationGraphs
from megalight.parallel.graphs.recorder import CUDARecorder, Recorder
from megalight.parallel.random import RandomStreams
from megalight.parallel.tensor.dropout import streams_of
from megalight.strategies.megatron import MegatronStrategy
from megalight.strategies.step import Outcome, Passes, run_passes

log = logging.getLogger(__name__)

CHOICES = {
    "scope": ("iteration",),
    "on_refusal": ("eager", "error"),
}


class CUDAGraph(pl.Callback):
    """Records the passes of a training step as a CUDA graph and replays it: for models whose steps wait for launches.

    Recorded is all from the batch on the device to reduced gradients: every micro-batch, pipeline messages, and the
    reduction over data-parallel ranks. Clipping and the optimizer stay outside, evaluation runs as ever. A step is
    replayed only where everything that a graph takes for granted is as it was recorded: shapes, types, host values in
    the batch, the number of micro-batches, modes of modules and places of tensors; any other step runs eagerly.

    Args:
        scope: ``iteration``: the whole step.
        warmup_steps: eager steps of a form before it is recorded, at least 2. The last is looked through for what
            cannot be recorded.
        max_graphs: forms of steps (shapes, numbers of micro-batches) that are recorded at most.
        on_refusal: what to do where a run or a step cannot be recorded: ``eager``: say why, and run it eagerly;
            ``error``: raise.

    Attributes:
        recorder: what records; None: CUDA graphs.
        reasons: why something runs eagerly, in the order in which it was found.

    Raises:
        ConfigurationError: an argument that does not exist; in ``fit``, another strategy than ``MegatronStrategy``;
            with ``on_refusal="error"``, whatever cannot be recorded.
    """

    def __init__(
        self,
        scope: Literal["iteration"] = "iteration",
        warmup_steps: int = 3,
        max_graphs: int = 4,
        on_refusal: Literal["eager", "error"] = "eager",
    ) -> None:
        for name, value in {"scope": scope, "on_refusal": on_refusal}.items():
            if value not in CHOICES[name]:
                raise ConfigurationError(f"{name} is {value!r}; choose one of {', '.join(CHOICES[name])}.")
        if warmup_steps < 2 or max_graphs < 1:
            raise ConfigurationError(
                f"warmup_steps={warmup_steps}, max_graphs={max_graphs}: the first must be at least 2 (one step "
                "prepares what is prepared once, one is looked through), the second at least 1."
            )
        self.scope = scope
        self.warmup_steps = warmup_steps
        self.max_graphs = max_graphs
        self.on_refusal = on_refusal
        self.recorder: Recorder | None = None
        self.reasons: list[str] = []
        self._recorder: Recorder | None = None
        self._graphs: IterationGraphs | None = None
        self._streams: list[RandomStreams] = []

    @property
    def replays(self) -> int:
        """Steps that were replayed in the current or last run."""
        return 0 if self._graphs is None else self._graphs.replays

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the stream for everything, before parameters are prepared."""
        if stage != "fit":
            return
        strategy = _strategy(trainer)
        self._end(trainer)
        self.reasons, self._graphs = [], None
        if self.recorder is None and strategy.root_device.type != "cuda":
            self._refuse(f"there are no CUDA graphs on {strategy.root_device.type}")
            return
        self._recorder = self.recorder or CUDARecorder(strategy.root_device)
        self._recorder.enter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what cannot be, or take the steps over."""
        if self._recorder is None:
            return
        strategy = _strategy(trainer)
        reasons = [
            *graph_reasons.of_environment(strategy.root_device.type == "cuda"),
            *graph_reasons.of_run(trainer, pl_module, strategy),
        ]
        if reasons:
            self._refuse("; ".join(dict.fromkeys(reasons)))
            return
        assert strategy.engine is not None
        found = [streams for chunk in strategy.chunks for streams in streams_of(chunk)]
        self._streams = list({id(streams): streams for streams in found}.values())
        for streams in self._streams:
            streams.persist(strategy.root_device)
        self._graphs = IterationGraphs(
            self._recorder,
            strategy.engine,
            strategy.root_device,
            Agreement(strategy),
            Fingerprint(strategy.chunks),
            lambda: [*(g for s in self._streams for g in s.persistent.values()), *strategy.precision.generators],
            warmup_steps=self.warmup_steps,
            max_graphs=self.max_graphs,
            refuse=self._refuse,
            looking=lambda reasons: _logging_noticed(pl_module, reasons),
        )
        graphs = self._graphs

        def run(key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Outcome:
            for streams in self._streams:
                streams.begin()
            for chunk in strategy.chunks:
                chunk.training = pl_module.training  # as the step will set it: a stage is not among the children
            done: Outcome = graphs(key, micro_batches, passes)
            return done

        strategy.run_steps_by(run)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the graphs up while the communicators they know are there."""
        self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same."""
        try:
            self._end(trainer)
        except RuntimeError as error:  # the device may be gone: what it died of is being told
            log.warning("CUDA graphs could not be given up: %s", error)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Where training never began."""
        self._end(trainer)

    def _refuse(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.on_refusal == "error":
            raise ConfigurationError(
                f"CUDAGraph cannot record: {reason}. Or let such steps run eagerly: CUDAGraph(on_refusal='eager')."
            )
        log.warning("CUDAGraph: steps run eagerly: %s.", reason)

    def _end(self, trainer: pl.Trainer) -> None:
        strategy = _strategy(trainer)
        if self._graphs is not None:
            strategy.run_steps_by(run_passes)
            self._graphs.drop()
        for streams in self._streams:
            streams.forget()
        self._streams = []
        if self._recorder is not None:
            self._recorder.leave()
            self._recorder = None


class Agreement:
    """The largest of every rank's host values, element by element."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        self.strategy = strategy

    def __call__(self, values: list[int]) -> list[int]:
        """The same on every rank."""
        if self.strategy.world_size == 1:
            return values
        found = torch.tensor(values)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.strategy.host_group())
        return [int(value) for value in found]


@contextmanager
def _logging_noticed(module: pl.LightningModule, reasons: list[str]) -> Iterator[None]:
    """Note whether the module's steps log, which replays would not do."""

    def noted(name: Any, *args: Any, **kwargs: Any) -> None:
        reasons.append(f"the step logs {name!r} by self.log; return it as one of loss_step's metrics")

    module.log = module.log_dict = noted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del module.log, module.log_dict


def _strategy(trainer: pl.Trainer) -> MegatronStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        raise ConfigurationError(
            f"CUDAGraph records the steps of MegatronStrategy, not of {type(strategy).__name__}; use "
            "Trainer(strategy=MegatronStrategy(...))."
        )
    return strategy

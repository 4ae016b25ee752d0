"""Training steps as CUDA graphs: recorded once, then launched with one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from megalight.callbacks import cuda_graph_validation
from megalight.callbacks.cuda_graph_validation import INTERNAL, STAND_INS, watched
from megalight.errors import ConfigurationError
from megalight.nn.moe import MoE
from megalight.parallel.graphs.fingerprint import Fingerprint
from megalight.parallel.graphs.iteration import IterationGraphs
from megalight.parallel.graphs.modules import GRAPH_BACKENDS, ModuleGraphs, Named, PartGraphs, Parts
from megalight.parallel.graphs.recorder import CUDARecorder, Recorder
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.random import RandomStreams
from megalight.parallel.shared_state import gains_by_recording, steps_recorded, streams_of
from megalight.parallel.step import Passes, StepRunner, run_passes
from megalight.strategies.megatron import MegatronStrategy
from megalight.strategies.micro_batches import DeviceMemory, Usage
from megalight.strategies.towers import MegatronTowersStrategy

SETTLING = 3
"""First steps of a way to run that are not timed: they load kernels, allocate, or record."""
TIMED = 5
"""Number of steps of each way whose median counts."""
PATIENCE = 50
"""Steps of the second way after which the trial ends even if too few were replayed."""
LAUNCHES = 0.8
"""Share of a step that launches take at least, if launches limit it."""
GAIN = 0.97
"""Largest time of a replayed step, as a share of an eager one, for which recording is worth its memory."""


@dataclass(frozen=True)
class StepReading:
    """One measured step.

    Attributes:
        launched: seconds until the host had launched everything.
        done: seconds until the device had finished.
        memory: memory of the step.
    """

    launched: float
    done: float
    memory: Usage


class Probe(Protocol):
    """Measures a step."""

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, StepReading]:
        """Return the result of ``run``, and the reading."""


class DeviceProbe:
    """Measures on a GPU. It waits for the device before and after, so only a few steps are measured."""

    def __init__(self, device: torch.device, mesh: ParallelMesh) -> None:
        self.device = device
        self.memory = DeviceMemory(device, mesh)

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, StepReading]:
        """Return the result of ``run``, and the reading."""
        # Work of earlier steps must not count.
        torch.cuda.synchronize(self.device)
        end = self.memory.measure(0)
        begun = time.perf_counter()
        result = run()
        launched = time.perf_counter()
        torch.cuda.synchronize(self.device)
        done = time.perf_counter()
        return result, StepReading(launched - begun, done - begun, end())


class Trial:
    """Runs steps eagerly, then from graphs, measures both, and stays with the faster way.

    Graphs are tried only if launches limit the eager steps, or layers hide more in recorded ones, and if the device has
    room for a second set of activations. All ranks decide by the same figures.

    Attributes:
        verdict: the decision, in words. None: it is still open.

    Args:
        graphs: records and replays.
        probe: measures steps.
        agree: integers of all ranks -> the largest of each.
        tell: called with the verdict.
        gains: whether layers hide more communication in recorded steps; all ranks ask together.
    """

    def __init__(
        self,
        graphs: IterationGraphs,
        probe: Probe,
        agree: Callable[[list[int]], list[int]],
        tell: Callable[[str], None],
        gains: Callable[[], bool],
    ) -> None:
        self.graphs = graphs
        self.probe = probe
        self.agree = agree
        self.tell = tell
        self.gains = gains
        self.verdict: str | None = None
        self._kind: Hashable = None
        self._steps = 0
        self._eager: dict[Hashable, list[StepReading]] = {}
        self._replayed: list[StepReading] = []
        self._trying = False

    def __call__(self, key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
        """Run a step."""
        if self.graphs.off:
            if self.verdict is None:
                self._end("they cannot be recorded")
            return passes(micro_batches)
        if self.verdict is not None:
            return self.graphs(key, micro_batches, passes)
        self._steps += 1
        if self._trying:
            return self._replay(key, micro_batches, passes)
        if self._steps <= SETTLING:
            return passes(micro_batches)
        result, reading = self.probe(lambda: passes(micro_batches))
        # Steps that only accumulate gradients are of another kind than those that reduce them.
        readings = self._eager.setdefault(key, [])
        readings.append(reading)
        if len(readings) == TIMED:
            self._kind = key
            self._look(readings)
        return result

    def _look(self, readings: list[StepReading]) -> None:
        """Decide whether to try graphs."""
        launched, done = self._agreed(readings)
        gains = self.agree([int(self.gains())]) == [1]
        usage = readings[-1].memory
        needed = usage.peak - usage.before
        if launched < LAUNCHES * done and not gains:
            self._end(f"the device is busy, launches take {launched * 1e3:.1f} of {done * 1e3:.1f} ms")
        # The graph keeps its activations, and evaluation needs as much again at most.
        elif usage.peak + needed > usage.limit:
            free = (usage.limit - usage.peak) / 2**30
            self._end(f"a graph would keep {needed / 2**30:.1f} GiB, and {free:.1f} GiB are free")
        else:
            self._trying, self._steps = True, 0
            self.graphs.prepare()

    def _replay(self, key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
        before = self.graphs.replays
        result, reading = self.probe(lambda: self.graphs(key, micro_batches, passes))
        # Replays are the same on all ranks, unlike recordings: a rank may have recorded this form before.
        if self.graphs.replays > before and key == self._kind:
            self._replayed.append(reading)
        if len(self._replayed) == SETTLING + TIMED:
            self._compare()
        elif self._steps == PATIENCE and not self.graphs.off:
            self._end(f"only {len(self._replayed)} of {PATIENCE} steps had a form that was seen before")
        return result

    def _compare(self) -> None:
        _, eager = self._agreed(self._eager[self._kind])
        _, replayed = self._agreed(self._replayed[SETTLING:])
        told = f"{replayed * 1e3:.1f} ms for forward and backward, {eager * 1e3:.1f} ms without"
        if replayed > GAIN * eager:
            self._end(told)
            return
        self.verdict = told
        self.tell(f"steps are replayed from CUDA graphs: {told}")

    def _agreed(self, readings: list[StepReading]) -> tuple[float, float]:
        """Return the medians of the slowest rank."""
        own = [median(reading.launched for reading in readings), median(reading.done for reading in readings)]
        launched, done = self.agree([round(1e9 * seconds) for seconds in own])
        return launched / 1e9, done / 1e9

    def _end(self, why: str) -> None:
        self.verdict = why
        self.graphs.close()
        self.tell(f"steps run without CUDA graphs: {why}")


log = logging.getLogger(__name__)


def roots_of(strategy: MegatronStrategy) -> list[nn.Module]:
    """Return the parts of the model on this rank that run by themselves: its chunks, and a colocated tower."""
    model = strategy.parallel_model
    return [*strategy.chunks, *(() if model is None or model.grafted is None else (model.grafted.root,))]


def lanes_of(strategy: MegatronStrategy, scope: str, towers: bool) -> list[list[Named]]:
    """Return the modules of each chunk, and then those of a tower, in the order in which they run.

    Args:
        towers: whether towers are recorded, too. They are no part of the schedule of chunks.

    Raises:
        ConfigurationError: as :func:`parts_of`.
    """
    chunks, roots = strategy.chunks, roots_of(strategy)
    lanes = [parts_of(chunk, scope) for chunk in chunks]
    # A colocated tower is in the tree of the first chunk, too, where it does not run.
    holders = roots[len(chunks) :] or chunks
    return lanes + [found for root in holders if towers and (found := tower_parts_of(root, scope))]


def parts_of(chunk: nn.Module, scope: str) -> list[Named]:
    """Return the layers of a chunk, or their attention (and routers, with scope ``router``), by name and in order.

    Raises:
        ConfigurationError: the chunk has no layers, or they have no attention.
    """
    if tower_layers_of(chunk) and not hasattr(chunk, "layers"):  # a disjoint tower
        return []
    by_index = layers_of(chunk, f"CUDAGraph(scope={scope!r})")
    layers = [(f"layers.{index}", layer) for index, layer in by_index.items()] + list(depth_layers_of(chunk).items())
    return [part for name, layer in layers for part in _parts(name, layer, scope)]


def tower_parts_of(chunk: nn.Module, scope: str) -> list[Named]:
    """Return the same of the vision tower in a chunk; nothing without a tower, or if these parts are recomputed whole.

    Parts without a gradient are left out: frozen layers before the first that is trained.
    """
    layers = tower_layers_of(chunk)
    if not layers:
        return []
    tower = chunk.get_submodule("embed.tower")
    behind = "layers.", "output_norm."
    differs = any(p.requires_grad for name, p in tower.named_parameters() if not name.startswith(behind))
    found = list[Named]()
    for name, layer in layers.items():
        found += [part for part in _parts(name, layer, scope) if differs or _trained(part[1])]
        differs = differs or _trained(layer)
    if any("forward" in module.__dict__ for module in (*layers.values(), *(module for _, module in found))):
        log.info("the vision tower is not recorded with scope=%r, as such parts of it are recomputed whole", scope)
        return []
    return found


def _parts(name: str, layer: nn.Module, scope: str) -> Iterator[Named]:
    if scope == "layer":
        yield name, layer
        return
    if not isinstance(getattr(layer, "attention", None), nn.Module):
        raise ConfigurationError(
            f"{name} ({type(layer).__name__}) has no module `attention`; give it that name, or use scope='layer'"
        )
    yield f"{name}.attention", layer.attention  # type: ignore[misc]
    if scope == "router" and isinstance(mlp := getattr(layer, "mlp", None), MoE):
        yield f"{name}.mlp.router", mlp.router


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


SCOPES = ("iteration", "layer", "attention", "router", "auto")
WHOLE = ("iteration", "auto")
"""Scopes that record whole steps."""
MAX_GRAPHS = 4


class CUDAGraph(pl.Callback):
    """Records training steps or layers as CUDA graphs and replays them. Use it if kernel launches limit the speed.

    ``scope="iteration"`` records everything from the batch on the device to the reduced gradients: all micro-batches,
    pipeline messages, and the reduction over data-parallel ranks. A step is replayed only if nothing has changed that
    the graph depends on: shapes, dtypes, host values in the batch, the number of micro-batches, modes of modules and
    addresses of tensors. Other steps run eagerly.

    ``scope="layer"`` and ``"attention"`` record forward and backward of each layer or of its attention, once for each
    micro-batch in flight. ``"router"`` also records the routers of layers with experts, whose shapes do not depend on
    the routes. Layers of a vision tower are recorded likewise, also in a layout of its own. The rest runs eagerly:
    embedding, head, loss, and bucket by bucket the reduction of gradients and the gathering of parameters.

    ``scope="auto"`` measures in the first steps whether replaying whole steps (``iteration``) is faster, and runs
    eagerly otherwise. Steps are tried as graphs if there is memory for a second set of activations, and one of these
    holds: the host needs most of a step to launch kernels, or split layers hide more of their communication when a
    graph launches it. The log shows the decision and both times. With ``micro_batch_size="auto"``, it waits until the
    number is found. It does nothing without a GPU, with other strategies than ``MegatronStrategy``, under full
    sharding, where steps cannot be recorded, and beside a ``CUDAGraph`` of another scope or an ``ActivationOffload``.

    Clipping, the optimizer and evaluation are not recorded.

    Args:
        scope: ``iteration``, ``layer``, ``attention``, ``router`` or ``auto``.
        warmup_steps: number of eager steps before recording, at least 2; for whole steps, of each form of steps. The
            last of them is checked for operations that cannot be recorded.
        max_graphs: for whole steps: maximum number of recorded forms of steps (shapes, numbers of micro-batches).
            None: 4.
        backend: for ``layer`` and ``attention``: ``own``, or one that a plugin registered. ``transformer_engine`` calls
            its ``make_graphed_callables``, with static memory for every micro-batch.
        on_refusal: what to do if a run or a step cannot be recorded. ``eager``: log the reason and run it eagerly.
            ``error``: raise, which ``auto`` never does.

    Attributes:
        recorder: object that records. None means CUDA graphs.
        reasons: reasons why steps run eagerly, in the order in which they were found.
        probe: for ``auto``: object that measures steps. None means the GPU.
        trial: for ``auto``: the measurement of the current or last run.

    Raises:
        ConfigurationError: an argument has an unknown value; in ``fit``, the strategy is not ``MegatronStrategy``; with
            ``on_refusal="error"``, something cannot be recorded.
    """

    def __init__(
        self,
        scope: Literal["iteration", "layer", "attention", "router", "auto"] = "iteration",
        warmup_steps: int = 3,
        max_graphs: int | None = None,
        backend: str = "own",
        on_refusal: Literal["eager", "error"] = "eager",
    ) -> None:
        for name, value, choices in (
            ("scope", scope, SCOPES),
            ("backend", backend, GRAPH_BACKENDS),
            ("on_refusal", on_refusal, ("eager", "error")),
        ):
            if value not in choices:
                raise ConfigurationError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")
        if warmup_steps < 2 or (max_graphs is not None and max_graphs < 1):
            raise ConfigurationError(
                f"warmup_steps={warmup_steps}, max_graphs={max_graphs}: the first must be at least 2 (one step "
                "prepares what is prepared once, one is looked through), the second at least 1."
            )
        if max_graphs is not None and scope not in WHOLE:
            raise ConfigurationError(
                f"max_graphs={max_graphs} limits the forms of steps, and scope={scope!r} records modules; leave it "
                "out, or choose scope='iteration'."
            )
        if scope == "auto" and on_refusal == "error":
            raise ConfigurationError(
                "scope='auto' runs eagerly what cannot be recorded; leave on_refusal='error' out, or choose another "
                "scope."
            )
        if backend != "own" and scope in (*WHOLE, "router"):
            raise ConfigurationError(
                f"backend={backend!r} records layers and attention, not scope={scope!r}; choose scope='layer' or "
                "'attention', or backend='own'."
            )
        self.scope = scope
        self.needs_shards = scope != "auto"  # without shards, `auto` does nothing
        self.backend = backend
        self.warmup_steps = warmup_steps
        self.max_graphs = MAX_GRAPHS if max_graphs is None else max_graphs
        self.on_refusal = on_refusal
        self.recorder: Recorder | None = None
        self.reasons: list[str] = []
        self.probe: Probe | None = None
        self.trial: Trial | None = None
        self._recorder: Recorder | None = None
        self._graphs: IterationGraphs | PartGraphs | None = None
        self._streams: list[RandomStreams] = []
        self._evaluating = ExitStack()
        self._level = logging.WARNING

    @property
    def replays(self) -> int:
        """Number of steps, or of forwards of layers, that were replayed in the current or last run."""
        return 0 if self._graphs is None else self._graphs.replays

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Enter the stream for recording before parameters are prepared, so that everything uses it."""
        if stage != "fit" or (self.scope == "auto" and not self._tries(trainer)):
            return
        strategy = _strategy(trainer)
        self._end(trainer)
        self.reasons, self._graphs = [], None
        loud = trainer.is_global_zero and self.scope != "auto"
        self._level = logging.WARNING if loud else logging.INFO
        # Tests record with a recorder of their own, on any device.
        if self.recorder is None and strategy.root_device.type != "cuda":
            self._refuse(f"there are no CUDA graphs on {strategy.root_device.type}")
            return
        self._recorder = self.recorder or CUDARecorder(strategy.root_device)
        # Now, because parameters, gradients and communicators belong to the stream on
        # which they are first used.
        self._recorder.enter()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refuse or take over the steps. It acts before the first step, when other callbacks have added their hooks."""
        # Once per run: callbacks whose hooks matter have all run `on_train_start` by now.
        if self._recorder is None or self._graphs is not None or self.reasons:
            return
        strategy = _strategy(trainer)
        # Without an engine, the optimizer needs whole parameters, and Lightning runs the backward. With
        # micro_batch_size="auto", the trial begins when the number is known.
        sizes = strategy.micro_batches
        if self.scope == "auto" and (strategy.engine is None or sizes is None or not sizes.found):
            return
        reasons, lanes = self._look_ahead(trainer, pl_module, strategy)
        if strategy.any_rank(bool(reasons)):  # all ranks must decide alike, because they communicate in every step
            self._refuse("; ".join(dict.fromkeys(reasons)) or "another rank cannot record its steps")
            return
        # replays use the generators that were recorded, so each stream keeps one generator for the run
        found = [streams for root in roots_of(strategy) for streams in streams_of(root)]
        self._streams = list({id(streams): streams for streams in found}.values())
        for streams in self._streams:
            streams.persist(strategy.root_device)
        assert strategy.engine is not None
        whole = self.scope in WHOLE
        strategy.run_steps_by(self._whole_steps(strategy, pl_module) if whole else self._parts(strategy, lanes))

    def _look_ahead(
        self, trainer: pl.Trainer, module: pl.LightningModule, strategy: MegatronStrategy
    ) -> tuple[list[str], list[list[Named]]]:
        """Return the reasons why this rank cannot record, and the modules of each chunk to record."""
        on_gpu = strategy.root_device.type == "cuda"
        reasons = [
            *cuda_graph_validation.of_environment(on_gpu),
            *cuda_graph_validation.of_recompute(roots_of(strategy)),
        ]
        if (missing := GRAPH_BACKENDS[self.backend].why_not(strategy.root_device.type)) is not None:
            reasons.append(missing)
        if self.scope in WHOLE:
            reasons += cuda_graph_validation.of_sharding(strategy, self.backend, [])
            return [*reasons, *cuda_graph_validation.of_whole_steps(trainer, module, strategy)], []
        reasons += [*cuda_graph_validation.of_module(module), *cuda_graph_validation.of_backend(strategy, self.backend)]
        try:
            lanes = lanes_of(strategy, self.scope, towers=self.backend == "own")
        except ConfigurationError as error:
            return [*reasons, str(error)], []
        reasons += cuda_graph_validation.of_sharding(strategy, self.backend, lanes)
        return [*reasons, *cuda_graph_validation.of_parts(strategy, self.scope, lanes)], lanes

    def _whole_steps(self, strategy: MegatronStrategy, module: pl.LightningModule) -> StepRunner:
        assert self._recorder is not None and strategy.engine is not None
        graphs = self._graphs = IterationGraphs(
            self._recorder,
            strategy.engine,
            strategy.root_device,
            strategy.largest,
            Fingerprint(
                ((f"chunks.{i}" if i else "", chunk) for i, chunk in enumerate(roots_of(strategy))),
                # Its loss_step runs in the step, too.
                [(type(module).__name__, module)],
                INTERNAL | STAND_INS,
            ),
            lambda: self._generators(strategy),
            warmup_steps=self.warmup_steps,
            max_graphs=self.max_graphs,
            refuse=self._refuse,
            looking=lambda reasons: watched(module, reasons),
            tell=partial(_tell_layers, strategy),
        )
        runner = self._runner(graphs, strategy)

        def run(key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
            # Seeded outside of the graph. Inside, generators only advance.
            for streams in self._streams:
                streams.begin()
            for chunk in strategy.chunks:
                chunk.training = module.training  # a stage is no submodule of the module; the step sets the same
            return runner(key, micro_batches, passes)

        return run

    def _runner(self, graphs: IterationGraphs, strategy: MegatronStrategy) -> StepRunner:
        """Return what runs the passes of whole steps, from graphs where it can, or where that is faster."""
        if self.scope == "auto":
            probe = self.probe or DeviceProbe(strategy.root_device, strategy.mesh)
            gains = partial(_gains, strategy)
            self.trial = Trial(graphs, probe, strategy.largest, rank_zero_info, gains)
            return self.trial
        graphs.prepare()
        return graphs

    def _tries(self, trainer: pl.Trainer) -> bool:
        """Return whether ``auto`` looks at the steps of this run."""
        strategy = trainer.strategy
        # In `setup`, because by now the trainer also has the callbacks of the module.
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            # Graphs cannot hold copies to host memory.
            recorded = isinstance(other, CUDAGraph) and other.scope != "auto"
            if recorded or getattr(other, "copies_to_host", False):
                rank_zero_info(f"steps are not tried as CUDA graphs, because of the callback {type(other).__name__}")
                return False
        # Units of full sharding cannot be recorded, and need no stream of ours.
        if not isinstance(strategy, MegatronStrategy) or strategy.data_parallel.has_units:
            return False
        return self.recorder is not None or strategy.root_device.type == "cuda"

    def _parts(self, strategy: MegatronStrategy, lanes: list[list[Named]]) -> StepRunner:
        assert self._recorder is not None and strategy.engine is not None
        # Towers have layouts of their own, and go on with what serves eager steps.
        alone = not isinstance(strategy, MegatronTowersStrategy)
        graphs = self._graphs = GRAPH_BACKENDS[self.backend].start(
            Parts(
                lanes,
                self.scope == "layer",
                strategy.engine,
                strategy.root_device,
                self._recorder,
                strategy.train_schedule,
                strategy.precision.rehearsal,
                lambda: self._generators(strategy),
                self.warmup_steps,
                self._refuse,
                # Ranks that split a layer must record it together; others may not record at the same time.
                strategy.largest_along("tp") if alone else list,
                partial(_tell_layers, strategy if alone and self.scope == "layer" else None),
            )
        )

        def run(key: Hashable, micro_batches: Sequence[Any], passes: Passes) -> Any:
            # Seeded once a step, outside of the graphs that draw from them.
            for streams in self._streams:
                streams.begin()
            graphs.begin_step(len(micro_batches))
            return passes(micro_batches)

        return run

    def _generators(self, strategy: MegatronStrategy) -> list[torch.Generator]:
        """Return all random generators of a step, besides torch's default ones."""
        # Several chunks share a stream, and each generator is registered once.
        own = [generator for streams in self._streams for generator in streams.persistent.values()]
        return own + strategy.precision.generators

    def on_validation_batch_start(self, *args: Any) -> None:
        """Begin to watch what evaluation changes in the modules, as a counter of the model would."""
        if isinstance(self._graphs, IterationGraphs | ModuleGraphs):
            self._evaluating.enter_context(self._graphs.fingerprint.attributes.running())

    def on_validation_batch_end(self, *args: Any) -> None:
        """End the watch."""
        self._evaluating.close()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Release the graphs while their communicators still exist."""
        self._end(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Release the graphs."""
        try:
            self._end(trainer)
        except RuntimeError as error:  # the device may be lost; do not hide the exception that caused it
            log.warning("CUDA graphs could not be given up: %s", error)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release what setup made, if training never began."""
        self._end(trainer)

    def _refuse(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.on_refusal == "error":
            raise ConfigurationError(
                f"CUDAGraph cannot record: {reason}. Or let such steps run eagerly: CUDAGraph(on_refusal='eager')."
            )
        log.log(self._level, "CUDAGraph: steps run eagerly: %s.", reason)

    def _end(self, trainer: pl.Trainer) -> None:
        self._evaluating.close()  # after an error, no evaluation batch has ended the watch
        # Taken away first, so that a second call, after an error in this one, does nothing.
        recorder, self._recorder = self._recorder, None
        streams, self._streams = self._streams, []
        for each in streams:
            each.forget()
        if recorder is None:
            return
        if self._graphs is not None:
            _strategy(trainer).run_steps_by(run_passes)
            self._graphs.close()
        # Last: graphs are closed on the stream on which they were recorded.
        recorder.leave()


def _gains(strategy: MegatronStrategy) -> bool:
    return any(gains_by_recording(chunk) for chunk in strategy.chunks)


def _tell_layers(strategy: MegatronStrategy | None, recorded: bool) -> None:
    for chunk in () if strategy is None else strategy.chunks:
        steps_recorded(chunk, recorded)


def _strategy(trainer: pl.Trainer) -> MegatronStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, MegatronStrategy):
        raise ConfigurationError(
            f"CUDAGraph records the steps of MegatronStrategy, not of {type(strategy).__name__}; use "
            "Trainer(strategy=MegatronStrategy(...))."
        )
    return strategy

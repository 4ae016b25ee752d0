"""Profiling: NVTX ranges, and windows of steps that a profiler records."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from megalight.callbacks.step_timing import StepSpans, label
from megalight.errors import ConfigurationError, MegalightError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class LayerListener(Protocol):
    """The methods that :func:`watch` calls."""

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Called before the forward of a layer."""

    def end(self, name: str) -> None:
        """Called after the forward of a layer, also if it raised."""

    def backward(self, name: str) -> None:
        """Called when the gradient of a layer's output is ready: its backward begins, the next layer's is done."""


def layers_of(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the members of the outermost lists of layers, and the modules beside those lists, by name."""
    children = dict(module.named_children())
    stack = any(isinstance(child, CONTAINERS) for child in children.values())
    found: dict[str, nn.Module] = {}
    for name, child in children.items():
        if isinstance(child, CONTAINERS):
            found |= {f"{prefix}{name}.{member}": layer for member, layer in child.named_children()}
        # Modules beside a list of layers (an embedding, a head) count as one each.
        elif stack and not layers_of(child):
            found[f"{prefix}{name}"] = child
        else:
            found |= layers_of(child, f"{prefix}{name}.")
    return found


def watch(modules: Iterable[nn.Module], listener: LayerListener) -> list[Callable[[], None]]:
    """Add hooks to the layers of ``modules`` that call ``listener``. Returns functions that remove the hooks.

    The hooks do nothing inside code that ``torch.compile`` traces.
    """
    removals: list[Callable[[], None]] = []
    for module in modules:
        for name, layer in layers_of(module).items():
            # Before other hooks, so that waits in these count for the layer.
            before = layer.register_forward_pre_hook(partial(_before, listener, name), prepend=True)
            # Also after an error, or the range would stay open.
            after = layer.register_forward_hook(partial(_after, listener, name), always_call=True)
            removals += [before.remove, after.remove]
    return removals


def _before(listener: LayerListener, name: str, layer: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():
        listener.begin(name, {})


def _after(listener: LayerListener, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    listener.end(name)
    # One tensor is enough: its gradient is complete when the next layer's backward has ended.
    tensor = next((tensor for tensor in _tensors(output) if tensor.requires_grad), None)
    if tensor is not None:
        tensor.register_hook(lambda gradient: listener.backward(name))  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


class NVTXFunctions(Protocol):
    """The functions of NVTX: nested ranges of one thread, and ranges that may end in another thread."""

    def range_push(self, label: str) -> Any:
        """Begin a range inside the current range of this thread."""

    def range_pop(self) -> Any:
        """End the current range of this thread."""

    def range_start(self, label: str) -> Any:
        """Begin a range that any thread can end. Returns its handle."""

    def range_end(self, handle: Any) -> Any:
        """End the range of a handle."""


class Ranges:
    """A listener that turns spans into NVTX ranges.

    Spans are nested ranges of their thread. The backward pass of a layer is a range across threads, because autograd
    runs it in its own threads.

    Raises:
        MegalightError: a range ends that is not the innermost range of its thread.
    """

    def __init__(self, backend: NVTXFunctions) -> None:
        self.backend = backend
        self._threads = threading.local()
        # Labels are made once: formatting a text for each span would cost more than the mark.
        self._labels: dict[tuple[str, tuple[int, ...]], str] = {}
        self._layer: Any = None

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Begin the range of a span."""
        key = name, tuple(where.values())
        text = self._labels.get(key)
        if text is None:
            text = self._labels[key] = label(name, where)
        self.backend.range_push(text)
        self._stack().append(name)

    def end(self, name: str) -> None:
        """End the range of a span."""
        # The first layer has no layer before it whose backward would end its range.
        if name in ("backward", "input_gradient"):
            self._end_layer()
        stack = self._stack()
        if not stack or stack[-1] != name:
            raise MegalightError(
                f"the range {name!r} ends, but {stack[-1] if stack else 'none'!r} is the innermost range of this "
                "thread; the range that began last must end first. Use `with span(...)`."
            )
        stack.pop()
        self.backend.range_pop()

    def backward(self, name: str) -> None:
        """Begin the backward range of a layer; it ends the backward range of the layer after it."""
        # The backward goes through layers one after another, so the next one's begin is this one's end.
        self._end_layer()
        self._layer = self.backend.range_start(f"backward of {name}")

    def _end_layer(self) -> None:
        if self._layer is not None:
            self.backend.range_end(self._layer)
            self._layer = None

    def _stack(self) -> list[str]:
        stack: list[str] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack


class NVTX(StepSpans):
    """Marks the parts of every step with NVTX ranges, for Nsight Systems: see :data:`megalight.parallel.trace.SPANS`.

    Ranges are marks on the host; nothing waits for the device. Without this callback there are no ranges.

    Args:
        layers: whether to also mark the forward and backward pass of each layer.
        ranks: the ranks that mark. None: all.

    Attributes:
        backend: the NVTX functions. None: ``torch.cuda.nvtx``.

    Raises:
        ConfigurationError: CUDA is not available (in ``fit``).
    """

    def __init__(self, layers: bool = True, ranks: Sequence[int] | None = None) -> None:
        super().__init__()
        self.layers = layers
        self.ranks = None if ranks is None else check_ranks(ranks)
        self.backend: NVTXFunctions | None = None

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Ranges | None:
        """Return the listener of this rank."""
        if self.backend is None and not torch.cuda.is_available():
            raise ConfigurationError(
                "NVTX needs CUDA, which is not available here; use megalight.callbacks.ProfilerWindow instead, whose "
                "traces show the same ranges."
            )
        if self.ranks is not None and trainer.global_rank not in self.ranks:
            return None
        return Ranges(torch.cuda.nvtx if self.backend is None else self.backend)

    def _listen(self, trainer: pl.Trainer) -> None:
        super()._listen(trainer)
        if self.layers and isinstance(self._listener, Ranges):
            chunks = getattr(trainer.strategy, "chunks", None) or [trainer.lightning_module]
            self._stops += watch(chunks, self._listener)


@dataclass(frozen=True)
class StepWindow:
    """A window of the optimizer steps ``start`` to ``stop - 1``, which may repeat every few steps.

    Args:
        start: the first step of the window. Training begins with step 0.
        stop: the first step after the window. None: it ends with training.
        every: steps from the start of one window to the next. None: there is one window.

    Raises:
        ConfigurationError: the window is empty, or windows overlap.
    """

    start: int
    stop: int | None
    every: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ConfigurationError(
                f"start_step is {self.start} and stop_step is {self.stop}; start_step must be at least 0 and below "
                "stop_step."
            )
        if self.every is not None and (self.steps is None or self.every < self.steps):
            raise ConfigurationError(
                f"every_n_steps is {self.every}, but a window has {self.steps} steps; windows must not overlap. Use "
                f"every_n_steps of at least {self.steps}, or null for one window."
            )

    @property
    def steps(self) -> int | None:
        """Number of steps in one window; None: all that follow."""
        return None if self.stop is None else self.stop - self.start

    def begins(self, step: int, ahead: int = 0) -> bool:
        """Return whether a window begins ``ahead`` steps after ``step``.

        If the first window begins at a step below ``ahead``, step 0 counts.
        """
        if self.every is None or step + ahead < self.start + self.every:
            # The first window may begin before so many steps were done.
            return step == max(self.start - ahead, 0)
        return (step + ahead - self.start) % self.every == 0


def check_ranks(ranks: Sequence[int]) -> frozenset[int]:
    """Return the ranks as a set.

    Raises:
        ConfigurationError: there is no rank, or a negative one.
    """
    if not ranks or min(ranks) < 0:
        raise ConfigurationError(f"ranks is {list(ranks)}; give at least one rank, counted from 0.")
    return frozenset(ranks)


log = logging.getLogger(__name__)


class Annotations:
    """A listener that turns spans into ranges of torch's profiler."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def begin(self, name: str, where: dict[str, int]) -> None:
        """Begin the range of a span."""
        # `record_function` is a context manager, and spans tell of both ends in separate calls.
        entered = record_function(label(name, where))
        entered.__enter__()  # type: ignore[no-untyped-call]
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        self._threads.stack.append(entered)

    def end(self, name: str) -> None:
        """End the range of a span."""
        self._threads.stack.pop().__exit__(None, None, None)


class Tool(Protocol):
    """A profiler that records one window of steps."""

    def check(self, trainer: pl.Trainer) -> None:
        """Raise a ConfigurationError if this rank cannot record."""

    def start(self, trainer: pl.Trainer, warmup: int, steps: int | None) -> None:
        """Start ``warmup`` steps before a window of ``steps`` steps."""

    def step(self) -> None:
        """Called after each optimizer step but the last of the window."""

    def stop(self, trainer: pl.Trainer, first: int, last: int, error: BaseException | None) -> Path | None:
        """Stop, and return the trace of the steps ``first`` to ``last`` if one was written. ``error``: what ends it."""


class TorchProfiler:
    """``torch.profiler``: writes a trace and a table of operators; the arguments are those of ``ProfilerWindow``."""

    def __init__(self, rows: int, shapes: bool, stacks: bool, memory: bool, dirpath: str | None) -> None:
        self.rows = rows
        self.options: dict[str, Any] = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory}
        self.dirpath = dirpath
        self._profiler: profile | None = None

    def check(self, trainer: pl.Trainer) -> None:
        """Do nothing: it runs on every device."""

    def start(self, trainer: pl.Trainer, warmup: int, steps: int | None) -> None:
        """Start the profiler, which records after ``warmup`` steps."""
        assert steps is not None
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # `repeat=1`: the next window gets a profiler of its own.
        when = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
        self._profiler = profile(activities=activities, schedule=when, **self.options)
        self._profiler.start()

    def step(self) -> None:
        """Count an optimizer step: the profiler's schedule tells which of them it records."""
        assert self._profiler is not None
        self._profiler.step()

    def stop(self, trainer: pl.Trainer, first: int, last: int, error: BaseException | None) -> Path | None:
        """Stop, and write the trace and the table. Without a recorded step, there is none."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        # A trace without a recorded step is an empty file, which would be taken for a result.
        if last < first:
            log.warning("training ended in the profiler's warm-up, before step %d: no trace written.", first)
            return None
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "profile")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"steps={first}-{last}-rank={trainer.global_rank}.json.gz"
        profiler.export_chrome_trace(str(path))
        device = "device" if trainer.strategy.root_device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=self.rows)
        path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table, encoding="utf-8")
        log.info("profile of steps %d to %d: %s", first, last, path)
        return path


class Nsys:
    """Nsight Systems: ``nsys profile --capture-range=cudaProfilerApi ...`` records between the calls."""

    def check(self, trainer: pl.Trainer) -> None:
        """Raise a ConfigurationError if this rank is not on CUDA."""
        if trainer.strategy.root_device.type != "cuda":
            raise ConfigurationError(
                f"ProfilerWindow(tool='nsys') needs a CUDA device, but rank {trainer.global_rank} runs on "
                f"{trainer.strategy.root_device.type}; use tool='torch'."
            )

    def start(self, trainer: pl.Trainer, warmup: int, steps: int | None) -> None:
        """Start recording, after the device has finished what was queued before the window."""
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Do nothing."""

    def stop(self, trainer: pl.Trainer, first: int, last: int, error: BaseException | None) -> Path | None:
        """Stop recording, after the device has finished the window."""
        # After a failure of the device, waiting would hang or raise again.
        if error is None:
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        return None


FULL = re.compile(r"out of memory|(CUBLAS|CUDNN|CUSPARSE|CUSOLVER)_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Messages of the driver and its libraries, which do not raise ``torch.OutOfMemoryError``."""


class MemoryHistory:
    """Allocations with their Python stacks: writes a snapshot for ``pytorch.org/memory_viz``."""

    def __init__(self, max_entries: int, dirpath: str | None) -> None:
        self.max_entries = max_entries
        self.dirpath = dirpath
        self._whole = False

    def check(self, trainer: pl.Trainer) -> None:
        """Raise a ConfigurationError if this rank is not on CUDA."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ConfigurationError(
                f"ProfilerWindow(tool='memory') needs a CUDA device, but this run is on {device.type}; remove it."
            )

    def start(self, trainer: pl.Trainer, warmup: int, steps: int | None) -> None:
        """Start recording."""
        self._whole = steps is None
        # Stacks of Python only: those of C++ take long to resolve.
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries, stacks="python")

    def step(self) -> None:
        """Do nothing."""

    def stop(self, trainer: pl.Trainer, first: int, last: int, error: BaseException | None) -> Path | None:
        """Stop, and write a snapshot if a window is over or the device is out of memory; its error names the file."""
        path = None
        try:
            # While the error is handled, the memory is still as it was.
            if ran_out(error):
                path = self._write(trainer, f"out-of-memory-step={trainer.global_step}")
                error.add_note(f"(snapshot and history of the memory: {path})")  # type: ignore[union-attr]
            elif error is None and not self._whole:
                path = self._write(trainer, f"steps={first}-{last}")
        except Exception as failure:  # the user must see the first error, not this one
            log.warning("the memory snapshot could not be written: %s", failure)
        torch.cuda.memory._record_memory_history(enabled=None)
        return path

    def _write(self, trainer: pl.Trainer, name: str) -> Path:
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "memory")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-rank={trainer.global_rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        return path


def ran_out(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is a lack of device memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and FULL.search(str(error))):
            return True
        # Lightning and others wrap errors, and the lack of memory may be a cause further down.
        error = error.__cause__ or error.__context__
    return False


TORCH_OPTIONS: dict[str, Any] = {"warmup": 1, "rows": 20, "shapes": False, "stacks": False, "memory": False}
"""Options of ``tool="torch"``, with their defaults."""


class ProfilerWindow(StepSpans):
    """Profiles a few steps with ``torch.profiler`` or Nsight Systems, or records their allocations.

    ``tool="torch"`` writes for each window and rank the trace ``steps=A-B-rank=R.json.gz`` (for Perfetto or
    ``chrome://tracing``) and a table of the most expensive operators, ``steps=A-B-rank=R.txt``. Parts of a step have
    the names in :mod:`megalight.parallel.trace`.

    ``tool="nsys"`` makes ``nsys profile --capture-range=cudaProfilerApi ...`` record only these steps. The host waits
    for the device at both ends of the window, so that it holds whole steps. It takes no options of ``torch``.

    ``tool="memory"`` records allocations, and writes a snapshot ``memory/steps=A-B-rank=R.pickle`` when a window is
    over. Without ``stop_step`` it records the whole run, the build of the model included, and writes none. If the
    device runs out of memory meanwhile, it writes ``memory/out-of-memory-step=N-rank=R.pickle``, and the error names
    the file. Open it at ``pytorch.org/memory_viz``, which reads it in the browser. Do not unpickle a file from a
    machine that you do not trust. Recording costs a little host time at every allocation, because it keeps the Python
    stack.

    Args:
        start_step: the first optimizer step of the window. Training begins with step 0.
        stop_step: the first optimizer step after the window. null, for ``memory``: it ends with training.
        tool: ``torch``, ``nsys`` or ``memory``.
        every_n_steps: steps from the start of one window to the next. null: one window only.
        ranks: the ranks that profile. null: rank 0; all ranks for ``memory``.
        warmup: for ``torch``: steps before the window in which the profiler runs without recording, because its start
            is slow.
        rows: for ``torch``: rows of the table.
        shapes: for ``torch``: whether to record the input shapes of operators.
        stacks: for ``torch``: whether to record the Python stack of every operator (slow).
        memory: for ``torch``: whether to record allocations.
        max_entries: for ``memory``: number of allocations and releases to keep, the latest ones.
        dirpath: for ``torch`` and ``memory``: folder to write to. null: ``profile`` or ``memory`` in the trainer's
            ``default_root_dir``.

    Attributes:
        traces: paths of the traces and snapshots that this rank has written.

    Raises:
        ConfigurationError: an argument is out of range or not one of the tool, or windows are empty or overlap; in
            ``fit``, one of ``ranks`` is not on CUDA with ``nsys`` or ``memory``.
    """

    def __init__(
        self,
        start_step: int = 0,
        stop_step: int | None = None,
        tool: Literal["torch", "nsys", "memory"] = "torch",
        every_n_steps: int | None = None,
        ranks: Sequence[int] | None = None,
        warmup: int = 1,
        rows: int = 20,
        shapes: bool = False,
        stacks: bool = False,
        memory: bool = False,
        max_entries: int | None = None,
        dirpath: str | None = None,
    ) -> None:
        super().__init__()
        if tool not in ("torch", "nsys", "memory"):
            raise ConfigurationError(f"tool is {tool!r}; choose one of torch, nsys, memory.")
        if warmup < 0 or rows < 1 or (max_entries is not None and max_entries < 1):
            raise ConfigurationError(
                f"warmup is {warmup}, rows is {rows} and max_entries is {max_entries}; warmup must be at least 0, rows "
                "and max_entries at least 1."
            )
        given = {"warmup": warmup, "rows": rows, "shapes": shapes, "stacks": stacks, "memory": memory}
        others = [name for name, value in given.items() if tool != "torch" and value != TORCH_OPTIONS[name]]
        others += ["dirpath"] if tool == "nsys" and dirpath is not None else []
        others += ["max_entries"] if tool != "memory" and max_entries is not None else []
        if others:
            raise ConfigurationError(f"ProfilerWindow(tool={tool!r}) has no {', '.join(others)}; leave them out.")
        if stop_step is None and tool != "memory":
            raise ConfigurationError(f"ProfilerWindow(tool={tool!r}) needs stop_step, the step after its window.")
        self.warmup = warmup if tool == "torch" else 0
        self.window = StepWindow(start_step, stop_step, every_n_steps)
        if every_n_steps is not None and every_n_steps < (least := (self.window.steps or 0) + self.warmup):
            raise ConfigurationError(
                f"every_n_steps is {every_n_steps}; it must be at least {least} for a window of {self.window.steps} "
                f"steps with {self.warmup} steps of warm-up."
            )
        self.ranks = None if ranks is None and tool == "memory" else check_ranks(ranks or (0,))
        self.tool: Tool
        if tool == "torch":
            self.tool = TorchProfiler(rows, shapes, stacks, memory, dirpath)
        elif tool == "nsys":
            self.tool = Nsys()
        else:
            self.tool = MemoryHistory(max_entries or 100_000, dirpath)
        self.traces: list[Path] = []
        self._profiles = False
        self._recording = False
        self._first = 0
        self._step = 0
        self._seen = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the tool can record on this rank. A record of the whole run starts before the model is built."""
        self._profiles = stage == "fit" and (self.ranks is None or trainer.global_rank in self.ranks)
        if self._profiles:
            self.tool.check(trainer)
            if self.window.stop is None and self.window.start == 0:
                self._start(trainer, 0)

    def listener(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Annotations | None:
        """Return the listener of ``torch``, on the ranks that profile; ranges for nsys are those of ``NVTX``."""
        return Annotations() if self._profiles and isinstance(self.tool, TorchProfiler) else None

    def _listen(self, trainer: pl.Trainer) -> None:
        """Listen only inside a window."""
        # Outside of a window nothing listens, so that spans cost nothing there.
        if self._recording:
            super()._listen(trainer)

    def _begin(self, name: str) -> None:
        if self._recording:
            super()._begin(name)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the tool before the first step of the warm-up."""
        step = trainer.global_step
        if self._profiles and not self._recording and self.window.begins(step, self.warmup):
            # A window at the very start has less warm-up than was asked for.
            self._start(trainer, self.window.start - step if step <= self.window.start else self.warmup)
            self._listen(trainer)
        # Steps that the trace holds are those that were begun.
        self._seen = step
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the tool after the last step of the window."""
        # First: `step()` of the profiler must not fall inside a range of ours.
        self._end_all()
        if not self._recording:
            return
        # With gradient accumulation, several batches make one step.
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if self.window.steps is not None and self._step == self._first + self.window.steps:
                self._write(trainer)
                return
            self.tool.step()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write an unfinished window."""
        self._end_all()
        self._write(trainer)
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write an unfinished window: it may show the cause of the error."""
        self._end_all()
        self._write(trainer, exception)
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop the tool if training has not begun."""
        self._write(trainer)

    def _start(self, trainer: pl.Trainer, warmup: int) -> None:
        self._first, self._step = trainer.global_step + warmup, trainer.global_step
        self.tool.start(trainer, warmup, self.window.steps)
        self._recording = True

    def _write(self, trainer: pl.Trainer, error: BaseException | None = None) -> None:
        if not self._recording:
            return
        self._recording = False
        # Our ranges end before the tool stops: an open one would be missing in the trace.
        self._stop()
        if (path := self.tool.stop(trainer, self._first, self._seen, error)) is not None:
            self.traces.append(path)

"""NVTX ranges for the parts of a step, for the time line of Nsight Systems."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from megalight.callbacks.profiling.profiler_window import check_ranks
from megalight.callbacks.timing.step_timing import StepSpans, label
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

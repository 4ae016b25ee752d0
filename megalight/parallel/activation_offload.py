"""Activations in host memory: what chosen modules save for the backward pass leaves the device until it is needed.

::

    forward    layer 0 | layer 1        | layer 2        |
    to host            | saved by 0     | saved by 1     |
    backward                                               layer 2  | layer 1        | layer 0
    to device                                        saved by 1     | saved by 0     |
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from megalight.errors import ConfigurationError, nearest_pattern
from megalight.imports import catches_saved_tensors, in_backward
from megalight.parallel.data_parallel.communication import side_stream
from megalight.parallel.host_memory import HostPool
from megalight.parallel.layers import layers_of

MIN_ELEMENTS = 2**20
"""Smaller tensors stay: their copies would cost more than the memory is worth."""


class ActivationOffloading:
    """Copies what modules save for the backward pass to pinned host memory, and back one call ahead of its use.

    Each direction has a stream. A tensor that is saved several times in a call is copied once. Parameters stay where
    they are, and so does what a recomputed module saves.

    Args:
        modules: in the order of the forward pass; hooks are set on them.
        pool: host memory of the device where they compute.
        min_elements: size of the smallest tensor that is moved.

    Attributes:
        moved: bytes that were copied to the host so far.
    """

    def __init__(self, modules: Iterable[nn.Module], pool: HostPool, min_elements: int = MIN_ELEMENTS) -> None:
        self.pool = pool
        self.device = device = pool.device
        self.min_elements = min_elements
        self.moved = 0
        self.down, self.up = side_stream(device), side_stream(device)
        self._leaving: list[tuple[Callable[[], None], torch.cuda.Stream, list[Tensor]]] = []
        self._open: list[tuple[saved_tensors_hooks, ModuleCall] | None] = []
        self._last: weakref.ref[ModuleCall] | None = None
        self._handles: list[RemovableHandle] = []
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            # Also after an error: hooks that stay would catch what others save.
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks. What is in host memory still comes back."""
        for handle in self._handles:
            handle.remove()

    def leave(self, tensors: list[Tensor]) -> None:
        """Keep tensors until :meth:`settle`: they are on their way to the host."""
        if self.down is not None and tensors:
            self._leaving.append((self.down.done(), torch.cuda.current_stream(self.device), tensors))

    def settle(self, lag: int = 0) -> None:
        """Let the main stream wait for copies to the host, but those of the last calls, and free what they read.

        Memory is freed behind this wait, so that the main stream can use it again at once. With ``record_stream`` it
        would have to wait until the device, which is far behind the host, has really made the copies.
        """
        while len(self._leaving) > lag:
            wait, main, _ = self._leaving.pop(0)
            assert self.up is not None
            # The backward pass may come here from another stream (of a shared expert), which must not wait in place of
            # the one whose memory this is, or of the one that reads the copies.
            for stream in (main, self.up.stream):
                with torch.cuda.stream(stream):
                    wait()

    def _enter(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        # Nothing is saved; or the module is recomputed, and needs what it saves at once; or somebody else catches what
        # is saved: torch's checkpoint, which must see all of it, or a module around this one.
        if not torch.is_grad_enabled() or in_backward() or catches_saved_tensors():
            self._open.append(None)
            return
        # Copies that lag behind would keep all tensors on the device: computation waits for those of the call before
        # the last one.
        self.settle(lag=1)
        call = ModuleCall(self, module, self._last)
        self._last = weakref.ref(call)
        hooks = saved_tensors_hooks(call.pack, _unpack)
        hooks.__enter__()
        self._open.append((hooks, call))

    def _leave(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if (entered := self._open.pop()) is not None:
            entered[0].__exit__(None, None, None)
            entered[1].close()


class ModuleCall:
    """One call of a module, and what it has saved.

    Args:
        before: the call before, whose tensors the backward pass needs next.
    """

    def __init__(self, owner: ActivationOffloading, module: nn.Module, before: weakref.ref[ModuleCall] | None) -> None:
        self.owner = owner
        self._before = before
        # By memory: products save views of weights. The views of sharded weights show other layers by then.
        self._weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._copied: dict[tuple[object, ...], OffloadedTensor] = {}
        # Weak: autograd owns what it saved, and frees it as soon as it was used.
        self._members: list[weakref.ref[OffloadedTensor]] = []
        self._leaving: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        """Start to copy a tensor to the host, unless it should stay."""
        if not self._moves(tensor):
            return tensor
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        if key not in self._copied:
            self._copied[key] = OffloadedTensor(self, tensor)
            self._members.append(weakref.ref(self._copied[key]))
            self._leaving.append(tensor)
        return self._copied[key]

    def close(self) -> None:
        """End the call: from now on, memory may be used again, and addresses say nothing about tensors."""
        self._copied.clear()
        self.owner.leave(self._leaving)
        self._leaving = []

    def fetch(self, ahead: bool = True) -> None:
        """Start to copy what is left back to the device, and what the call before it saved."""
        self.owner.settle()
        for member in self._members:
            if (away := member()) is not None:
                away.fetch()
        if ahead and self._before is not None and (before := self._before()) is not None:
            before.fetch(ahead=False)

    def _moves(self, tensor: Tensor) -> bool:
        return (
            type(tensor) is Tensor
            and tensor.device.type == self.owner.device.type
            and tensor.numel() >= self.owner.min_elements
            and 0 not in tensor.stride()  # an expanded tensor is smaller than its copy
            and tensor.untyped_storage().data_ptr() not in self._weights
        )


class OffloadedTensor:
    """A tensor that is in host memory until its call is fetched."""

    def __init__(self, call: ModuleCall, tensor: Tensor) -> None:
        self.call = call
        self._back: Tensor | None = None
        self._arrived: Callable[[], None] | None = None
        self._main: torch.cuda.Stream | None = None
        self._taken = False
        owner = call.owner
        owner.moved += tensor.nbytes
        if owner.down is None:
            self._copy(tensor)
            return
        with owner.down.after_computation():
            self._copy(tensor)

    def _copy(self, tensor: Tensor) -> None:
        self._block = self.call.owner.pool.take(tensor.nbytes)
        self._here = self._block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._here.copy_(tensor.detach(), non_blocking=True)

    def fetch(self) -> None:
        """Start to copy the tensor back, once. Then others may use its host memory."""
        if self._back is not None:
            return
        owner = self.call.owner
        if owner.up is None:
            self._back = self._here.clone()
        else:
            # Memory of the main stream, which may just have freed it: the copy comes after all that it has been given.
            self._main = torch.cuda.current_stream(owner.device)
            self._back = torch.empty_like(self._here, device=owner.device)
            with owner.up.after_computation():
                self._back.copy_(self._here, non_blocking=True)
            self._arrived = owner.up.done()
        owner.pool.give(self._block, self._arrived)
        del self._block, self._here

    def take(self) -> Tensor:
        """Return the tensor on the device; the current stream waits for it."""
        self.call.fetch()
        assert self._back is not None
        if self._arrived is not None:
            # Each time: a tensor may be used on several streams, as the input of a shared expert is.
            self._arrived()
            self._taken = True
            if (now := torch.cuda.current_stream(self.call.owner.device)) != self._main:
                self._back.record_stream(now)
        return self._back

    def __del__(self) -> None:
        # A backward pass that failed: nobody else waits before the memory is used again.
        if self._arrived is not None and not self._taken:
            with torch.cuda.stream(self._main):
                self._arrived()


def _unpack(saved: Tensor | OffloadedTensor) -> Tensor:
    return saved.take() if isinstance(saved, OffloadedTensor) else saved


def chosen(chunk: nn.Module, patterns: Sequence[str], last: bool = True) -> list[nn.Module]:
    """Return the modules of layers that patterns name, in the order of the forward pass.

    The last layer of a model is left out. Its backward pass begins at once, so what it saves would only travel forth
    and back.

    Args:
        chunk: a model with ``layers``, or a stage of one. A stage may have no module that a pattern names.
        patterns: names or glob patterns of modules inside a layer; ``""`` is the layer itself.
        last: the chunk holds the last layer.

    Raises:
        ConfigurationError: the model has no ``layers``.
    """
    layers = list(layers_of(chunk, "ActivationOffload").values())
    return [
        module
        for layer in (layers[:-1] if last else layers)
        for name, module in layer.named_modules()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def check_patterns(chunks: Sequence[nn.Module], patterns: Sequence[str], anywhere: Callable[[bool], bool]) -> None:
    """Refuse patterns that name nothing in the whole model, on all ranks alike.

    Args:
        chunks: this rank's part of the model.
        anywhere: returns whether its argument is true on any rank. All ranks call it equally often.

    Raises:
        ConfigurationError: a pattern names no module of any layer, or only modules of the last one.
    """
    names = dict.fromkeys(
        name for chunk in chunks for layer in layers_of(chunk).values() for name, _ in layer.named_modules()
    )
    for pattern in patterns:
        if not anywhere(bool(fnmatch.filter(names, pattern))):
            raise ConfigurationError(
                f"pattern {pattern!r} of ActivationOffload matches no module of any layer; modules inside a layer are "
                f"{', '.join(filter(None, names))}." + nearest_pattern(pattern, names)
            )

"""What a suspended engine gives back: weights, and pages of memory that keeps its addresses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, UntypedStorage, nn

from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel.host_memory import ManagedMemory, host_memory, prefetch


class HostWeights:
    """The weights of a model, moved to the host until :meth:`restore`. The tensors stay, without memory.

    Args:
        model: a model, or this rank's part of one. Views of its weights have none either.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[UntypedStorage, Tensor]] = []
        for storage in _storages(model):
            there = _bytes(storage)
            kept = host_memory(there.shape, there.dtype, there.device)
            kept.copy_(there)
            storage.resize_(0)
            self._kept.append((storage, kept))

    def restore(self) -> None:
        """Move the weights back."""
        for storage, kept in self._kept:
            storage.resize_(kept.nbytes)
            _bytes(storage).copy_(kept)
        self._kept.clear()


class ManagedPages:
    """Managed memory of an engine. Its pages go to the host and come back, and addresses stay: graphs may be kept.

    Args:
        memory: the pool.
    """

    def __init__(self, memory: ManagedMemory) -> None:
        self.memory = memory
        self._weights: list[Tensor] = []

    @classmethod
    def of(cls, device: torch.device, every: Callable[[bool], bool]) -> ManagedPages | None:
        """Return managed memory of a device; None, with a warning, if a rank has none.

        Args:
            device: the device of this rank.
            every: whether a flag is set on all ranks of the replica.
        """
        memory, reason = None, "another rank has none"
        try:
            memory = ManagedMemory(device)
        except MegalightError as error:
            reason = str(error)
        # Agreed, as graphs of all ranks are kept or none.
        if every(memory is not None):
            assert memory is not None
            return cls(memory)
        warnings.warn(f"the engine runs without managed memory, as memory_level=0 says: {reason}", stacklevel=4)
        return None

    def check(self, size: int) -> None:
        """Refuse to take more bytes than the device has free: it can hang.

        Raises:
            ConfigurationError: it has less.
        """
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.memory.device)
        if size > free:
            raise ConfigurationError(
                f"{size} bytes of managed memory are wanted, and {self.memory.device} has {free} free; lower "
                "num_blocks or cache_memory, or set memory_level=0."
            )

    def take(self, model: nn.Module) -> None:
        """Move the weights of a model to managed memory.

        Raises:
            ConfigurationError: they are parts of larger buffers, those of training for example; or see :meth:`check`.
        """
        storages = _storages(model)
        self.check(max((storage.nbytes() for storage in storages), default=0))
        for tensor in _weights(model):
            if tensor.nbytes != tensor.untyped_storage().nbytes():
                raise ConfigurationError(
                    "weights are parts of larger buffers, as those of a model that trains; use memory_level=1."
                )
        moved: dict[int, Tensor] = {}
        for tensor in _weights(model):
            place = tensor.data_ptr()
            if place not in moved:
                with self.memory.allocating():
                    moved[place] = tensor.data.clone()
            tensor.data = moved[place].view_as(tensor)
        self._weights = [*moved.values()]

    def move(self, tensors: Iterable[Tensor], where: torch.device, weights: bool) -> None:
        """Start to move the pages of tensors, and of the weights."""
        for tensor in (*tensors, *(self._weights if weights else ())):
            prefetch(tensor, where)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are in this memory."""
        return bool(self._weights)


def _weights(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]


def _storages(model: nn.Module) -> list[UntypedStorage]:
    """Return each storage of the weights once: tied weights share one."""
    return [*{each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in _weights(model))}.values()]


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

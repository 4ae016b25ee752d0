"""The memory of an engine: how many blocks fit into so many bytes, and what is given back while it is suspended.

The form of a row follows from the layer, and its dtype from the precision of the pass. So one forward pass shows both.
"""

from __future__ import annotations

import math
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from megalight.errors import ConfigurationError, MegalightError, as_float, integer
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache, Form, NewestTokens
from megalight.inference.parallel import GenerativeModel, device_of, layers_with_state
from megalight.inference.passes import run_pass
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.scheduler import Request
from megalight.inference.speculator import EagleSpeculator
from megalight.ops.quantized_weight import stored_of
from megalight.parallel.host_memory import ManagedMemory, host_memory, move_pages
from megalight.parallel.virtual_memory import VirtualMemory
from megalight.types import AttentionSpan

Memory = int | float
"""A number of bytes; or, between 0 and 1, a share of the memory that is free beside weights and a forward pass."""


def check_memory(memory: Memory) -> Memory:
    """Return a number of bytes, or a share.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(memory, float):
        share = as_float(memory)
        if not 0 < share < 1:
            raise ConfigurationError(
                f"cache_memory is {memory!r}; it must be a number of bytes (an integer), or a share of the free memory "
                "(a number between 0 and 1, such as 0.9)."
            )
        return share
    return integer("cache_memory", memory)


def layers_of(model: GenerativeModel, eagle: EagleSpeculator | None) -> dict[str, Any]:
    """Return the layers that keep something of a token: those of the model on this rank, and of its draft."""
    return {**layers_with_state(model), **({} if eagle is None else eagle.layers)}


@dataclass(frozen=True)
class CacheForms:
    """What the layers on this rank keep.

    Attributes:
        forms: for each pool of the cache the form of a row or of an entry.
        token_bytes: what layers keep of a token, by what sees it (None: all later tokens).
        entry_bytes: what all layers keep of a sequence.
        free: bytes that are free on the device.
    """

    forms: Sequence[Form | None]
    token_bytes: Mapping[AttentionSpan | None, int]
    entry_bytes: int
    free: int

    @classmethod
    def of(
        cls,
        model: GenerativeModel,
        tokens: int,
        block_size: int,
        eagle: EagleSpeculator | None = None,
        quantized: bool = False,
    ) -> CacheForms:
        """Run a pass of a sequence of so many tokens; ranks of a replica, and replicas that share experts, together."""
        blocks = BlockPool(1, -(-tokens // block_size), block_size)
        cache = Cache(layers_of(model, eagle), 1, tokens, blocks, quantized)
        sampling = PassSampling(TokenCounts(1), [Request(0, [0] * tokens, tokens, 1)])
        run_pass(model, cache, [0], [[0] * tokens], sampling)
        if eagle is not None:
            eagle.join(cache, NewestTokens(cache.dummy_slot + 1, device_of(model), eagle.num_speculative_tokens))
            cache.release(0)
            eagle.probe(cache.extend([0], [tokens], device_of(model)))
        forms, token, entry = cache.forms()
        cache.drop()
        return cls(forms, token, entry, _free(device_of(model)))

    def bytes(self, blocks: Mapping[AttentionSpan | None, int], block_size: int, entries: int) -> int:
        """Return what so many blocks, a dummy block for each of them, and entries take."""
        rows = {span: (count + 1) * block_size for span, count in blocks.items()}
        return sum(rows[span] * size for span, size in self.token_bytes.items()) + entries * self.entry_bytes

    def blocks(
        self,
        memory: Memory,
        counts: Callable[[int], Mapping[AttentionSpan | None, int]],
        block_size: int,
        entries: int,
        most: int,
    ) -> int:
        """Return how many blocks fit, beside dummy blocks and ``entries`` for sequences, but at most ``most``.

        Args:
            memory: of the cache.
            counts: how many blocks the layers have, by what they see, if there are so many.
            block_size: tokens of a block.
            entries: of sequences.
            most: how many are of use.

        Raises:
            ConfigurationError: none fits.
        """
        size = memory if isinstance(memory, int) else math.floor(memory * self.free)

        def needed(count: int) -> int:
            return self.bytes(counts(count), block_size, entries)

        found = bisect_right(range(1, most + 1), size, key=needed)
        if not found:
            raise ConfigurationError(
                f"cache_memory={memory!r} is {size} bytes, and a block of {block_size} tokens, a dummy block and "
                f"{entries} entries for sequences take {needed(1)}; give more, or lower block_size or max_sequences."
            )
        return found


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        # What torch holds and no tensor uses is free, too.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# While the engine is suspended


@dataclass
class _Kept:
    """Weights that share a storage, and its values on the host.

    Attributes:
        tensors: the weights.
        storage: where they lie.
        whole: whether they are no parts of a larger buffer, such as those of training.
        values: ``uint8``, pinned.
        place: where they lie in virtual memory from now on, ``uint8``; None: they stay in their storage.
    """

    tensors: Sequence[Tensor]
    storage: UntypedStorage
    whole: bool
    values: Tensor
    place: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Kept:
        storage = tensors[0].untyped_storage()
        there = _bytes(storage)
        return cls(tensors, storage, _whole(tensors), host_memory(there.shape, there.dtype, there.device).copy_(there))


class HostWeights:
    """Weights that are in pinned memory of the host while the engine is suspended with them. The tensors stay.

    The first :meth:`restore` moves them to virtual memory, whose addresses stay from then on; but not those that are
    parts of larger buffers. Weights of at most half a page are never suspended then.

    Args:
        model: a model, or this rank's part of one. Views of its weights have no memory meanwhile either.
        memory: where they move to; None: they stay in torch's own memory.
    """

    def __init__(self, model: nn.Module, memory: VirtualMemory | None) -> None:
        self._model, self._memory = model, memory
        self._kept: list[_Kept] = []
        # Of these, what torch's memory has lost.
        self._freed: list[_Kept] = []

    @property
    def addresses_stay(self) -> bool:
        """Whether addresses are the same after :meth:`restore`, so that CUDA graphs may be kept."""
        return not self._freed

    def _goes(self, tensor: Tensor) -> bool:
        memory, size = self._memory, tensor.untyped_storage().nbytes()
        return memory is None or (tensor.device == memory.device and size > memory.page // 2)

    def suspend(self) -> None:
        """Copy the weights to the host, and give their memory back. A second call does nothing."""
        if self._kept:
            return
        # All are copied before the first is gone.
        self._kept = [_Kept.of(each) for each in _sharing(self._model) if self._goes(each[0])]
        for each in self._kept:
            if self._memory is None or not self._memory.adopt(each.storage):
                self._freed.append(each)
        self.give_back()
        if self._freed:
            torch.cuda.empty_cache()  # other processes may have it

    def allocate(self) -> None:
        """Take the memory of suspended weights again, all or some of it.

        Raises:
            torch.OutOfMemoryError: the device has too little. Call :meth:`give_back` then.
            MegalightError: the driver refuses.
        """
        if self._memory is not None and self._kept:
            self._memory.restore()
        for each in self._freed:
            if self._memory is None or not each.whole:
                each.storage.resize_(each.values.nbytes)
            elif each.place is None:
                each.place = self._memory.empty(each.values.shape, torch.uint8)

    def give_back(self) -> None:
        """Give back what :meth:`allocate` took."""
        if self._memory is not None and self._kept:
            self._memory.release()
        for each in self._freed:
            each.storage.resize_(0)

    def restore(self) -> None:
        """Copy the weights back, into what :meth:`allocate` took."""
        for each in self._kept:
            if each.place is None:
                _bytes(each.storage).copy_(each.values)
                continue
            each.place.copy_(each.values)
            for tensor in each.tensors:
                # Others were given new values meanwhile.
                if tensor.untyped_storage()._cdata == each.storage._cdata:
                    tensor.data = each.place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        self._kept, self._freed = [], []


class ManagedPages:
    """Tensors in managed memory, whose pages go to the host and come back. It only starts these moves.

    Args:
        memory: the pool.
        tensors: what lies there.
    """

    addresses_stay = True

    def __init__(self, memory: ManagedMemory, tensors: Sequence[Tensor]) -> None:
        self._memory, self._tensors, self._values = memory, tensors, True

    def suspend(self, keep: bool = True) -> None:
        """Move the pages to the host, with their values or without."""
        self._values = keep
        move_pages(self._tensors, torch.device("cpu"), keep)

    def allocate(self) -> None:
        """Do nothing: pages take memory when they come."""

    def give_back(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Move the pages to the device."""
        move_pages(self._tensors, self._memory.device, self._values)


def managed_memory(device: torch.device, every: Callable[[bool], bool]) -> ManagedMemory | None:
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
        return memory
    warnings.warn(f"the engine runs without managed memory, as memory_level=0 says: {reason}", stacklevel=3)
    return None


def check_free(memory: ManagedMemory, size: int) -> None:
    """Refuse to take more bytes of managed memory than the device has free: it can hang.

    Raises:
        ConfigurationError: it has less.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(memory.device)
    if size > free:
        raise ConfigurationError(
            f"{size} bytes of managed memory are wanted, and {memory.device} has {free} free; lower "
            "num_blocks or cache_memory, or set memory_level=0."
        )


def managed_weights(model: nn.Module, memory: ManagedMemory) -> list[Tensor]:
    """Move weights to managed memory; return what they share there.

    Raises:
        ConfigurationError: they are parts of larger buffers, those of training for example; or see :func:`check_free`.
    """
    sharing, moved = _sharing(model), list[Tensor]()
    check_free(memory, max((each[0].nbytes for each in sharing), default=0))
    if not all(map(_whole, sharing)):
        raise ConfigurationError(
            "weights are parts of larger buffers, as those of a model that trains; use memory_level=1."
        )
    for each in sharing:
        with memory.allocating():
            moved.append(each[0].data.clone())
        for tensor in each:
            tensor.data = moved[-1].view_as(tensor)
    return moved


def _weights(model: nn.Module) -> list[Tensor]:
    """Return parameters and buffers; of a weight that is stored quantized, what has its values."""
    found: list[Tensor] = []
    for parameter in model.parameters():
        stored = stored_of(parameter)
        found += [parameter] if stored is None else stored.parts().values()
    return [tensor for tensor in (*found, *model.buffers()) if tensor.numel()]


def addresses_of(model: nn.Module) -> list[int]:
    """Return where the weights lie. CUDA graphs read them there."""
    return [tensor.data_ptr() for tensor in _weights(model)]


def _sharing(model: nn.Module) -> list[list[Tensor]]:
    """Return the weights by their storages: tied weights share one."""
    found: dict[int, list[Tensor]] = {}
    for tensor in _weights(model):
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return [*found.values()]


def _whole(sharing: Sequence[Tensor]) -> bool:
    """Return whether weights are no parts of a larger buffer."""
    return all(each.nbytes == each.untyped_storage().nbytes() for each in sharing)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

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
            eagle.join(cache, NewestTokens(cache.dummy_slot + 1, device_of(model), eagle.guesses))
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

    def allocate(self) -> None:
        """Take the memory of all weights again, or of none.

        Raises:
            torch.OutOfMemoryError: the device has too little.
        """
        try:
            for storage, kept in self._kept:
                storage.resize_(kept.nbytes)
        except torch.OutOfMemoryError:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Give the memory back that :meth:`allocate` took."""
        for storage, _ in self._kept:
            storage.resize_(0)

    def restore(self) -> None:
        """Move the weights back, into the memory that :meth:`allocate` took."""
        for storage, kept in self._kept:
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

    def move(self, tensors: Sequence[Tensor], where: torch.device, keep: bool = True) -> None:
        """Start to move the pages of tensors, with their values or without."""
        move_pages(tensors, where, keep)

    def move_weights(self, where: torch.device) -> None:
        """Start to move the pages of the weights."""
        move_pages(self._weights, where)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are in this memory."""
        return bool(self._weights)


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


def _storages(model: nn.Module) -> list[UntypedStorage]:
    """Return each storage of the weights once: tied weights share one."""
    return [*{each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in _weights(model))}.values()]


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

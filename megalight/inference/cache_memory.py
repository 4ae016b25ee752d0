"""The memory of a cache: what its layers keep of a token and of a sequence, and how many blocks fit into so many bytes.

The form of a row follows from the layer, and its dtype from the precision of the pass. So one forward pass shows both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalight.errors import ConfigurationError, as_float, integer
from megalight.inference.blocks import BlockPool
from megalight.inference.cache import Cache, Form
from megalight.inference.generate import device_of, run_pass
from megalight.inference.parallel import ParallelGPT
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.scheduler import Request
from megalight.models.gpt import GPT

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


@dataclass(frozen=True)
class CacheForms:
    """What the layers on this rank keep.

    Attributes:
        forms: for each pool of the cache the form of a row or of an entry.
        token_bytes: what all layers keep of a token.
        entry_bytes: what all layers keep of a sequence.
        free: bytes that are free on the device.
    """

    forms: Sequence[Form | None]
    token_bytes: int
    entry_bytes: int
    free: int

    @classmethod
    def of(cls, model: GPT | ParallelGPT, tokens: int, block_size: int) -> CacheForms:
        """Run a pass of a sequence of so many tokens; ranks of a replica, and replicas that share experts, together."""
        cache = Cache(model.layers, 1, tokens, BlockPool(1, -(-tokens // block_size), block_size))
        sampling = PassSampling(TokenCounts(1), [Request(0, [0] * tokens, tokens, 1)])
        run_pass(model, cache, [0], [[0] * tokens], sampling)
        forms, token, entry = cache.forms()
        cache.drop()
        return cls(forms, token, entry, _free(device_of(model)))

    def bytes(self, rows: int, entries: int) -> int:
        """Return what so many rows and entries take."""
        return rows * self.token_bytes + entries * self.entry_bytes

    def blocks(self, memory: Memory, block_size: int, entries: int, most: int) -> int:
        """Return how many blocks fit, beside a dummy block and ``entries`` for sequences, but at most ``most``.

        Raises:
            ConfigurationError: none fits.
        """
        size = memory if isinstance(memory, int) else math.floor(memory * self.free)
        rest = size - entries * self.entry_bytes
        # A stage of recurrent layers alone has no rows.
        found = rest // (self.token_bytes * block_size) - 1 if self.token_bytes else (most if rest >= 0 else 0)
        if found < 1:
            needed = 2 * block_size * self.token_bytes + entries * self.entry_bytes
            raise ConfigurationError(
                f"cache_memory={memory!r} is {size} bytes, and a block of {block_size} tokens, a dummy block and "
                f"{entries} entries for sequences take {needed}; give more, or lower block_size or max_sequences."
            )
        return min(found, most)


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        # What torch holds and no tensor uses is free, too.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

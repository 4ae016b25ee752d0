"""Typed options of the strategy that are more than one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megalight.errors import ConfigurationError

Level = Literal["no_shard", "optim"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """How data-parallel replicas share work and memory.

    Attributes:
        level: ``no_shard``: every replica holds everything, gradients are all-reduced. ``optim``: optimizer state and
            masters are sharded over the replicas, gradients reduce-scattered, parameters all-gathered (ZeRO-1).
        gradient_dtype: of the gradient buffers: ``float32`` or ``bfloat16``. None: float32, or float64 where the
            weights are.
        reduce_dtype: of gradients while they travel. None: that of the buffers.
        bucket_size: elements of one reduction. None: chosen from the number of replicas.
        overlap_grad_reduce: reduce buckets while the backward still runs.
        overlap_param_gather: gather parameters while the next forward already runs.
    """

    level: Level = "optim"
    gradient_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    reduce_dtype: Literal["float32", "bfloat16", "float64"] | None = None
    bucket_size: int | None = None
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True

    def __post_init__(self) -> None:
        if self.level not in ("no_shard", "optim"):
            raise ConfigurationError(f"data_parallel.level={self.level!r}; it must be 'no_shard' or 'optim'.")
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ConfigurationError(f"data_parallel.bucket_size={self.bucket_size}; it must be at least 1 element.")

    @staticmethod
    def dtype(name: str | None) -> torch.dtype | None:
        """The torch dtype of a dtype's name."""
        return None if name is None else DTYPES[name]

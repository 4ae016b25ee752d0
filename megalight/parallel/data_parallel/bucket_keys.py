"""Bucket keys: parameters with equal keys share buckets, and each key has process groups of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.buffers import Groups
from megalight.parallel.data_parallel.fp8_parameters import storage_format_of
from megalight.parallel.data_parallel.layout import BucketKey, Level, ParamInfo
from megalight.parallel.data_parallel.masters import masters_of
from megalight.parallel.groups import check_max_ctas, new_group, shared_group
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec


@dataclass(frozen=True)
class BucketKeys:
    """Finds the kinds of the parameters of one engine.

    Attributes:
        mesh: the split of models without a mesh of their own.
        level: what data-parallel ranks divide.
        replicate, divide_replicas: see :class:`BucketKey`.
        may_be_quantized: whether trained parameters may be stored in FP8, cast from masters.
    """

    mesh: ParallelMesh
    level: Level
    replicate: int
    divide_replicas: bool
    may_be_quantized: bool

    def of(self, info: ParamInfo, grad_dtype: torch.dtype | None = None) -> BucketKey:
        """Return the kind of a parameter.

        Args:
            info: the parameter.
            grad_dtype: dtype of its gradient buffer. None: float32, or float64 for float64 parameters.

        Raises:
            ConfigurationError: it is quantized, and replicas divide its masters.
        """
        kind = BucketKey(
            info.parameter.dtype,
            # Gradients of half precision are summed over micro-batches in float32, or small terms would be lost.
            grad_dtype or _wide(info.parameter.dtype),
            info.group,
            _shared(info.spec),
            info.chunk,
            storage_format_of(info.parameter),
            info.mesh or self.mesh,
            info.spec.data,
            replicate=self.replicate,
            divide_replicas=self.divide_replicas,
        )
        if info.parameter.requires_grad and self.may_be_quantized:
            gathered = self.level.state and len(kind.shard_ranks) > 1
            # Beside wider masters, weights are copies, and codes are smaller ones.
            spared = gathered or masters_of(kind, None) != kind.param_dtype
            kind = replace(kind, codes=storage_format_of(info.parameter, spared))
        if kind.codes is not None and self.divide_replicas:
            raise ConfigurationError(
                f"{info.name} is stored as 8-bit codes (primary_weights), which each group of replicas casts from "
                "masters of its own; leave primary_weights out, or use advanced.replicate_optimizer=True."
            )
        # A single rank holds all shards. Gathers would only copy.
        if info.unit is None or not self.level.gradients or len(kind.shard_ranks) == 1:
            return kind  # always whole
        return replace(kind, unit=info.unit)


def _shared(spec: ShardSpec) -> str:
    """Return the tensor's name if other pipeline stages hold it as well, else an empty string."""
    # Such a tensor is a tied weight: the first and the last stage each have one term of its gradient.
    return next((p.name for p in spec.pieces if any(axis.startswith("pp") for axis in p.partial)), "")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# The process groups over which buckets of one kind are sent.
#
# Their communicators are for data parallelism alone. A communicator sends one message after the other, and buckets
# take long: what the next layer waits for (counts of tokens, keys of other ranks, sums) would queue behind all of
# them.


def groups_of(kind: BucketKey, max_ctas: int | None, purpose: str = "data parallelism") -> Groups:
    """Return the process groups of the buckets of a kind, over communicators for this purpose alone."""
    made: dict[tuple[int, ...], ProcessGroup | None] = {}

    def group(*axes: str) -> ProcessGroup | None:
        # The same ranks under other names of axes share a group: a second one
        # would cost a communicator of its own.
        ranks = kind.mesh.ranks(*axes)
        if ranks not in made:
            if len(ranks) == 1:
                made[ranks] = None
            elif max_ctas is not None:
                check_max_ctas("max_ctas", max_ctas, dist.get_backend())
                made[ranks] = new_group(ranks, purpose, max_ctas=max_ctas)
            else:
                made[ranks] = shared_group(ranks, purpose)
        return made[ranks]

    return Groups(group(*kind.data), group(*kind.shard_axes), group(*kind.replica_axes))
